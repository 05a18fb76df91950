"""From an encoded image to pixels."""

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

from raytrain.errors import DataError


def decode(encoded: bytes | memoryview, name: str) -> Image.Image:
    """Decodes JPEG, PNG, BMP or WebP to mode RGB, or L where the image is grey.

    Raises:
        DataError: names the image and the reason.
    """
    try:
        image = Image.open(io.BytesIO(encoded))
        image.load()
        if image.mode in ("L", "RGB"):
            return image
        if image.mode.startswith("I;16"):  # Pillow would keep the values up to 255 and cut the rest off
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
    except UnidentifiedImageError:
        raise DataError(f"cannot decode image {name}: its content is of no known format; repair or remove it") from None
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and its own
        raise DataError(f"cannot decode image {name}: {error}; repair or remove it") from error
