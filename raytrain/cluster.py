"""How many workers a cluster has room for, and on which of its nodes."""

import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from raytrain.config import Scaling
from raytrain.errors import ResourceError

CONNECT_SECONDS = 2.0
"""In which a node that is there takes a connection."""

Node = Mapping[str, Any]
"""As `ray.nodes()` gives it."""


class Allotment(NamedTuple):
    """Workers that a cluster has room for."""

    num_workers: int
    resources: dict[str, float]
    """Of each of them: {"CPU": n} or {"CPU": n, "GPU": 1}."""


def usable_nodes(nodes: Sequence[Node], leaving: Collection[str] = ()) -> list[Node]:
    """Those that are alive, take a connection, and are not about to leave.

    Ray itself takes up to a minute to notice that a node has lost its power or its link; a worker that is put there
    meanwhile waits for as long.

    Args:
        nodes: all.
        leaving: ids of those that are being drained.
    """
    alive = [node for node in nodes if node["Alive"] and node["NodeID"] not in leaving]
    with ThreadPoolExecutor(max(1, min(len(alive), 64))) as executor:
        return [node for node, there in zip(alive, executor.map(answers, alive), strict=True) if there]


def answers(node: Node) -> bool:
    """Whether a node takes a connection."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def allot(scaling: Scaling, nodes: Sequence[Node]) -> Allotment:
    """The most workers that the config asks for and the nodes can hold, each on one node.

    Raises:
        ResourceError: they cannot hold the fewest that it asks for.
    """
    cpus, gpus = (sum(node["Resources"].get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    use_gpu = gpus > 0 if scaling.use_gpu is None else scaling.use_gpu
    for num_workers in range(scaling.max_workers, scaling.min_workers - 1, -1):
        need = _need(scaling, num_workers, cpus, use_gpu=use_gpu)
        while scaling.cpus_per_worker is None and need["CPU"] > 1 and capacity(nodes, need) < num_workers:
            need["CPU"] -= 1  # an even share may not fit on uneven nodes
        if capacity(nodes, need) >= num_workers:
            return Allotment(num_workers, need)
    need = _need(scaling, scaling.min_workers, cpus, use_gpu=use_gpu)
    need["CPU"] = float(scaling.cpus_per_worker or 1)
    total = {kind: amount * scaling.min_workers for kind, amount in need.items()}
    raise ResourceError(
        f"scaling.num_workers {scaling.min_workers} needs {_amounts(total)} ({_amounts(need)} a worker, each on one "
        f"node), and the cluster has {_amounts({'CPU': cpus, 'GPU': gpus})} on {len(nodes)} node(s): at most "
        f"{capacity(nodes, need)} such workers"
    )


def capacity(nodes: Sequence[Node], need: Mapping[str, float]) -> int:
    """How many workers the nodes can hold, each on one of them."""
    return sum(min(int(node["Resources"].get(kind, 0) // amount) for kind, amount in need.items()) for node in nodes)


def _need(scaling: Scaling, num_workers: int, cpus: float, *, use_gpu: bool) -> dict[str, float]:
    share = max(1, int(cpus // num_workers))
    return {"CPU": float(scaling.cpus_per_worker or share), **({"GPU": 1.0} if use_gpu else {})}


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())
