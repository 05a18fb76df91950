"""RandAugment and TrivialAugment with draws from a sample's own stream.

torchvision's classes draw from torch's global generator, which threads cannot share and stay repeatable. The operations
here are torchvision's functions on Pillow images, over the ranges of its classes.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image
from torchvision.transforms.v2 import functional

transforms: Any = functional
"""torchvision's functions, whose annotations know of tensors only."""

LEVELS = 31
"""A magnitude is one of so many steps from nothing to the greatest."""
_GREATEST_RAND = {
    "ShearX": 0.3,
    "ShearY": 0.3,
    "TranslateX": 150 / 331,  # of the width
    "TranslateY": 150 / 331,
    "Rotate": 30.0,
    "Brightness": 0.9,
    "Color": 0.9,
    "Contrast": 0.9,
    "Sharpness": 0.9,
    "Posterize": 4.0,  # bits that are lost
    "Solarize": 1.0,
    "AutoContrast": None,
    "Equalize": None,
    "Identity": None,
}
_GREATEST_TRIVIAL = {
    **_GREATEST_RAND,
    **dict.fromkeys(("ShearX", "ShearY", "Brightness", "Color", "Contrast", "Sharpness"), 0.99),
    "TranslateX": 32.0,  # pixels
    "TranslateY": 32.0,
    "Rotate": 135.0,
    "Posterize": 6.0,
}
_ONE_SIDED = {"Posterize", "Solarize"}


def rand_augment(image: Image.Image, operations: int, level: int, rng: np.random.Generator) -> Image.Image:
    """So many operations drawn at random, all at one level (Cubuk 2019, arXiv 1909.13719).

    Args:
        image: of mode RGB.
        operations: how many.
        level: 0 to 30.
        rng: the sample's own stream.
    """
    greatest = {
        **_GREATEST_RAND,
        "TranslateX": _GREATEST_RAND["TranslateX"] * image.width,
        "TranslateY": _GREATEST_RAND["TranslateY"] * image.height,
    }
    for _ in range(operations):
        image = _draw_operation(image, greatest, level, rng)
    return image


def trivial_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """One operation at one level, both drawn at random (Müller 2021, arXiv 2103.10158, the wide space)."""
    return _draw_operation(image, _GREATEST_TRIVIAL, int(rng.integers(LEVELS)), rng)


def _draw_operation(
    image: Image.Image, greatest: Mapping[str, float | None], level: int, rng: np.random.Generator
) -> Image.Image:
    name = list(greatest)[rng.integers(len(greatest))]
    magnitude = (greatest[name] or 0.0) * level / (LEVELS - 1)
    if name not in _ONE_SIDED and rng.random() < 0.5:
        magnitude = -magnitude
    return apply(image, name, magnitude)


def apply(image: Image.Image, name: str, magnitude: float) -> Image.Image:  # noqa: C901, PLR0911, PLR0912 - a line each
    """One operation of torchvision's auto-augmentation, by the name that it has there."""
    match name:
        case "ShearX":
            return _affine(image, shear=[math.degrees(math.atan(magnitude)), 0.0], center=[0, 0])
        case "ShearY":
            return _affine(image, shear=[0.0, math.degrees(math.atan(magnitude))], center=[0, 0])
        case "TranslateX":
            return _affine(image, translate=[int(magnitude), 0])
        case "TranslateY":
            return _affine(image, translate=[0, int(magnitude)])
        case "Rotate":
            return transforms.rotate(image, magnitude)
        case "Brightness":
            return transforms.adjust_brightness(image, 1 + magnitude)
        case "Color":
            return transforms.adjust_saturation(image, 1 + magnitude)
        case "Contrast":
            return transforms.adjust_contrast(image, 1 + magnitude)
        case "Sharpness":
            return transforms.adjust_sharpness(image, 1 + magnitude)
        case "Posterize":
            return transforms.posterize(image, 8 - round(magnitude))
        case "Solarize":
            return transforms.solarize(image, 255 * (1 - magnitude))
        case "AutoContrast":
            return transforms.autocontrast(image)
        case "Equalize":
            return transforms.equalize(image)
        case _:
            return image


def _affine(image: Image.Image, **changes: Any) -> Image.Image:
    still: dict[str, Any] = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
    return transforms.affine(image, **{**still, **changes})
