"""Integer sums: the same bits for any number of workers.

A floating-point sum depends on the order and the grouping of its terms, an integer sum does not. Each
micro-batch's gradient is scaled and rounded to int32, and the integers are summed, on this rank and then over
the ranks. A tensor's scale is a power of two that follows from its largest gradient in the step before, over
all micro-batches, and so not from how they were dealt. It leaves room for gradients HEADROOM times as large. A
gradient that needs more room, or is so small that less than MIN_BITS of it would be left, is noticed on
whichever rank has it; all ranks then compute the step again with scales made for it.

Losses and batch-norm statistics are few, and go as int64 with one fixed scale.

The method is that of reproducible summation by pre-rounding (Demmel and Nguyen 2015), with the scale known
beforehand instead of agreed on in a pass of its own.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from raytrain.comm.step import Reduction, Totals
from raytrain.distributed import Runtime
from raytrain.model import Classifier, StepBatchNorm

HEADROOM = 16.0
MIN_BITS = 16
LARGEST_EXPONENT = 100.0
"""A gradient of zero says nothing of the next one; a scale of 2**100 makes any that matters noticed."""
STATISTICS_SCALE = 2.0**32
LARGEST_STATISTIC = 2.0**24


class ExactReduction(Reduction):
    """Sums that do not depend on the number of ranks. All ranks must construct it."""

    def __init__(self, model: Classifier, batchnorm: StepBatchNorm, runtime: Runtime) -> None:
        self.module = model
        self._batchnorm, self._runtime = batchnorm, runtime
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sums, self._sum_of = _flat_like(self._parameters, torch.int32)
        self._gradients, self._gradient_of = _flat_like(self._parameters, torch.float32)
        self._largest_before = torch.zeros(len(self._parameters), device=runtime.device)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, index))

    def begin(self, micro_batches: int) -> float:
        self._limit = float(2**31 // micro_batches - 1)
        exponent = torch.log2(self._limit / HEADROOM / self._largest_before).floor_()
        self._scale = torch.exp2(exponent.clamp_(-LARGEST_EXPONENT, LARGEST_EXPONENT))
        self._scale_of = self._scale.unbind()
        self._largest = torch.zeros_like(self._scale)
        self._bad = torch.zeros(self._runtime.world_size, device=self._runtime.device)
        self._statistics = torch.zeros(2 + self._batchnorm.seen.numel(), dtype=torch.int64, device=self._runtime.device)
        self._sums.zero_()
        for parameter in self._parameters:
            parameter.grad = None
        return 1.0

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        del last
        return nullcontext()

    def add(self, loss: torch.Tensor) -> None:
        values = torch.cat([loss.view(1), loss.new_zeros(1), self._batchnorm.seen]).double()
        self._bad[self._runtime.rank] += ~(values.abs() <= LARGEST_STATISTIC).all()
        self._statistics += (values * STATISTICS_SCALE).round_().long()

    def finish(self, stop: int) -> Totals | None:
        agreed = self._runtime.max(torch.cat([self._bad, ~self._largest.isfinite(), self._largest.nan_to_num(0, 0)]))
        world_size, count = self._runtime.world_size, len(self._parameters)
        bad, not_finite, largest = agreed.split([world_size, count, count])
        used = largest * self._scale
        unfit = (used > self._limit) | ((used < 2**MIN_BITS) & (largest > 0) & (self._scale < 2**LARGEST_EXPONENT))
        if not_finite.any():  # as a float sum would have it: the caller finds no number either
            self._gradients.fill_(math.inf)
        elif unfit.any():
            self._largest_before = largest
            return None
        else:
            self._largest_before = largest
            self._runtime.sum(self._sums)
            for integers, gradient, scale in zip(self._sum_of, self._gradient_of, self._scale_of, strict=True):
                torch.div(integers, scale, out=gradient)
        for parameter, gradient in zip(self._parameters, self._gradient_of, strict=True):
            parameter.grad = gradient
        self._statistics[1] = int(stop * STATISTICS_SCALE)
        totals = self._runtime.sum(self._statistics).double() / STATISTICS_SCALE
        return Totals(totals[0], totals[1], bad, totals[2:].float())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"largest": self._largest_before}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._largest_before.copy_(state["largest"])

    def _take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Adds a gradient to the sums as soon as it is there, while it is in the cache, and lets it go."""
        gradient = parameter.grad
        assert gradient is not None
        self._largest[index] = torch.maximum(self._largest[index], torch.linalg.vector_norm(gradient, math.inf))
        self._sum_of[index].add_(gradient.mul_(self._scale_of[index]).round_().int())
        parameter.grad = None


def _flat_like(parameters: list[torch.nn.Parameter], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One vector of zeros, and views of it with the parameters' shapes and strides."""
    sizes = [p.numel() for p in parameters]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
    views = [part.as_strided(p.shape, p.stride(), part.storage_offset()) for part, p in zip(flat.split(sizes), parameters, strict=True)]
    return flat, views
