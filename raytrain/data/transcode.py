"""From an image as it came to an image as it is stored: small, upright, 8-bit RGB, and quick to decode.

Without a size images stay as they are, byte for byte, but for those that are slow or odd: a progressive JPEG becomes a
baseline one with the same quantisation; CMYK becomes RGB JPEG; what is neither grey nor RGB of 8 bits, as palettes, 16
bits and transparency, becomes RGB PNG, without loss. With a size, what is larger is resized by Pillow's bicubic filter,
never enlarged, and everything but a baseline JPEG that is small enough becomes JPEG.
"""

import io
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import get_sampling

from raytrain.data.decode import decode, is_plain


@dataclass(frozen=True)
class Settings:
    """How images are stored. At most one of the sizes is given."""

    max_side: int | None = None
    """Longer side at most, pixels."""
    short_side: int | None = None
    """Shorter side at most, pixels."""
    raw: int | None = None
    """Store pixels, with a longer side of at most so many."""
    quality: int = 90
    """Of JPEG, 1 to 95."""
    check: bool = True
    """Decode every image, and leave the bad ones out. False: bytes are taken as they are, unread."""


class Stored(NamedTuple):
    """What a row holds."""

    image: bytes
    height: int
    width: int


def transcode(encoded: bytes, settings: Settings, name: str) -> Stored:
    """An image as it is to be stored; height and width are 0 where it was not decoded.

    Raises:
        DataError: it cannot be decoded; names it.
    """
    if not settings.check:
        return Stored(encoded, 0, 0)
    pixels = decode(encoded, lambda: name)
    height, width, _ = pixels.shape
    scale = 1.0
    if (longest := settings.max_side or settings.raw) is not None:
        scale = longest / max(height, width)
    elif settings.short_side is not None:
        scale = settings.short_side / min(height, width)
    sized = (settings.max_side or settings.short_side or settings.raw) is not None
    if scale < 1:
        size = max(1, round(width * scale)), max(1, round(height * scale))
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
        height, width, _ = pixels.shape
    if settings.raw is not None:
        return Stored(pixels.tobytes(), height, width)
    if scale < 1 or not is_plain(encoded, jpeg_only=sized):
        encoded = _encode(encoded, pixels, settings.quality, resized=scale < 1, lossless=not sized)
    return Stored(encoded, height, width)


def _encode(encoded: bytes, pixels: np.ndarray, quality: int, *, resized: bool, lossless: bool) -> bytes:
    """Encodes pixels: as PNG where the image was stored without loss and is to stay so, else as baseline JPEG."""
    file = io.BytesIO()
    source = Image.open(io.BytesIO(encoded))
    image = Image.fromarray(pixels)
    is_jpeg = source.format == "JPEG"
    if lossless and not is_jpeg:
        image.save(file, "png")
    elif is_jpeg and not resized and source.mode in ("L", "RGB"):
        tables = [table for _, table in sorted(source.quantization.items())]  # type: ignore[attr-defined]
        image.convert(source.mode).save(file, "jpeg", qtables=tables, subsampling=get_sampling(source))
    else:
        image.save(file, "jpeg", quality=quality)
    return file.getvalue()
