"""Threads that turn samples into batches beside the step."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
    mine = [deal(len(plan.micro_batches(step)), world_size)[rank] for step in range(plan.steps_per_epoch)]

    def jobs() -> Iterator[partial[Batch]]:
        epoch, order = -1, np.empty(0)
        for step in steps:
            if step // plan.steps_per_epoch != epoch:
                epoch = step // plan.steps_per_epoch
                order = epoch_order(seed, epoch, plan.num_images)
            micro_batches = plan.micro_batches(step)
            for number in mine[step % plan.steps_per_epoch]:
                positions = micro_batches[number]
                samples = order[positions.start : positions.stop]
                yield partial(_make_train_batch, source, data, seed, epoch, samples, device.type == "cuda")

    batches = _in_threads(jobs(), num_threads, device)
    try:
        for step in steps:
            share = mine[step % plan.steps_per_epoch]
            yield StepBatches([next(batches) for _ in share], share.start)
    finally:
        batches.close()


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
    starts = range(0, len(source.labels), batch_size)
    jobs = (
        partial(
            _make_eval_batch,
            source,
            data,
            np.arange(starts[n], min(starts[n] + batch_size, len(source.labels))),
            device.type == "cuda",
        )
        for n in deal(len(starts), world_size)[rank]
    )
    return _in_threads(jobs, num_threads, device)


def _in_threads(jobs: Iterable[partial[Batch]], num_threads: int, device: torch.device) -> Iterator[Batch]:
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


def _make_train_batch(
    source: Source, data: config.Data, seed: int, epoch: int, samples: np.ndarray, pin_memory: bool
) -> Batch:
    def transform(image: Image.Image, sample: int) -> Image.Image:
        return train_transform(image, data, sample_rng(seed, epoch, sample))

    return _make_batch(source, samples, data.image_size, transform, pin_memory)


def _make_eval_batch(source: Source, data: config.Data, samples: np.ndarray, pin_memory: bool) -> Batch:
    return _make_batch(
        source, samples, data.image_size, lambda image, _: eval_transform(image, data), pin_memory
    )


def _make_batch(
    source: Source,
    samples: np.ndarray,
    size: int,
    transform: Callable[[Image.Image, int], Image.Image],
    pin_memory: bool,
) -> Batch:
    images = torch.empty(len(samples), size, size, 3, dtype=torch.uint8, pin_memory=pin_memory)
    pixels = images.numpy()
    for row, sample in enumerate(samples.tolist()):
        image = transform(decode(source.read(sample), source.name(sample)), sample)
        array = np.asarray(image)
        pixels[row] = array if array.ndim == 3 else array[:, :, None]
    return Batch(images, torch.from_numpy(source.labels[samples]))


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(batch.images.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True))
