"""What every reduction offers to the loop, and what it hands back."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from raytrain.distributed import Runtime


class Totals(NamedTuple):
    """Sums over all ranks, of the steps since the last ones. Tensors lie on the device; reading one waits for it."""

    loss: torch.Tensor
    """Sum of the images' losses, float [] ."""
    images: torch.Tensor
    """Images behind that sum, float []: those of the steps but the ones that could not be decoded."""
    stop: torch.Tensor
    """Sum of the signals that ranks were given, float []; 0 where none was asked to stop."""
    save: torch.Tensor
    """Ranks for which a checkpoint is due by the clock, float []."""
    bad: torch.Tensor
    """Above 0 for each rank whose loss was not finite, float [world_size]."""

    @classmethod
    def of(cls, sums: torch.Tensor) -> "Totals":
        """Totals from a vector of them: float [4 + world_size]."""
        return cls(sums[0], sums[1], sums[2], sums[3], sums[4:])


class Outcome(NamedTuple):
    """What a step has come to."""

    step: int | None
    """The step whose gradient the parameters' `grad` now holds, the same on every rank but under local SGD; None where
    there is none to be applied yet."""
    statistics: torch.Tensor
    """Batch norm's, mean over that step's micro-batches, float32 [statistics]."""
    totals: Totals | None
    """None where the ranks have not agreed on any since the last ones. All ranks have them, or none."""


class Reduction(ABC):
    """A step goes `begin`, for each own micro-batch a backward pass inside `micro_batch` and `add`, `finish`.

    Then the caller applies the gradient, and calls `after_update`. All ranks must construct it.
    """

    module: nn.Module
    """Calls the network; images uint8 [N, H, W, 3] to logits [N, classes]."""
    clock: "Clock"
    """Counts the time in which a step waited for communication."""

    @abstractmethod
    def begin(self, step: int, micro_batches: int, images: int) -> None:
        """Starts a step of so many micro-batches and images over all ranks."""

    @abstractmethod
    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Holds a forward and backward pass; `last` for this rank's last one of the step."""

    @abstractmethod
    def add(self, loss: torch.Tensor, images: int) -> None:
        """Takes in the micro-batch just computed: its images' summed loss, gradients, batch-norm statistics."""

    @abstractmethod
    def finish(self, stop: int = 0, *, save: bool = False, agree: bool = True) -> Outcome | None:
        """Reduces the step over the ranks. All ranks must call, also those without a micro-batch.

        Args:
            stop: the signal that asks this rank to stop, or 0.
            save: whether this rank wants a checkpoint.
            agree: whether the ranks must come to the same weights, and totals of all steps that these are of: before an
                evaluation, a checkpoint, or the end. The same on all ranks.

        Returns:
            None where the step must be computed again, from `begin` on, with the same micro-batches. All ranks then
            agree on that.
        """

    def flush(self) -> Outcome | None:
        """What is still under way after the last step. All ranks must call."""
        return None

    def after_update(self) -> None:  # noqa: B027 - most have nothing to do
        """Called when the gradient has been applied. All ranks must call."""

    def close(self) -> None:  # noqa: B027 - not all have any
        """Ends its process groups, when nothing is under way. All ranks must call."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank has sent to others for gradients since it was constructed, by arithmetic."""
        return 0.0

    def metrics(self) -> dict[str, float]:
        """What else there is to log of the steps since this was last called."""
        return {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the next step needs to know of this one, the same on every rank. All ranks must call.

        What differs between ranks is evened out, so that a run that goes on and one that resumes from here, with the
        same number of ranks, do the same.
        """
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over a state, of any number of ranks."""
        assert not state


class Clock:
    """Time between `start` and `stop`, of the host on a CPU, of the device's stream on a GPU.

    On a GPU it records events, and waits for them only when it is read.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._on_gpu, self._is_alone = runtime.device.type == "cuda", runtime.world_size == 1
        self._started: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Begins a span, unless one has begun or there is nobody to wait for."""
        if self._started is None and not self._is_alone:
            self._started = self._now()

    def stop(self) -> None:
        """Ends the span that has begun, if one has."""
        if self._started is not None:
            self._spans.append((self._started, self._now()))
            self._started = None

    def seconds(self) -> float:
        """All spans since this was last called. On a GPU this waits for the last of them."""
        spans, self._spans = self._spans, []
        if self._on_gpu:
            if spans:
                spans[-1][1].synchronize()
            return sum(start.elapsed_time(end) for start, end in spans) / 1000
        return sum(end - start for start, end in spans)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def rescale(parameters: Iterable[nn.Parameter], planned: int, images: torch.Tensor) -> None:
    """Makes gradients of a mean over planned images those of a mean over the ones that were left, float []."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(planned / images.clamp(min=1))
