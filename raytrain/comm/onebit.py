"""Signs in place of gradients, with error feedback."""

from functools import cache

import numpy as np
import torch

from raytrain.comm.bucket import Bucket, FlatOrder
from raytrain.comm.compression import Compression
from raytrain.comm.group import Group
from raytrain.comm.topology import Topology

BLOCK = 2**16
"""Elements that a CPU converts to float64 at a time; they stay in its cache."""


class Onebit(Compression):
    """Signs with one scale a bucket, and error feedback.

    A rank adds to a bucket what it could not say of the last one, sends the signs of the sum and their scale, the mean
    of the magnitudes (Seide 2014; Karimireddy 2019, arXiv 1901.09847), and keeps the difference. Signs do not add up to
    signs: so each rank takes in a share of the bucket from all, adds up what they stand for, and sends that on, again
    as signs with error feedback of its own (Tang 2021, arXiv 2102.02888). Both ways together send 1/32 of what a ring
    of float32 does.

    Checkpoint: only sums over the ranks are applied, so what counts of the ranks' errors is their sum. A checkpoint
    holds it. Whoever goes on from there, on any number of ranks, gives each of them an equal share.
    """

    def __init__(self, order: FlatOrder) -> None:
        self._order = order
        self._state: dict[str, torch.Tensor] = {}
        self._errors: dict[int, tuple[Bucket, torch.Tensor, torch.Tensor]] = {}
        self._topology: Topology | None = None

    def sum(self, bucket: Bucket, topology: Topology) -> None:
        if bucket.index not in self._errors:
            self._errors[bucket.index] = (bucket, *self._share(bucket, topology))
        self._topology = topology
        _, error, sum_error = self._errors[bucket.index]

        def between(part: torch.Tensor, group: Group) -> None:
            sum_signs(part, topology.own_part(error), topology.own_part(sum_error), group)

        topology.sum(bucket.tensor, between)

    def state_dict(self) -> dict[str, torch.Tensor]:
        if self._topology is not None:
            device = next(iter(self._errors.values()))[1].device
            self._state = {name: torch.zeros(self._order.size, device=device) for name in ("error", "sum_error")}
            for bucket, *errors in self._errors.values():
                for vector, error in zip(self._state.values(), errors, strict=True):
                    self._order.write(vector, bucket, error)
            for vector in self._state.values():
                self._topology.sum(vector)
            self._errors, self._topology = {}, None
        return self._state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._state, self._errors, self._topology = state, {}, None

    def _share(self, bucket: Bucket, topology: Topology) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank has of the errors that the state holds: both of the bucket's size, 0 where it has none."""
        error, sum_error = torch.zeros_like(bucket.tensor), torch.zeros_like(bucket.tensor)
        if self._state:
            part, own = topology.own_part(self._order.read(self._state["error"], bucket)), topology.own_part(error)
            own.copy_(part / topology.nodes)
            part = topology.own_part(self._order.read(self._state["sum_error"], bucket))
            topology.own_share(topology.own_part(sum_error)).copy_(topology.own_share(part))
        return error, sum_error


def sum_signs(part: torch.Tensor, error: torch.Tensor, sum_error: torch.Tensor, group: Group) -> None:
    """Sums a flat tensor over a group as signs, in place. All ranks of the group must call.

    Args:
        part: float32 [n].
        error: float32 [n], what this rank could not say of its last part; is added, and replaced.
        sum_error: float32 [n]; in this rank's share, what it could not say of the last sum.
        group: who takes part.
    """
    place = group.place
    shares, sum_errors = part.tensor_split(group.size), sum_error.tensor_split(group.size)
    scale = mean_magnitude(part.add_(error))
    received = group.exchange([encode(share, scale) for share in shares])
    torch.sub(part, torch.copysign(scale, part), out=error)
    own = shares[place].copy_(sum_errors[place])
    for message in received:
        own.add_(decode(message, own.numel()))
    scale = mean_magnitude(own)
    message = encode(own, scale)
    torch.sub(own, torch.copysign(scale, own), out=sum_errors[place])
    lengths = [4 + -(-share.numel() // 8) for share in shares]
    padded = [message.new_zeros(max(lengths)) for _ in shares]
    padded[place][: len(message)] = message
    group.all_gather(padded, padded[place].clone())
    for share, one in zip(shares, padded, strict=True):
        share.copy_(decode(one, share.numel()))


def mean_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Mean of the magnitudes, float32 []; summed in float64, in which the order is of no account."""
    blocks = tensor.split(BLOCK) if tensor.device.type == "cpu" else (tensor,)
    return (torch.stack([block.double().abs_().sum() for block in blocks]).sum() / max(tensor.numel(), 1)).float()


def encode(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Scale and signs of a flat float32 [n] as bytes: uint8 [4 + ceil(n / 8)], the bit of a minus 1, the first highest.

    Args:
        tensor: whose signs.
        scale: float32 [].
    """
    negative = tensor.signbit()
    if tensor.device.type == "cpu":
        bits = torch.from_numpy(np.packbits(negative.numpy()))
    else:
        eights = torch.nn.functional.pad(negative, (0, -len(tensor) % 8)).view(-1, 8)
        bits = (eights * (2 ** torch.arange(7, -1, -1, device=tensor.device))).sum(1).to(torch.uint8)
    return torch.cat([scale.view(1).view(torch.uint8), bits])


def decode(message: torch.Tensor, count: int) -> torch.Tensor:
    """What the first `count` signs of a message stand for: float32 [count], scale or -scale."""
    scale = message[:4].clone().view(torch.float32)
    return torch.index_select(_signs(message.device) * scale, 0, message[4:].int()).view(-1)[:count]


@cache
def _signs(device: torch.device) -> torch.Tensor:
    """The signs in each byte, float32 [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return (1 - 2 * torch.from_numpy(bits).float()).to(device)
