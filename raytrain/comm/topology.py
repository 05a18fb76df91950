"""How a sum over all ranks goes: in one ring, or inside each node, between nodes, and inside again."""

from collections.abc import Callable, Hashable, Sequence

import torch

from raytrain.comm.group import Group

Between = Callable[[torch.Tensor, Group], None]
"""Sums a part over the ranks of a group, one on each node, in place; perhaps with compression."""


class Topology:
    """Sums over ranks that stand on nodes. All ranks must construct it, in the same order. For one thread.

    A node's first m ranks, with m the fewest that any node has, each take a part of the tensor: they sum it inside
    their node, then with their peers on the other nodes, then spread it inside the node. So all of a node's links to
    the others are used, and each byte leaves a node once. With one rank a node it is a flat sum over all of them.

    Args:
        nodes: the ranks on each.
        rank: this one.
        whole: take the tensor as one part, of a node's first rank.
    """

    def __init__(self, nodes: Sequence[Sequence[int]], rank: int, *, whole: bool = False) -> None:
        self.nodes = len(nodes)
        self._parts = 1 if whole else min(len(ranks) for ranks in nodes)
        self._ranks = next(ranks for ranks in nodes if rank in ranks)
        self._place = self._ranks.index(rank)
        self._inside = {ranks[0]: Group(ranks) for ranks in nodes if len(ranks) > 1}.get(self._ranks[0])
        between = [Group([ranks[i] for ranks in nodes]) for i in range(self._parts) if len(nodes) > 1]
        self._between = between[self._place] if self._place < len(between) else None

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank has sent."""
        return sum(group.sent_bytes for group in (self._inside, self._between) if group is not None)

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a flat tensor that this rank sums between nodes, empty if it sums none: a view."""
        return tensor.tensor_split(self._parts)[self._place] if self._place < self._parts else tensor[:0]

    def own_share(self, part: torch.Tensor) -> torch.Tensor:
        """Of this rank's part, the share of this node, where the nodes divide the sum among themselves: a view."""
        return part if self._between is None else part.tensor_split(self._between.size)[self._between.place]

    def sum(self, tensor: torch.Tensor, between: Between = lambda part, group: group.all_reduce(part)) -> None:
        """Sums a flat tensor over all ranks, in place. All ranks must call."""
        parts = tensor.tensor_split(self._parts)
        if self._inside is not None:
            for part, leader in zip(parts, self._ranks, strict=False):
                self._inside.reduce(part, leader)
        if self._between is not None:
            between(parts[self._place], self._between)
        if self._inside is not None:
            for part, leader in zip(parts, self._ranks, strict=False):
                self._inside.broadcast(part, leader)

    def close(self) -> None:
        """Ends its groups. All ranks must call."""
        for group in (self._inside, self._between):
            if group is not None:
                group.close()


def nodes_of(places: Sequence[Hashable], workers_per_node: int | None) -> list[list[int]]:
    """The ranks on each node, in the order of the nodes' first ranks.

    Args:
        places: what tells the node of each rank.
        workers_per_node: count so many ranks, one after another, as a node, whatever the places.
    """
    nodes: dict[Hashable, list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place if workers_per_node is None else rank // workers_per_node, []).append(rank)
    return list(nodes.values())
