"""What is done to an image on its way into a batch. All that is random comes from the sample's own stream."""

import math

import numpy as np
from PIL import Image
from torchvision.transforms import functional

from raytrain import config

Box = tuple[float, float, float, float]


def eval_transform(image: Image.Image, data: config.Data) -> Image.Image:
    """The centre: the short side resized to eval_resize, then image_size squared of the middle."""
    size = min(image.size) * data.image_size / (data.eval_resize or data.image_size)
    left, top = (image.width - size) / 2, (image.height - size) / 2
    return _resize(image, (left, top, left + size, top + size), data.image_size)


def train_transform(image: Image.Image, data: config.Data, rng: np.random.Generator) -> Image.Image:
    """Crop, flip and colour jitter, as the config has them."""
    if data.train_crop == "random_resized":
        image = _resize(image, _random_box(image, data, rng), data.image_size)
    else:
        image = eval_transform(image, data)
    if data.flip and rng.random() < data.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if data.color_jitter:
        image = _jitter(image.convert("RGB"), data.color_jitter, rng)
    return image


def _random_box(image: Image.Image, data: config.Data, rng: np.random.Generator) -> Box:
    """Part of the image with an area and a shape drawn at random (Szegedy 2014, arXiv 1409.4842).

    As torchvision's RandomResizedCrop: ten tries, then the largest central part with a shape that is allowed.
    """
    width, height = image.size
    for _ in range(10):
        area = width * height * rng.uniform(*data.crop_scale)
        ratio = math.exp(rng.uniform(math.log(data.crop_ratio[0]), math.log(data.crop_ratio[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    ratio = min(max(width / height, data.crop_ratio[0]), data.crop_ratio[1])
    w, h = min(width, height * ratio), min(height, width / ratio)
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def _resize(image: Image.Image, box: Box, size: int) -> Image.Image:
    return image.resize((size, size), Image.Resampling.BILINEAR, box)


def _jitter(image: Image.Image, strength: tuple[float, float, float], rng: np.random.Generator) -> Image.Image:
    """Brightness, contrast and saturation, in a random order, each by a factor of 1 - strength to 1 + strength."""
    adjust = (functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation)
    for which in rng.permutation(3):
        factor = rng.uniform(1 - strength[which], 1 + strength[which])
        image = adjust[which](image, factor)  # type: ignore[assignment]
    return image
