"""Signs of Adam's momentum in place of gradients."""

import torch

from raytrain.comm.bucket import Bucket, FlatOrder
from raytrain.comm.compression import Compression
from raytrain.comm.onebit import Onebit
from raytrain.comm.topology import Topology
from raytrain.optim import OnebitAdam


class OnebitMomentum(Compression):
    """What 1-bit Adam sums (Tang 2021, arXiv 2102.02888): gradients until it freezes, then momenta, see `Onebit`.

    A rank's momentum is the common one of the step before, moved by the rank's own gradient; the sum over W ranks of
    beta1 m / W + (1 - beta1) g is the common one of this step. It is sent as what it moves the weights by, divided by
    the root of the frozen variance: there one scale fits all of a bucket. Where the paper sends the momentum itself,
    a weight with next to no variance, such as one that only ever sees padding, is thrown far off by the others' scale.
    """

    def __init__(self, order: FlatOrder, optimizer: OnebitAdam, world_size: int) -> None:
        self._onebit, self._optimizer, self._world_size = Onebit(order), optimizer, world_size
        optimizer.takes_momenta = world_size > 1

    def sum(self, bucket: Bucket, topology: Topology) -> None:
        if not self._optimizer.is_frozen:
            topology.sum(bucket.tensor)
            return
        optimizer, beta = self._optimizer, self._optimizer.betas[0]
        step = optimizer.param_groups[0]["step"] + 1
        momenta = _flat([optimizer.state[parameter]["exp_avg"] for parameter in bucket.parameters])
        scales = _flat([optimizer.scale_of(parameter, step) for parameter in bucket.parameters])
        bucket.tensor.mul_(1 - beta).add_(momenta, alpha=beta / self._world_size).div_(scales)
        self._onebit.sum(bucket, topology)
        bucket.tensor.mul_(scales.masked_fill_(scales.isinf(), 0))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._onebit.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._onebit.load_state_dict(state)


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of the elements of all, each in the order in which it lies in memory."""
    return torch.cat([tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors])
