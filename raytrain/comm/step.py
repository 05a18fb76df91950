"""What every reduction offers to the loop, and what it hands back."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn


class Totals(NamedTuple):
    """One step, over all its micro-batches on all ranks. Tensors lie on the device; reading one waits for it."""

    loss: torch.Tensor
    """Sum of the images' losses, float [] ."""
    images: torch.Tensor
    """Images behind that sum, float []: those of the step but the ones that could not be decoded."""
    stop: torch.Tensor
    """Sum of the signals that ranks were given, float []; 0 where none was asked to stop."""
    bad: torch.Tensor
    """Above 0 for each rank whose loss was not finite, float [world_size]."""
    batchnorm: torch.Tensor
    """Sum of the micro-batches' batch-norm statistics, float32 [statistics]."""


class Reduction(ABC):
    """A step goes `begin`, for each own micro-batch a backward pass inside `micro_batch` and `add`, `finish`.

    `finish` returns None where the step must be computed again, from `begin` on, with the same micro-batches;
    all ranks then agree on that. After it returns Totals, each parameter's `grad` holds the same gradient on
    every rank: the sum of those of all micro-batches.
    """

    module: nn.Module
    """Calls the network; images uint8 [N, H, W, 3] to logits [N, classes]."""

    @abstractmethod
    def begin(self, micro_batches: int) -> None:
        """Starts a step of so many micro-batches over all ranks."""

    @abstractmethod
    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Holds a forward and backward pass; `last` for this rank's last one of the step."""

    @abstractmethod
    def add(self, loss: torch.Tensor, images: int) -> None:
        """Takes in the micro-batch just computed: its images' summed loss, gradients, batch-norm statistics."""

    @abstractmethod
    def finish(self, stop: int) -> Totals | None:
        """Reduces the step over the ranks. All ranks must call, also those without a micro-batch."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the next step needs to know of this one. The same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over a state, of any number of ranks."""
        assert not state
