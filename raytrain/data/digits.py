"""scikit-learn's scans of handwritten digits, as 8x8 grey PNG. Every fifth of them is for validation."""

import io
from collections.abc import Iterator
from typing import NamedTuple

from raytrain.data.origin import Origin, Sample

CLASS_NAMES = tuple(str(digit) for digit in range(10))


class DigitsPiece(NamedTuple):
    """One of the two sets."""

    split: str
    size: int = 2**18

    def samples(self) -> Iterator[Sample]:
        """Its scans."""
        import numpy as np
        from PIL import Image
        from sklearn.datasets import load_digits

        scans, labels = load_digits(return_X_y=True)
        for number, (scan, label) in enumerate(zip(scans, labels, strict=True)):
            if (number % 5 == 4) == (self.split == "val"):
                png = io.BytesIO()
                Image.fromarray((scan.reshape(8, 8) * (255 / 16)).round().astype(np.uint8)).save(png, "png")
                yield Sample(png.getvalue(), int(label), f"digit {number}")


def open_digits(split: str) -> Origin:
    """The digits of one set."""
    return Origin(f"the digits' {split} set", CLASS_NAMES, [DigitsPiece(split)], f"digits-{split}")
