"""From an encoded image to pixels.

Images stand upright: the orientation that a camera has noted in EXIF is applied, in every format. (torchvision's
ImageFolder leaves it out.) Values of 16 bits become their upper 8, a palette its colours, CMYK is converted as Pillow
does, and what is transparent is taken as opaque.

simplejpeg (libjpeg-turbo) decodes JPEG, to the same pixels as Pillow. Pillow decodes the rest, and has the last word
on what simplejpeg refuses. Of what was measured, simplejpeg was the fastest: a photograph of 480 x 400 takes Pillow
1.43 times as long, zune-jpeg (kornia-rs) 1.18, imagecodecs 1.04; entropy decoding is two thirds of it.
"""

import io
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError

from raytrain.errors import DataError

MAX_PIXELS = 178_956_970
"""As for Pillow, which refuses larger images: a small file may decode to more than memory holds."""
_FAST_COLORSPACES = ("YCbCr", "Gray", "RGB")
_JPEG = b"\xff\xd8\xff"

Encoded = bytes | memoryview


class Picture(NamedTuple):
    """An image that stands upright when it is decoded."""

    height: int
    width: int
    decode: Callable[[], torch.Tensor]
    """Gives the pixels, uint8 [height, width, 3], or raises DataError."""


def open_picture(encoded: Encoded | torch.Tensor, name: Callable[[], str]) -> Picture:
    """Opens a JPEG, PNG, BMP, WebP, TIFF or PNM.

    Args:
        encoded: the file's bytes; or pixels, uint8 [H, W, 3], of which there is nothing to be decoded.
        name: tells where they come from; called only where they are bad.

    Raises:
        DataError: it cannot be decoded; names the image and the reason.
    """
    if isinstance(encoded, torch.Tensor):
        return Picture(encoded.shape[0], encoded.shape[1], lambda: encoded)
    height, width, colorspace = _jpeg_header(encoded)
    if colorspace in _FAST_COLORSPACES and height * width <= MAX_PIXELS:
        orientation = _jpeg_orientation(encoded)
        if orientation >= 5:
            height, width = width, height
        return Picture(height, width, partial(_decode_jpeg, encoded, orientation, name))
    pixels = _decode_other(encoded, name)
    return Picture(pixels.shape[0], pixels.shape[1], lambda: pixels)


def decode(encoded: Encoded, name: Callable[[], str]) -> np.ndarray:
    """Decodes what `open_picture` opens, to uint8 [H, W, 3].

    Raises:
        DataError: names the image and the reason.
    """
    return open_picture(encoded, name).decode().numpy()


def _decode_jpeg(encoded: Encoded, orientation: int, name: Callable[[], str]) -> torch.Tensor:
    try:
        return torch.from_numpy(turn_upright(simplejpeg.decode_jpeg(encoded, "RGB"), orientation))
    except (ValueError, KeyError):  # of an odd but readable file, too: Pillow will tell
        return _decode_other(encoded, name)


def _decode_other(encoded: Encoded, name: Callable[[], str]) -> torch.Tensor:
    try:
        return torch.from_numpy(_decode_by_pillow(encoded))
    except UnidentifiedImageError:
        reason = "its content is of no known format" if len(encoded) else "it is empty"
        raise DataError(f"cannot decode image {name()}: {reason}; repair or remove it") from None
    except MemoryError:  # says nothing of the image
        raise
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and its own
        raise DataError(f"cannot decode image {name()}: {error}; repair or remove it") from error


def _decode_by_pillow(encoded: Encoded) -> np.ndarray:
    image = Image.open(io.BytesIO(encoded))
    image.load()
    orientation = _jpeg_orientation(encoded) if encoded[:3] == _JPEG else _orientation(image.getexif)
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range nothing tells")
    if image.mode.startswith("I"):  # Pillow would keep the values up to 255 and cut the rest off
        values = np.asarray(image)
        if values.min() < 0 or values.max() >= 2**16:
            raise ValueError("its pixels have more than 16 bits, whose range nothing tells")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif "transparency" in image.info:
        image = image.convert("RGBA")
    return turn_upright(np.array(image.convert("RGB")), orientation)


def turn_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Applies an EXIF orientation, 1 to 8, to pixels [H, W, 3]."""
    if orientation == 1:
        return pixels
    if orientation >= 5:  # 5: transposed; 6: to be turned right; 7: transposed the other way; 8: to be turned left
        pixels = pixels.transpose(1, 0, 2)
    down, across = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}.get(orientation, (1, 1))
    return np.ascontiguousarray(pixels[::down, ::across])


def is_plain(encoded: Encoded, *, jpeg_only: bool) -> bool:
    """Whether a readable image decodes fast and without conversion.

    A baseline JPEG in grey or YCbCr does, and, unless only JPEG counts, any other format in grey or RGB of 8 bits.
    """
    if encoded[:3] == _JPEG:
        markers = [marker for marker, _ in _segments(encoded)]
        return bool({0xC0, 0xC1}.intersection(markers)) and _jpeg_header(encoded)[2] in _FAST_COLORSPACES
    image = Image.open(io.BytesIO(encoded))
    return not jpeg_only and image.mode in ("L", "RGB") and "transparency" not in image.info


def _jpeg_header(encoded: Encoded) -> tuple[int, int, str]:
    """Height, width and colorspace as they are stored; no colorspace where it is no JPEG that simplejpeg takes."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(encoded)
    except (ValueError, KeyError):  # KeyError: of a subsampling that it does not know
        return 0, 0, ""
    return int(height), int(width), colorspace  # type: ignore[arg-type]


def _jpeg_orientation(encoded: Encoded) -> int:
    """The orientation in a JPEG's EXIF segment, 1 to 8; 1 where there is none."""
    for marker, segment in _segments(encoded):
        if marker == 0xE1 and segment[:6] == b"Exif\0\0":
            exif = Image.Exif()
            return _orientation(lambda: exif.load(bytes(segment)) or exif)  # noqa: B023 - called at once
    return 1


def _segments(encoded: Encoded) -> Iterator[tuple[int, Encoded]]:
    """The segments of a JPEG up to its frame header, each with its marker's second byte."""
    position = 2
    while position + 4 <= len(encoded) and encoded[position] == 0xFF:
        if encoded[position + 1] == 0xFF:  # a fill byte
            position += 1
            continue
        marker, size = encoded[position + 1], encoded[position + 2] << 8 | encoded[position + 3]
        yield marker, encoded[position + 4 : position + 2 + size]
        if marker == 0xDA or (0xC0 <= marker <= 0xCF and marker != 0xC4):
            return
        position += 2 + size


def _orientation(read_exif: Callable[[], Image.Exif]) -> int:
    try:
        orientation = int(read_exif().get(0x0112, 1))
    except (SyntaxError, ValueError, TypeError, KeyError, IndexError, OSError, struct.error):
        return 1  # a damaged note says nothing of the image
    return orientation if 1 <= orientation <= 8 else 1
