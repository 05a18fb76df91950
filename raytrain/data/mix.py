"""MixUp and CutMix: an image and its label mixed with those of its neighbour in the micro-batch.

Each image draws for itself, from its own stream, which of the two and how much, where torchvision's classes draw once
for a batch. The neighbour is the image before it, as in torchvision, so that what comes out follows from the
micro-batch alone, and not from who computes it.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from raytrain import config


class Mix(NamedTuple):
    """How much an image keeps of itself, and a rectangle in which it keeps nothing."""

    weight: float
    top: int
    left: int
    bottom: int
    right: int


def draw_mix(data: config.Data, rng: np.random.Generator) -> Mix:
    """Draws for one image; one of the two methods at least must be on."""
    alphas = [alpha for alpha in (data.mixup_alpha, data.cutmix_alpha) if alpha is not None]
    which = int(rng.integers(len(alphas)))
    weight = float(rng.beta(alphas[which], alphas[which]))
    if data.mixup_alpha is not None and which == 0:
        return Mix(weight, 0, 0, 0, 0)
    half = int(data.image_size * math.sqrt(1 - weight) / 2)  # of a side of the rectangle, before it is clipped
    x, y = rng.integers(data.image_size, size=2).tolist()
    low, high = 0, data.image_size
    return Mix(1.0, max(low, y - half), max(low, x - half), min(high, y + half), min(high, x + half))


def mix(
    images: torch.Tensor, labels: torch.Tensor, mixes: torch.Tensor, num_classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixes each image with the one before it, the first with the last.

    Args:
        images: uint8 [N, H, W, 3].
        labels: int64 [N].
        mixes: float32 [N, 5], the fields of Mix.
        num_classes: width of the labels.

    Returns:
        images: float32 [N, H, W, 3], on the scale of 0 to 255.
        labels: float32 [N, num_classes], each row with the sum 1.
    """
    _, height, width, _ = images.shape
    weight, top, left, bottom, right = mixes[:, :, None, None].unbind(1)
    y = torch.arange(height, device=images.device).view(1, height, 1)
    x = torch.arange(width, device=images.device).view(1, 1, width)
    outside = ~((y >= top) & (y < bottom) & (x >= left) & (x < right))
    own = (weight * outside)[..., None]
    mixed = images.float()
    mixed = mixed.roll(1, 0).lerp_(mixed, own.expand_as(mixed))
    share = (weight[:, 0, 0] * (1 - (bottom - top) * (right - left) / (height * width))[:, 0, 0])[:, None]
    targets = functional.one_hot(labels, num_classes).float()
    return mixed, targets.roll(1, 0).lerp_(targets, share.expand_as(targets))
