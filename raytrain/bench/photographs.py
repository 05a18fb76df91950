"""Photographs that cost as much to load as ImageNet's, made from the few that Python packages bring along.

    python -m raytrain.bench.photographs DIR [--images 1500]

writes DIR/train/CLASS/* and DIR/val/CLASS/*, so many images each, in ten classes. Every image is a random part of
one of six photographs, scaled to a size like ImageNet's. Noise takes the place of the detail that scaling lost:
what a JPEG costs to decode depends on its pixels and its bytes, which come to 466x399 and 105 kB on average.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from raytrain.errors import DataError, RaytrainError

CLASSES = 10
SPLITS = ("train", "val")
SEED = 2012


def write_photographs(root: Path, images: int) -> None:
    """Writes `images` training and as many validation images, the same ones every time.

    Raises:
        DataError: too few images, scikit-image is not installed, or root holds files or cannot be written.
    """
    if images < CLASSES:
        raise DataError(f"{images} images are too few for {CLASSES} classes; take at least {CLASSES}")
    photographs = _load_photographs()
    try:
        for split in SPLITS:
            for label in range(CLASSES):
                (root / split / f"class{label}").mkdir(parents=True)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with ThreadPoolExecutor(cores) as executor:
            for part in range(len(SPLITS)):
                list(executor.map(partial(_write, root, photographs, part), range(images)))
    except OSError as error:
        raise DataError(f"cannot write photographs to {root}: {error.strerror or error}; name a new folder") from error


def main(words: Sequence[str]) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m raytrain.bench.photographs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", metavar="DIR", type=Path, help="a new folder")
    parser.add_argument("--images", type=int, default=1500, help="training images, and validation images")
    args = parser.parse_args(words)
    try:
        write_photographs(args.root, args.images)
    except RaytrainError as error:
        print(f"raytrain: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _load_photographs() -> list[Image.Image]:
    """All that ship in the packages themselves; others of scikit-image would have to be downloaded."""
    from sklearn.datasets import load_sample_image

    try:
        from skimage import data
    except ImportError:
        raise DataError(
            "the photographs come with scikit-image, which is not installed; pip install scikit-image, "
            "or give images of your own: python -m raytrain.bench data --path DIR"
        ) from None
    pixels = [load_sample_image("china.jpg"), load_sample_image("flower.jpg")]
    pixels += [data.astronaut(), data.coffee(), data.chelsea(), data.rocket()]
    return [Image.fromarray(array) for array in pixels]


def _write(root: Path, photographs: Sequence[Image.Image], part: int, index: int) -> None:
    """Writes one image, which depends on nothing but `part`, `index` and SEED."""
    rng = np.random.default_rng([SEED, part, index])
    path = root / SPLITS[part] / f"class{index % CLASSES}" / f"{index:06d}.jpg"
    image = _make_image(photographs[int(rng.integers(len(photographs)))], rng)
    image.save(path, "jpeg", quality=95, subsampling="4:2:0")


def _make_image(photograph: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A random part of a photograph, three times in four wider than high, with noise in its luminance."""
    long = int(rng.integers(440, 561))
    short = round(long * rng.uniform(0.66, 0.8))
    width, height = (long, short) if rng.random() < 0.75 else (short, long)
    scale = rng.uniform(0.7, 1) * min(photograph.width / width, photograph.height / height)
    left, top = rng.uniform(0, photograph.width - width * scale), rng.uniform(0, photograph.height - height * scale)
    box = (left, top, left + width * scale, top + height * scale)
    pixels = np.asarray(photograph.resize((width, height), Image.Resampling.BICUBIC, box))
    noise = rng.standard_normal((height, width, 1), np.float32) * 7.5
    return Image.fromarray(np.clip(np.rint(pixels + noise), 0, 255).astype(np.uint8))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
