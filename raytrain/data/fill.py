"""What one loader thread does: some images of a batch, from what the source has to pixels in their place."""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from raytrain import config
from raytrain.data.augment import Changes, draw_changes, eval_transform, train_transform
from raytrain.data.decode import Picture, open_picture
from raytrain.data.mix import Mix
from raytrain.data.order import COLOUR, Streams
from raytrain.data.source import Source
from raytrain.errors import DataError


class Job(NamedTuple):
    """A batch to be made. Without seed and epoch it is one of evaluation."""

    samples: np.ndarray
    data: config.Data
    seed: int | None = None
    epoch: int = 0


class Chunk(NamedTuple):
    """What a thread has to say of its part of a batch, whose pixels are in place."""

    mixes: list[Mix | None]
    bad: dict[int, DataError]
    """By row within the part."""


def fill(source: Source, job: Job, images: torch.Tensor, rows: range, *, skip: bool) -> Chunk:
    """Makes some images of a batch.

    First all are read and drawn for, then all are decoded. One image after the other takes up to a tenth more: a
    decoder drives Python's own code and data out of the CPU's caches.

    Args:
        source: the set.
        job: the batch.
        images: the batch's pixels, uint8 [N, S, S, 3].
        rows: of the batch, to be filled here.
        skip: leave what cannot be decoded black, and tell.

    Raises:
        DataError: an image cannot be read, which is the machine's trouble and not the image's, or cannot be decoded
            and is not to be skipped.
    """
    samples = job.samples[rows.start : rows.stop].tolist()
    data, streams = job.data, Streams(job.seed, job.epoch) if job.seed is not None else None
    bad: dict[int, DataError] = {}
    opened: list[tuple[int, Picture, Changes | None]] = []
    mixes: list[Mix | None] = [None] * len(samples)
    for number, sample in enumerate(samples):
        read = source.read(sample)
        try:
            picture = open_picture(read, partial(source.name, sample))
        except DataError as error:
            bad[rows[number]] = error
            continue
        changes = None
        if streams is not None:
            changes = draw_changes(picture.height, picture.width, data, streams.of(sample))
            mixes[number] = changes.mix
        opened.append((number, picture, changes))
    recolours = data.auto_augment is not None or data.color_jitter is not None
    colours = Streams(job.seed, job.epoch, COLOUR) if job.seed is not None and recolours else None
    for number, picture, changes in opened:
        try:
            pixels = picture.decode()
        except DataError as error:
            bad[rows[number]] = error
            continue
        if changes is None:
            image = eval_transform(pixels, data)
        else:
            image = train_transform(pixels, changes, data, colours and colours.of(samples[number]))
        images[rows[number]].copy_(image)
    if bad and not skip:
        raise bad[min(bad)]
    for row in bad:
        images[row].zero_()
    return Chunk(mixes, bad)
