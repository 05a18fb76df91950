"""Integer sums: the same bits for any number of workers.

A floating-point sum depends on the order and the grouping of its terms, an integer sum does not. Each
micro-batch's gradient is scaled and rounded to int32, and the integers are summed, on this rank and then over
the ranks. A tensor's scale is a power of two that follows from its largest gradient in the step before, over
all micro-batches, and so not from how they were dealt. It leaves room for gradients HEADROOM times as large. A
gradient that needs more room, or that has shrunk by more than SHRINKAGE, so that its lower bits would be lost, is
noticed on whichever rank has it; all ranks then compute the step again with scales made for it. So with n
micro-batches a step the largest gradient of a tensor keeps at least 31 - log2(n * HEADROOM * SHRINKAGE) bits: 21 of
two micro-batches, 17 of 32; where it changes little from step to step, 5 more.

Losses and batch-norm statistics are few, and go as int64 with one fixed scale.

The method is that of reproducible summation by pre-rounding (Demmel and Nguyen 2015), with the scale known
beforehand instead of agreed on in a pass of its own.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from raytrain.comm.lane import Lane
from raytrain.comm.step import Clock, Outcome, Reduction, Totals, rescale
from raytrain.comm.topology import Topology
from raytrain.config import Config
from raytrain.distributed import Runtime
from raytrain.errors import NonFiniteError
from raytrain.model import Classifier, StepBatchNorm

HEADROOM = 16.0
SHRINKAGE = 32.0
LARGEST_EXPONENT = 100.0
"""A gradient of zero says nothing of the next one; a scale of 2**100 makes any that matters noticed."""
STATISTICS_SCALE = 2.0**28
LARGEST_STATISTIC = 2.0**28
BUCKET = 2**22
"""Elements that are summed over the ranks together; 16 MiB."""
BLOCK = 2**16
"""Elements; 256 KiB, which a core's own cache holds."""


class ExactReduction(Reduction):
    """Sums that do not depend on the number of ranks. All ranks must construct it."""

    def __init__(
        self, config: Config, model: Classifier, batchnorm: StepBatchNorm, runtime: Runtime, nodes: list[list[int]]
    ) -> None:
        self.module, self.clock, self._skips_images = model, Clock(runtime), config.data.on_bad_image == "skip"
        self._batchnorm, self._runtime = batchnorm, runtime
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() for p in self._parameters]
        self._sums = torch.zeros(sum(sizes), dtype=torch.int32, device=runtime.device)
        self._gradients = torch.zeros(sum(sizes), device=runtime.device)
        self._gradients_of = self._gradients.split(sizes)
        self._sum_blocks_of = [_blocks(sums) for sums in self._sums.split(sizes)]
        self._gradient_blocks_of = [_blocks(gradient) for gradient in self._gradients_of]
        self._buckets = _make_buckets(sizes)
        offsets = [0, *accumulate(sizes)]
        self._bucket_sums = [self._sums[offsets[b.start] : offsets[b.stop]] for b in self._buckets]
        self._largest_before = torch.zeros(len(sizes), device=runtime.device)
        self._lane = self._topology = None
        if any(len(ranks) > 1 for ranks in nodes):
            self._lane, self._topology = Lane(runtime.device), Topology(nodes, runtime.rank)
        self._sent_bytes = 0.0
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, index))

    def begin(self, step: int, micro_batches: int, images: int) -> None:
        self._step, self._micro_batches, self._images = step, micro_batches, images
        self._limit = float(2**31 // micro_batches - 1)
        exponent = torch.log2(self._limit / HEADROOM / self._largest_before).floor_()
        self._scale = torch.exp2(exponent.clamp_(-LARGEST_EXPONENT, LARGEST_EXPONENT))
        self._scale_of = self._scale.tolist()
        zero = self._scale.new_zeros(())
        self._extremes = [[zero] for _ in self._parameters]
        self._bad = torch.zeros(self._runtime.world_size, device=self._runtime.device)
        self._too_large = torch.zeros(1, device=self._runtime.device)
        self._statistics = torch.zeros(4 + self._batchnorm.seen.numel(), dtype=torch.int64, device=self._runtime.device)
        self._is_first = [True] * len(self._parameters)
        self._is_last_pass = False
        self._complete: set[int] = set()
        self._started: list[Callable[[], object]] = []
        for parameter in self._parameters:
            parameter.grad = None

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        self._is_last_pass = last
        return nullcontext()

    def add(self, loss: torch.Tensor, images: int) -> None:
        values = torch.cat([loss.view(1), loss.new_tensor([images, 0, 0]), self._batchnorm.seen]).double()
        self._bad[self._runtime.rank] += ~loss.isfinite()
        self._too_large += loss.isfinite() & ~(values.abs() <= LARGEST_STATISTIC).all()
        self._statistics += (values * STATISTICS_SCALE).round_().long()

    def finish(self, stop: int = 0, *, save: bool = False, agree: bool = True) -> Outcome | None:
        del agree  # they do after each step
        self._start_all()
        self.clock.start()
        world_size, count = self._runtime.world_size, len(self._parameters)
        own = torch.stack([torch.stack(extremes).abs().amax() for extremes in self._extremes])
        agreed = torch.cat([self._bad, self._too_large, ~own.isfinite(), own.nan_to_num(0, 0)])
        bad, too_large, not_finite, largest = self._runtime.max(agreed).split([world_size, 1, count, count])
        for wait in self._started:
            wait()
        self.clock.stop()
        if self._lane is not None:
            self._lane.check()
        used = largest * self._scale
        too_small = (used < self._limit / HEADROOM / SHRINKAGE) & (largest > 0) & (self._scale < 2**LARGEST_EXPONENT)
        if too_large:
            raise NonFiniteError(
                f"a loss or a statistic of batch norm is above {LARGEST_STATISTIC:g}, more than exact sums hold; lower "
                "optim.base_lr, or set comm.reduction=float"
            )
        if not_finite.any():  # as a float sum would have it: the caller finds no number either
            self._gradients.fill_(math.inf)
        elif ((used >= self._limit) | too_small).any():
            self._largest_before = largest
            return None
        else:
            self._largest_before = largest
            self._take_sums()
        for parameter, gradient in zip(self._parameters, self._gradients_of, strict=True):
            parameter.grad = gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())
        self._statistics[2], self._statistics[3] = int(stop * STATISTICS_SCALE), int(save * STATISTICS_SCALE)
        sums = self._runtime.sum(self._statistics).double() / STATISTICS_SCALE
        if self._skips_images:
            rescale(self._parameters, self._images, sums[1])
        totals = Totals(sums[0], sums[1], sums[2], sums[3], bad)
        return Outcome(self._step, sums[4:].float() / self._micro_batches, totals)

    @property
    def sent_bytes(self) -> float:
        return self._sent_bytes if self._topology is None else self._topology.sent_bytes

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"largest": self._largest_before}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._largest_before.copy_(state["largest"])

    def close(self) -> None:
        if self._topology is not None:
            self._topology.close()

    def _take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Adds a gradient to the sums as soon as it is there, and lets it go."""
        assert parameter.grad is not None
        gradient = parameter.grad.as_strided((parameter.numel(),), (1,))  # its elements in the order of memory
        parameter.grad = None
        scale = self._scale_of[index]
        for block, sums in zip(_blocks(gradient), self._sum_blocks_of[index], strict=True):
            self._extremes[index] += block.aminmax()
            rounded = (block * scale).round_()
            if self._is_first[index]:
                sums.copy_(rounded)
            else:
                sums.add_(rounded.int())
        self._is_first[index] = False
        if self._is_last_pass:
            self._complete.add(index)
            while len(self._started) < len(self._buckets) and self._complete.issuperset(
                self._buckets[len(self._started)]
            ):
                self._start_sum(self._bucket_sums[len(self._started)])

    def _start_all(self) -> None:
        """Starts the sums that this rank's last backward pass has not started, as all of them if it had none."""
        for bucket, sums in zip(
            self._buckets[len(self._started) :], self._bucket_sums[len(self._started) :], strict=True
        ):
            for index in bucket:
                for block in self._sum_blocks_of[index] if self._is_first[index] else ():
                    block.zero_()
            self._start_sum(sums)

    def _start_sum(self, sums: torch.Tensor) -> None:
        if self._lane is not None and (topology := self._topology) is not None:
            self._started.append(self._lane.submit(lambda: topology.sum(sums), sums).wait)
        else:
            world_size = self._runtime.world_size
            self._sent_bytes += 2 * (world_size - 1) / world_size * sums.nbytes
            self._started.append(self._runtime.start_sum(sums))

    def _take_sums(self) -> None:
        for gradients, sums, scale in zip(self._gradient_blocks_of, self._sum_blocks_of, self._scale_of, strict=True):
            for block, integers in zip(gradients, sums, strict=True):
                block.copy_(integers).mul_(1 / scale)  # a power of two, so exact


def _make_buckets(sizes: list[int]) -> list[range]:
    """Parameters whose gradients are summed together, in the order in which a backward pass comes to them."""
    buckets, stop, total = [], len(sizes), 0
    for index in reversed(range(len(sizes))):
        total += sizes[index]
        if total >= BUCKET or index == 0:
            buckets.append(range(index, stop))
            stop, total = index, 0
    return buckets


def _blocks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Parts that stay in a CPU's cache from one operation to the next."""
    return tensor.split(BLOCK) if tensor.device.type == "cpu" else (tensor,)
