"""Checkpoints written beside the step: a step waits for a copy in memory, and no longer."""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raytrain import checkpoint, config
from raytrain.checkpoint import Warn
from raytrain.errors import RunError
from raytrain.storage import Storage

PATIENCE_SECONDS = 10.0
"""After a write that has taken longer, because the cores are never free, the next ones do not wait for free ones."""


class Saver:
    """Copies a state to host memory, and writes, hashes and prunes in a thread. For one rank.

    One write is under way at a time, from one copy, which takes as much host memory as the state. The thread takes what
    the steps leave of the cores, unless that makes it slow. Where a write fails because of the disk the training goes
    on, with a warning: the checkpoints that there are stay, and the next one that is due is tried.

    Args:
        folder: of the run's checkpoints.
        keep_last: newest checkpoints to keep.
        keep_best: best checkpoints to keep.
        warn: told of a write that failed, from the thread.
        before: called in the thread before a checkpoint becomes visible; must bring to the disk what belongs with it.
        best_by: the metric that the best are the best by.
    """

    def __init__(
        self,
        folder: Storage,
        keep_last: int,
        keep_best: int,
        warn: Warn,
        before: Callable[[], None] = lambda: None,
        best_by: str = "val/top1",
    ) -> None:
        self._folder, self._keep = folder, (keep_last, keep_best, best_by)
        self._warn, self._before = warn, before
        self._copies: list[torch.Tensor | None] = []
        self._modest = ThreadPoolExecutor(1, thread_name_prefix="saver", initializer=_give_way)
        self._prompt = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._is_slow = False
        self._written: Future[None] | None = None
        self._taken, self._first = time.monotonic(), True

    def is_due(self, step: int, epoch: float, every: config.Checkpoint) -> bool:
        """Whether one is to be taken after so many steps and epochs. The same on all ranks."""
        by_epoch = every.every_epochs is not None and epoch % every.every_epochs == 0
        return by_epoch or (every.every_steps is not None and step % every.every_steps == 0)

    def is_late(self, every: config.Checkpoint) -> bool:
        """Whether the last one was taken too many seconds ago. Each rank has its own clock."""
        return every.every_seconds is not None and time.monotonic() - self._taken >= every.every_seconds

    def save(
        self,
        step: int,
        weights: Mapping[str, Mapping[str, torch.Tensor]],
        training: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        urgent: bool = False,
    ) -> None:
        """Takes a checkpoint, see `checkpoint.save`. Waits for the one before to be written, and for the copy.

        Args:
            step: see `checkpoint.save`.
            weights: the same.
            training: the same.
            state: the same.
            urgent: whether it is to be written as soon as can be, as before an end.

        Raises:
            NonFiniteError: a weight of the one before was not finite.
        """
        with suppress(RunError):  # was told of
            self.finish()
        self._taken = time.monotonic()
        weights, training = self._copy((dict(weights), dict(training)))
        executor = self._prompt if urgent or self._is_slow else self._modest
        self._written = executor.submit(self._write, step, weights, training, deepcopy(dict(state)))

    def finish(self) -> None:
        """Waits for the last checkpoint.

        Raises:
            RunError: it could not be written.
            NonFiniteError: a weight of it was not finite.
        """
        if self._written is not None:
            self._written.result()

    def close(self) -> None:
        """Waits for the last checkpoint, whatever becomes of it, and ends the thread."""
        self._modest.shutdown()
        self._prompt.shutdown()

    def _copy(self, tree: Any) -> Any:
        """The same with its tensors in host memory that is used again for each copy."""
        leaves, structure = pytree.tree_flatten(tree)
        if len(self._copies) != len(leaves):
            self._copies = [None] * len(leaves)
        devices = set()
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            mine = self._copies[number]
            if mine is None or mine.shape != leaf.shape or mine.dtype != leaf.dtype:
                mine = torch.empty_like(leaf, device="cpu", pin_memory=leaf.is_cuda, requires_grad=False)
                self._copies[number] = mine
            leaves[number] = mine.copy_(leaf.detach(), non_blocking=True)
            devices.add(leaf.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return pytree.tree_unflatten(leaves, structure)

    def _write(self, *content: Any) -> None:
        began = time.monotonic()
        try:
            self._before()
            if self._first:  # a process before this one may have been killed before it could
                checkpoint.prune(self._folder, *self._keep)
                self._first = False
            checkpoint.save(self._folder, *content)
            checkpoint.prune(self._folder, *self._keep)
        except RunError as error:
            self._warn(str(error))
            raise
        finally:
            self._is_slow |= time.monotonic() - began > PATIENCE_SECONDS


def _give_way() -> None:
    """Makes the thread one that runs where a core has nothing else to do.

    A lower priority is not enough: threads that compute a step together wait for the one whose core it takes. There is
    no way back from it for a process without privileges.
    """
    if sys.platform == "linux":  # where a thread has a policy of its own
        with suppress(OSError):  # a sandbox may refuse it
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
