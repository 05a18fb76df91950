"""The optimizer and the moving average of weights."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raytrain import config


def make_optimizer(model: nn.Module, optim: config.Optim) -> torch.optim.Optimizer:
    """SGD or AdamW; biases and normalisation layers, all that has one dimension, without weight decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.base_lr, betas=optim.betas, fused=True)
    optimizer = torch.optim.SGD(groups, optim.base_lr, optim.momentum, nesterov=optim.nesterov, fused=True)
    if optim.momentum:
        for parameter in parameters:  # the fused kind leaves it as it finds it where float16 skips the first step
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def make_ema(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """An exponential moving average of weights and buffers, or None. It starts from the first update's weights."""
    if decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
