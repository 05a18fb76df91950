"""A parameter server: weights, and the optimizer that moves them by gradients as they come."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from raytrain.config import Optim
from raytrain.optim import make_optimizer


class Server(Protocol):
    """What workers know of it, wherever it is. Vectors are flat, float32, in the order of the model's parameters."""

    def begin(self, shapes: Sequence[tuple[int, ...]], weights: torch.Tensor, momenta: torch.Tensor) -> None:
        """Takes weights and momenta to go on from; forgets what was."""
        ...

    def push(self, rank: int, gradient: torch.Tensor, share: float, lr: float) -> tuple[torch.Tensor, int]:
        """Applies a rank's part of a step's gradient, of the weights that it was given last.

        Args:
            rank: whose it is.
            gradient: the sum over its images over the images of the whole step.
            share: its images over those of the whole step, above 0.
            lr: of the step.

        Returns:
            The weights now, until the rank's next call, and how many gradients of others had been applied since it was
            given its own.
        """
        ...

    def pull(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives a rank the weights and momenta as they are."""
        ...


class ParameterServer(Server):
    """Asynchronous SGD with delay compensation, DC-ASGD (Zheng 2017, arXiv 1609.08326). For one thread.

    A gradient g, the mean over a rank's images, of weights w_old comes when they have become w. In its place
    g + strength g g (w - w_old) is applied, an estimate of the gradient at w. It counts, as does weight decay, by the
    rank's share of its step: so the pushes of a step come to what a synchronous one does, if weights stood still.
    Momentum fades with each push.

    Args:
        optim: the optimizer.
        strength: of the compensation, lambda; 0 for none.
    """

    def __init__(self, optim: Optim, strength: float) -> None:
        self._optim, self._strength = optim, strength

    def begin(self, shapes: Sequence[tuple[int, ...]], weights: torch.Tensor, momenta: torch.Tensor) -> None:
        self._weights, self._momenta = weights.clone(), momenta.clone()
        self._gradient = torch.zeros_like(self._weights)
        self._parameters = [nn.Parameter(view) for view in _views(self._weights, shapes)]
        self._optimizer = make_optimizer(self._parameters, self._optim)
        pieces = _views(self._momenta, shapes), _views(self._gradient, shapes)
        for parameter, momentum, gradient in zip(self._parameters, *pieces, strict=True):
            parameter.grad = gradient
            if self._optim.momentum:
                self._optimizer.state[parameter]["momentum_buffer"] = momentum
        self._decays = [group["weight_decay"] for group in self._optimizer.param_groups]
        self._updates = 0
        self._start = weights.clone()
        self._given: dict[int, tuple[int, torch.Tensor]] = {}

    def push(self, rank: int, gradient: torch.Tensor, share: float, lr: float) -> tuple[torch.Tensor, int]:
        updates, given = self._given[rank] if rank in self._given else (0, self._start.clone())
        staleness = self._updates - updates
        self._gradient.copy_(gradient)
        if staleness and self._strength:
            torch.sub(self._weights, given, out=given).mul_(gradient)
            self._gradient.addcmul_(gradient, given, value=self._strength / share)
        for group, decay in zip(self._optimizer.param_groups, self._decays, strict=True):
            group["lr"], group["weight_decay"] = lr, share * decay
        self._optimizer.step()
        self._updates += 1
        self._given[rank] = self._updates, given.copy_(self._weights)
        return given, staleness

    def pull(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._given[rank] = self._updates, self._weights.clone()
        return self._given[rank][1], self._momenta


def _views(vector: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """The parts of a vector, each in its shape."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(vector.split(sizes), shapes, strict=True)]
