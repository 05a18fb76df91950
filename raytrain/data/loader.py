"""Threads that turn samples into batches beside the step.

Decoding and resizing release Python's lock, so threads do as well as processes, and share what they read. As many
images are under way as keep the threads busy while a batch is taken.
"""

import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch

from raytrain import config
from raytrain.data.bad import BadImages
from raytrain.data.fill import Chunk, Job, fill
from raytrain.data.mix import mix
from raytrain.data.order import epoch_order
from raytrain.data.source import Source
from raytrain.plan import Plan, deal

CHUNK = 16
"""Images that a thread takes at a time."""
SWITCH_SECONDS = 1e-4
"""How soon a thread that waits for Python's lock is given it. With Python's own 5 ms, loader threads that come back
from decoding wait for a busy main thread, and cost three times as much."""
NO_LABEL = -100
"""What cross_entropy passes over."""


class Batch(NamedTuple):
    """Images that go through the network together."""

    images: torch.Tensor
    """uint8 [N, H, W, 3], on the device; float32 on the same scale where MixUp or CutMix is on."""
    labels: torch.Tensor
    """int64 [N], on the device; float32 [N, classes] where MixUp or CutMix is on. NO_LABEL for an image that could
    not be decoded and only fills a batch that would have less than two."""
    count: int
    """Images with a label."""


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
    bad: BadImages | None = None,
) -> Generator[StepBatches, None, None]:
    """This rank's part of each step from `start_step` to the end of the run.

    Args:
        source: the training set.
        data: the config.
        plan: which images a step takes.
        seed: of order and augmentation.
        rank: this process.
        world_size: all of them.
        start_step: the first step.
        num_threads: that decode.
        device: where batches go.
        bad: takes the images that cannot be decoded, which their batches then lack. None: they end the run.

    Raises:
        DataError: on the step that an unreadable image belongs to.
    """
    steps = range(start_step, plan.total_steps)
    shares = [deal(len(plan.micro_batches(step)), world_size)[rank] for step in range(plan.steps_per_epoch)]

    def jobs() -> Iterator[Job]:
        epoch, order = -1, np.empty(0, np.int64)
        for step in steps:
            if step // plan.steps_per_epoch != epoch:
                epoch = step // plan.steps_per_epoch
                order = epoch_order(seed, epoch, plan.num_images)
            micro_batches = plan.micro_batches(step)
            for number in shares[step % plan.steps_per_epoch]:
                samples = order[micro_batches[number].start : micro_batches[number].stop]
                yield Job(samples, data, seed, epoch)

    with closing(_in_threads(source, jobs(), num_threads, data.image_size, device, bad)) as batches:
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
    bad: BadImages | None = None,
) -> Iterator[Batch]:
    """This rank's part of the validation set: whole batches, so that no result depends on the number of ranks.

    As `train_batches` does, it leaves out what cannot be decoded and tells `bad`, or ends.

    Raises:
        DataError: an image is unreadable.
    """
    count = len(source.labels)
    starts = range(0, count, batch_size)
    mine = [np.arange(starts[n], min(starts[n] + batch_size, count)) for n in deal(len(starts), world_size)[rank]]
    jobs = (Job(samples, data) for samples in mine)
    return _in_threads(source, jobs, num_threads, data.image_size, device, bad)


class _Pending:
    """A batch that threads are at work on, in host memory, pinned where it goes to a GPU."""

    def __init__(
        self,
        source: Source,
        job: Job,
        executor: ThreadPoolExecutor,
        size: int,
        device: torch.device,
        bad: BadImages | None,
    ) -> None:
        self._source, self._job, self._device, self._bad = source, job, device, bad
        self.count = len(job.samples)
        source.prefetch(job.samples)
        self._images = torch.empty((self.count, size, size, 3), dtype=torch.uint8, pin_memory=device.type == "cuda")
        chunks = [range(low, min(low + CHUNK, self.count)) for low in range(0, self.count, CHUNK)]
        self._parts: list[Future[Chunk]] = [
            executor.submit(fill, source, job, self._images, rows, skip=bad is not None) for rows in chunks
        ]
        self._batch: Batch | None = None
        self._copied: Any = None

    def start_copy(self, stream: torch.cuda.Stream) -> None:
        """Copies the batch to the GPU beside what it computes, if it is ready and not yet copied."""
        if self._batch is None and all(part.done() and part.exception() is None for part in self._parts):
            with torch.cuda.stream(stream):
                self._batch = self._finish()
            self._copied = stream.record_event()

    def take(self) -> Batch:
        """Waits for the batch and hands it over."""
        if self._batch is None:
            return self._finish()
        if self._copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._copied)
            self._batch.images.record_stream(current)
            self._batch.labels.record_stream(current)
        return self._batch

    def _finish(self) -> Batch:
        """Waits for the threads, and brings what they made to the device."""
        parts = [part.result() for part in self._parts]
        bad = {row: error for part in parts for row, error in part.bad.items()}
        mixes = [how for part in parts for how in part.mixes]
        labels = torch.from_numpy(self._source.labels[self._job.samples])
        images, count = self._images, self.count - len(bad)
        if bad:
            assert self._bad is not None
            for row, error in bad.items():
                self._bad.add(int(self._job.samples[row]), self._source, error)
            kept = [row for row in range(self.count) if row not in bad]
            if len(kept) >= 2:
                images, labels, mixes = images[kept], labels[kept], [mixes[row] for row in kept]
            else:  # batch norm has no variance of less than two
                labels[list(bad)] = NO_LABEL
                mixes = []
        images, labels = (tensor.to(self._device, non_blocking=True) for tensor in (images, labels))
        if mixes and mixes[0] is not None:
            how = torch.tensor(mixes, dtype=torch.float32, device=self._device)
            images, labels = mix(images, labels, how, len(self._source.class_names))
        return Batch(images, labels, count)


def _start_threads(count: int) -> ThreadPoolExecutor:
    """Threads whose own operations on tensors run on one thread each, as there are many of them."""
    before, all_there = torch.get_num_threads(), threading.Barrier(count)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread takes over the number that others have
        torch.set_num_threads(1)
        all_there.wait()

    executor = ThreadPoolExecutor(count, thread_name_prefix="loader")
    try:
        wait([executor.submit(start) for _ in range(count)])
    except BaseException:
        all_there.abort()  # or those that have started would wait for the others for ever
        raise
    torch.set_num_threads(before)  # it counts for the thread that calls it, and for those that are started later
    return executor


def _in_threads(
    source: Source,
    jobs: Iterable[Job],
    num_threads: int,
    size: int,
    device: torch.device,
    bad: BadImages | None,
) -> Generator[Batch, None, None]:
    """Makes batches on threads, some ahead of the consumer, and yields them in order, on the device."""
    waiting: deque[_Pending] = deque()
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    executor = _start_threads(num_threads)

    def take() -> Batch:
        pending = waiting.popleft()
        if stream is not None:
            for later in waiting:
                later.start_copy(stream)
        return pending.take()

    try:
        for job in jobs:
            waiting.append(_Pending(source, job, executor, size, device, bad))
            if len(waiting) > 2 and sum(pending.count for pending in waiting) > 2 * num_threads * CHUNK:
                yield take()
        while waiting:
            yield take()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        sys.setswitchinterval(switch_seconds)
