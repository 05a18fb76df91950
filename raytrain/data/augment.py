"""What is done to an image on its way into a batch. All that is random comes from the sample's own stream.

Pixels are uint8 throughout. The part of the image that is wanted is resized by torch's antialiased bilinear kernel,
which differs from Pillow's by 0.04 grey levels on average. Colours are changed by torchvision on Pillow images, which
on CPUs are as fast as its tensors or faster.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from raytrain import config
from raytrain.data.autoaugment import rand_augment, transforms, trivial_augment
from raytrain.data.mix import Mix, draw_mix

Box = tuple[int, int, int, int]
"""Top, left, height, width."""
_ADJUST = (transforms.adjust_brightness, transforms.adjust_contrast, transforms.adjust_saturation)


def eval_transform(pixels: torch.Tensor, data: config.Data) -> torch.Tensor:
    """The centre, as torchvision's Resize and CenterCrop: the short side to eval_resize, image_size of the middle.

    Args:
        pixels: uint8 [H, W, 3].
        data: the config.

    Returns:
        uint8 [image_size, image_size, 3].
    """
    height, width, _ = pixels.shape
    most = 32 * min(height, width)  # of a thin image the whole would be resized to no end
    if max(height, width) > most:
        top, left = max(0, height - most) // 2, max(0, width - most) // 2
        pixels = pixels[top : height - top, left : width - left]
        height, width, _ = pixels.shape
    short = data.eval_resize or data.image_size
    resized = (int(short * height / width), short) if width < height else (short, int(short * width / height))
    image = _resize(pixels, (0, 0, height, width), resized)
    top, left = (round((side - data.image_size) / 2) for side in resized)
    return image[top : top + data.image_size, left : left + data.image_size]


class Changes(NamedTuple):
    """What is done to the shape of an image, drawn before it is decoded."""

    box: Box | None
    """The part that is resized; None: as in evaluation."""
    flip: bool
    erased: Box | None
    """Of the resized image."""
    mix: Mix | None


def draw_changes(height: int, width: int, data: config.Data, rng: np.random.Generator) -> Changes:
    """Draws for an image of that size, from its own stream."""
    size, box, erased = data.image_size, None, None
    if data.train_crop == "random_resized":
        box = _random_box(height, width, data.crop_scale, data.crop_ratio, rng)
    flip = bool(data.flip) and rng.random() < data.flip
    if data.random_erasing and rng.random() < data.random_erasing:
        tries = (_try_box(size, size, (0.02, 0.33), (0.3, 3.3), rng) for _ in range(10))
        erased = next((found for found in tries if found is not None), None)
    mixes = data.mixup_alpha is not None or data.cutmix_alpha is not None
    return Changes(box, flip, erased, draw_mix(data, rng) if mixes else None)


def train_transform(
    pixels: torch.Tensor, changes: Changes, data: config.Data, colours: np.random.Generator | None
) -> torch.Tensor:
    """Crop, flip, drawn operations, colour jitter and erasing.

    Args:
        pixels: uint8 [H, W, 3].
        changes: what was drawn for the image.
        data: the config.
        colours: the sample's stream for what changes colours; may be None where nothing does.

    Returns:
        uint8 [image_size, image_size, 3].
    """
    if changes.box is not None:
        image = _resize(pixels, changes.box, (data.image_size, data.image_size))
    else:
        image = eval_transform(pixels, data)
    if changes.flip:
        image = image.flip(1)
    if colours is not None:
        image = torch.from_numpy(np.array(_recolour(Image.fromarray(image.numpy()), data, colours)))
    if changes.erased is not None:  # with the mean colour (Zhong 2017, arXiv 1708.04896), as torchvision does
        top, left, height, width = changes.erased
        image = image.clone()
        image[top : top + height, left : left + width] = torch.tensor(data.mean).mul(255).round().byte()
    return image


def _random_box(
    height: int, width: int, scale: tuple[float, float], shape: tuple[float, float], rng: np.random.Generator
) -> Box:
    """Part of an image with an area and a shape drawn at random (Szegedy 2014, arXiv 1409.4842).

    As torchvision's RandomResizedCrop: ten tries, then the largest central part with a shape that is allowed.
    """
    for _ in range(10):
        box = _try_box(height, width, scale, shape, rng)
        if box is not None:
            return box
    ratio = min(max(width / height, shape[0]), shape[1])
    w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
    return (height - h) // 2, (width - w) // 2, h, w


def _try_box(
    height: int, width: int, scale: tuple[float, float], shape: tuple[float, float], rng: np.random.Generator
) -> Box | None:
    area = height * width * rng.uniform(*scale)
    ratio = math.exp(rng.uniform(math.log(shape[0]), math.log(shape[1])))
    w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    if not (0 < w <= width and 0 < h <= height):
        return None
    return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w


def _resize(pixels: torch.Tensor, box: Box, size: tuple[int, int]) -> torch.Tensor:
    """A part of an image, uint8 [H, W, 3], resized to [*size, 3]."""
    top, left, height, width = box
    part = pixels[None, top : top + height, left : left + width].permute(0, 3, 1, 2)  # torch's channels_last
    return functional.interpolate(part, size, mode="bilinear", antialias=True)[0].permute(1, 2, 0)


def _recolour(image: Image.Image, data: config.Data, rng: np.random.Generator) -> Image.Image:
    if data.auto_augment == "randaugment":
        image = rand_augment(image, data.randaugment_ops, data.randaugment_magnitude, rng)
    elif data.auto_augment == "trivialaugment":
        image = trivial_augment(image, rng)
    if data.color_jitter is not None:  # each by a factor of 1 - strength to 1 + strength, in a random order
        for which in rng.permutation(3):
            strength = data.color_jitter[which]
            image = _ADJUST[which](image, rng.uniform(1 - strength, 1 + strength))
    return image
