"""Floating-point sums by DistributedDataParallel, reduced once a step, beside the last backward pass."""

import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from raytrain.comm.bucket import Bucket
from raytrain.comm.compression import Compression, Uncompressed
from raytrain.comm.lane import Future, Lane
from raytrain.comm.step import Clock, Outcome, Reduction, Totals, rescale
from raytrain.comm.topology import Topology
from raytrain.config import Config
from raytrain.distributed import Runtime
from raytrain.model import Classifier, StepBatchNorm


class FloatReduction(Reduction):
    """DistributedDataParallel over uneven numbers of micro-batches. All ranks must construct it.

    Args:
        config: the run.
        model: the network.
        batchnorm: its statistics.
        runtime: this process.
        nodes: the ranks on each node; for a flat topology each on its own.
        compression: of the sums.
    """

    def __init__(
        self,
        config: Config,
        model: Classifier,
        batchnorm: StepBatchNorm,
        runtime: Runtime,
        nodes: list[list[int]],
        compression: Compression,
    ) -> None:
        self._batchnorm, self._runtime, self._compression = batchnorm, runtime, compression
        self._image_size, self._skips_images = config.data.image_size, config.data.on_bad_image == "skip"
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._gradient_bytes = sum(p.numel() * p.element_size() for p in self._parameters)
        self.clock, self._steps = Clock(runtime), 0
        self._ddp = self._lane = self._topology = None
        if runtime.world_size > 1:
            comm = config.comm
            self._ddp = DistributedDataParallel(
                model,
                gradient_as_bucket_view=comm.gradient_as_bucket_view,
                bucket_cap_mb=comm.bucket_cap_mb,
                static_graph=comm.static_graph,
            )
            # buffers are batch norm's statistics of a micro-batch; theirs are summed below, never rank 0's broadcast
            # (as an attribute, since the argument's name differs between versions of torch)
            self._ddp.broadcast_buffers = False
            self._ddp.register_comm_hook(weakref.ref(self), _call_hook)
            # DistributedDataParallel lays its buckets out anew after the first backward pass, and with the layout
            # changes the order of a ring's sums. A pass over nothing here makes a resumed run sum as it would have.
            self._contribute_nothing()
            batchnorm.seen.copy_(batchnorm.running)
            if self._needs_lane(nodes):
                self._lane = Lane(runtime.device)
                self._topology = Topology(nodes, runtime.rank, whole=compression.is_whole)
            self.clock = Clock(runtime)  # without that pass
        self.module = self._ddp or model

    def begin(self, step: int, micro_batches: int, images: int) -> None:
        self._step, self._micro_batches, self._images = step, micro_batches, images
        for parameter in self._parameters:
            parameter.grad = None
        self._own_images, self._own_micro_batches = 0, 0
        size = 4 + self._runtime.world_size + self._batchnorm.seen.numel()
        self._sums = torch.zeros(size, device=self._runtime.device)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        return self._ddp.no_sync() if self._ddp and not last else nullcontext()

    def add(self, loss: torch.Tensor, images: int) -> None:
        self.clock.stop()
        self._own_images += images
        self._own_micro_batches += 1
        self._sums[0] += loss
        self._sums[1] += images
        self._sums[4 + self._runtime.rank] += ~loss.isfinite()
        self._sums[4 + self._runtime.world_size :] += self._batchnorm.seen

    def finish(self, stop: int = 0, *, save: bool = False, agree: bool = True) -> Outcome:
        del agree  # they do after each step
        self._complete(stop, save)
        self.clock.start()
        self._runtime.sum(self._sums)
        self.clock.stop()
        self._steps += 1
        return self._outcome(self._step, self._sums, self._micro_batches, self._images)

    @property
    def sent_bytes(self) -> float:
        if self._topology is not None:
            return self._topology.sent_bytes
        size = self._runtime.world_size
        return 2 * (size - 1) / size * self._gradient_bytes * self._steps

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._compression.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._compression.load_state_dict(state)

    def close(self) -> None:
        if self._topology is not None:
            self._topology.close()

    def _needs_lane(self, nodes: list[list[int]]) -> bool:
        """Whether sums are anything but DistributedDataParallel's own."""
        return not isinstance(self._compression, Uncompressed) or any(len(ranks) > 1 for ranks in nodes)

    def _complete(self, stop: int, save: bool) -> None:  # noqa: FBT001
        """Ends what this rank has to do with the step before the sums go over the ranks."""
        if self._ddp and not self._own_micro_batches:
            self._contribute_nothing()
            self.clock.stop()
        if self._lane is not None:
            self._lane.check()
        self._sums[2], self._sums[3] = stop, save

    def _outcome(self, step: int, sums: torch.Tensor, micro_batches: int, images: int) -> Outcome:
        totals = Totals.of(sums[: 4 + self._runtime.world_size])
        if self._skips_images:
            rescale(self._parameters, images, totals.images)
        return Outcome(step, sums[4 + self._runtime.world_size :] / micro_batches, totals)

    def _contribute_nothing(self) -> None:
        """A backward pass with gradients of zero, for the ranks that a short last step has nothing for."""
        assert self._ddp is not None
        images = torch.zeros(2, self._image_size, self._image_size, 3, dtype=torch.uint8, device=self._runtime.device)
        (self._ddp(images).sum() * 0.0).backward()

    def _hook(self, bucket: GradBucket) -> Future:
        if self._lane is None or self._topology is None:
            future = _sum(bucket)
        else:
            parameters = bucket.parameters()
            own = Bucket(bucket.index(), bucket.buffer(), parameters, bucket.is_last())
            future = self._lane.submit(partial(self._compression.sum, own, self._topology), own.tensor)
        if bucket.is_last():  # from here on the backward pass does nothing but wait
            self.clock.start()
        return future


def _call_hook(reduction: "weakref.ref[FloatReduction]", bucket: GradBucket) -> Future:
    # by a weak reference, since Python's garbage collector does not see those that DistributedDataParallel holds
    own = reduction()
    assert own is not None
    return own._hook(bucket)  # noqa: SLF001


def _sum(bucket: GradBucket) -> Future:
    # DistributedDataParallel itself averages, and a loss scaled up by 3 for 3 ranks rounds differently in every
    # operation of the backward pass
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
