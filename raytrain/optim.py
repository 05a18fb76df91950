"""The optimizer and the moving average of weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raytrain import config


def make_optimizer(parameters: Iterable[nn.Parameter], optim: config.Optim) -> torch.optim.Optimizer:
    """What the config names; biases and normalisation layers, all that has one dimension, without weight decay."""
    parameters = [p for p in parameters if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.base_lr, betas=optim.betas, fused=True)
    if optim.name == "onebit_adam":
        return OnebitAdam(groups, optim.base_lr, optim.betas, optim.freeze_step)
    optimizer = torch.optim.SGD(groups, optim.base_lr, optim.momentum, nesterov=optim.nesterov, fused=True)
    if optim.momentum:
        for parameter in parameters:  # the fused kind leaves it as it finds it where float16 skips the first step
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class OnebitAdam(torch.optim.Optimizer):
    """1-bit Adam (Tang 2021, arXiv 2102.02888): AdamW that freezes its variance, and so becomes linear in the gradient.

    For `freeze_step` steps it is AdamW. Then the variance stays what it is, bias correction included, and only the
    momentum moves; with several workers `comm.momentum` then sums momenta in place of gradients, as signs. A weight
    that has had no gradient by then, as of a unit that never fired, stays where it is: nothing says how far it may go.
    """

    EPS = 1e-8

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], freeze_step: int) -> None:
        super().__init__(groups, {"lr": lr, "step": 0, "weight_decay": 0.0})
        self.betas, self._freeze_step = betas, freeze_step
        self.takes_momenta = False
        """Whether, once frozen, a parameter's `grad` is its new momentum."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)

    @property
    def is_frozen(self) -> bool:
        """Whether the next step leaves the variance as it is."""
        return self.param_groups[0]["step"] >= self._freeze_step

    def scale_of(self, parameter: torch.Tensor, step: int) -> torch.Tensor:
        """What the momentum is divided by in the given step, counted from 1: of the parameter's shape, a copy.

        Infinite where there was no gradient.
        """
        correction = 1 - self.betas[1] ** min(step, self._freeze_step)
        variance = self.state[parameter]["exp_avg_sq"]
        return variance.div(correction).sqrt_().add_(self.EPS).masked_fill_(variance == 0, torch.inf)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Applies the gradients."""
        assert closure is None
        is_frozen, (beta1, beta2) = self.is_frozen, self.betas
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                momentum, variance = self.state[parameter]["exp_avg"], self.state[parameter]["exp_avg_sq"]
                if is_frozen and self.takes_momenta:
                    momentum.copy_(gradient)
                else:
                    momentum.lerp_(gradient, 1 - beta1)
                if not is_frozen:
                    variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                scale = self.scale_of(parameter, group["step"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(momentum, scale, value=-group["lr"] / (1 - beta1 ** group["step"]))


def make_ema(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """An exponential moving average of weights and buffers, or None. It starts from the first update's weights."""
    if decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
