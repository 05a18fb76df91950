"""What goes over the wire in place of a bucket's gradients in float32."""

from abc import ABC, abstractmethod

import torch

from raytrain.comm.bucket import Bucket
from raytrain.comm.group import Group
from raytrain.comm.topology import Topology


class Compression(ABC):
    """Sums buckets over all ranks, with fewer bits than they have. For one thread."""

    is_whole = False
    """Whether it needs a bucket as one part, see `Topology`."""

    @abstractmethod
    def sum(self, bucket: Bucket, topology: Topology) -> None:
        """Leaves the sum over all ranks in the bucket, the same bits on each. All ranks must call."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """See `Reduction.state_dict`. All ranks must call."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over a state, of any number of ranks."""
        assert not state


class Uncompressed(Compression):
    """Sums of float32."""

    def sum(self, bucket: Bucket, topology: Topology) -> None:
        topology.sum(bucket.tensor)


class Half(Compression):
    """Sums of 16 bits, float16 or bfloat16: gradients are rounded to them before the sum, and so are sums."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def sum(self, bucket: Bucket, topology: Topology) -> None:
        def between(part: torch.Tensor, group: Group) -> None:
            half = part.to(self._dtype)
            group.all_reduce(half)
            part.copy_(half)

        topology.sum(bucket.tensor, between)
