"""Floating-point sums by DistributedDataParallel, reduced once a step, beside the last backward pass."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from raytrain.comm.step import Reduction, Totals
from raytrain.config import Comm
from raytrain.distributed import Runtime
from raytrain.model import Classifier, StepBatchNorm


class FloatReduction(Reduction):
    """DistributedDataParallel over uneven numbers of micro-batches. All ranks must construct it."""

    def __init__(
        self, model: Classifier, batchnorm: StepBatchNorm, runtime: Runtime, comm: Comm, image_size: int
    ) -> None:
        self._batchnorm, self._runtime, self._image_size = batchnorm, runtime, image_size
        self._ddp = None
        if runtime.world_size > 1:
            self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=comm.bucket_cap_mb)
            # buffers are batch norm's statistics of a micro-batch; theirs are summed below, never rank 0's broadcast
            # (as an attribute, since the argument's name differs between versions of torch)
            self._ddp.broadcast_buffers = False
            self._ddp.register_comm_hook(None, _sum)
            # DistributedDataParallel lays its buckets out anew after the first backward pass, and with the layout
            # changes the order of a ring's sums. A pass over nothing here makes a resumed run sum as it would have.
            self._contribute_nothing()
            batchnorm.seen.copy_(batchnorm.running)
        self.module = self._ddp or model

    def begin(self, micro_batches: int) -> None:
        del micro_batches
        for parameter in self.module.parameters():
            parameter.grad = None
        self._computed = False
        self._totals = torch.zeros(
            3 + self._runtime.world_size + self._batchnorm.seen.numel(), device=self._runtime.device
        )

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        return self._ddp.no_sync() if self._ddp and not last else nullcontext()

    def add(self, loss: torch.Tensor, images: int) -> None:
        self._computed = True
        self._totals[0] += loss
        self._totals[1] += images
        self._totals[3 + self._runtime.rank] += ~loss.isfinite()
        self._totals[3 + self._runtime.world_size :] += self._batchnorm.seen

    def finish(self, stop: int) -> Totals:
        if self._ddp and not self._computed:
            self._contribute_nothing()
        self._totals[2] = stop
        totals = self._runtime.sum(self._totals)
        few, bad, statistics = totals.split([3, self._runtime.world_size, self._batchnorm.seen.numel()])
        return Totals(few[0], few[1], few[2], bad, statistics)

    def _contribute_nothing(self) -> None:
        """A backward pass with gradients of zero, for the ranks that a short last step has nothing for."""
        assert self._ddp is not None
        images = torch.zeros(2, self._image_size, self._image_size, 3, dtype=torch.uint8, device=self._runtime.device)
        (self._ddp(images).sum() * 0.0).backward()


def _sum(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    # DistributedDataParallel itself averages, and a loss scaled up by 3 for 3 ranks rounds differently in every
    # operation of the backward pass
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
