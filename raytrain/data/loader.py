"""Threads that turn samples into batches beside the step."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from raytrain import config
from raytrain.data.augment import eval_transform, train_transform
from raytrain.data.decode import decode
from raytrain.data.order import epoch_order, sample_rng
from raytrain.data.source import Source
from raytrain.plan import Plan, deal


class Batch(NamedTuple):
    """Images that go through the network together."""

    images: torch.Tensor
    """uint8 [N, H, W, 3], on the device."""
    labels: torch.Tensor
    """int64 [N], on the device."""


class StepBatches(NamedTuple):
    """What one rank computes of a step."""

    batches: list[Batch]
    """Its micro-batches."""
    first: int
    """The number, within the step, of the first of them."""


def train_batches(
    source: Source,
    data: config.Data,
    plan: Plan,
    seed: int,
    rank: int,
    world_size: int,
    start_step: int,
    num_threads: int,
    device: torch.device,
) -> Iterator[StepBatches]:
    """This rank's part of each step from `start_step` to the end of the run.

    Raises:
        DataError: on the step that an unreadable image belongs to.
    """
    steps = range(start_step, plan.total_steps)
    shares = [deal(len(plan.micro_batches(step)), world_size)[rank] for step in range(plan.steps_per_epoch)]

    def jobs() -> Iterator[Callable[[], Batch]]:
        epoch, order = -1, np.empty(0, np.int64)
        for step in steps:
            if step // plan.steps_per_epoch != epoch:
                epoch = step // plan.steps_per_epoch
                order = epoch_order(seed, epoch, plan.num_images)
            micro_batches = plan.micro_batches(step)
            for number in shares[step % plan.steps_per_epoch]:
                samples = order[micro_batches[number].start : micro_batches[number].stop]
                yield partial(_make_batch, source, samples, data, device, partial(_train_image, data, seed, epoch))

    with closing(_in_threads(jobs(), num_threads, device)) as batches:
        for step in steps:
            share = shares[step % plan.steps_per_epoch]
            yield StepBatches([next(batches) for _ in share], share.start)


def eval_batches(
    source: Source,
    data: config.Data,
    batch_size: int,
    rank: int,
    world_size: int,
    num_threads: int,
    device: torch.device,
) -> Iterator[Batch]:
    """This rank's part of the validation set: whole batches, so that no result depends on the number of ranks.

    Raises:
        DataError: an image is unreadable.
    """
    count = len(source.labels)
    starts = range(0, count, batch_size)
    mine = [np.arange(starts[n], min(starts[n] + batch_size, count)) for n in deal(len(starts), world_size)[rank]]
    jobs = (partial(_make_batch, source, samples, data, device, partial(_eval_image, data)) for samples in mine)
    return _in_threads(jobs, num_threads, device)


def _train_image(data: config.Data, seed: int, epoch: int, image: Image.Image, sample: int) -> Image.Image:
    return train_transform(image, data, sample_rng(seed, epoch, sample))


def _eval_image(data: config.Data, image: Image.Image, _: int) -> Image.Image:
    return eval_transform(image, data)


def _make_batch(
    source: Source,
    samples: np.ndarray,
    data: config.Data,
    device: torch.device,
    transform: Callable[[Image.Image, int], Image.Image],
) -> Batch:
    """Reads, decodes and transforms samples into a batch in host memory, pinned where it goes to a GPU."""
    shape = (len(samples), data.image_size, data.image_size, 3)
    images = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pixels = images.numpy()
    for row, sample in enumerate(samples.tolist()):
        array = np.asarray(transform(decode(source.read(sample), source.name(sample)), sample))
        pixels[row] = array if array.ndim == 3 else array[:, :, None]
    return Batch(images, torch.from_numpy(source.labels[samples]))


def _in_threads(
    jobs: Iterable[Callable[[], Batch]], num_threads: int, device: torch.device
) -> Generator[Batch, None, None]:
    """Runs jobs on threads, a few ahead of the consumer, and yields their results in order, on the device."""
    waiting: deque[Future[Batch]] = deque()
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix="loader")
    try:
        for job in jobs:
            waiting.append(executor.submit(job))
            if len(waiting) > num_threads + 1:
                yield _to_device(waiting.popleft().result(), device)
        while waiting:
            yield _to_device(waiting.popleft().result(), device)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(batch.images.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True))
