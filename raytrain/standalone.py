"""A run in the processes that torchrun started, without Ray: `torchrun --nproc-per-node 2 -m raytrain.fit ...`."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

from torch import distributed as dist

from raytrain import run as runs
from raytrain.commandline import Request
from raytrain.console import Console
from raytrain.data.source import open_sources
from raytrain.distributed import Runtime, check_precision, torchrun_runtime
from raytrain.errors import RaytrainError
from raytrain.model import check_model
from raytrain.monitor import Monitor, describe_hang
from raytrain.plan import make_plan
from raytrain.results import finishing, summary
from raytrain.schedule import make_schedule
from raytrain.signals import listen, signal_to_stop
from raytrain.worker import work

T = TypeVar("T")

STACKS_SECONDS = 2.0


def run_standalone(request: Request) -> None:
    """Takes part in a run as one of torchrun's processes, all of which must call.

    Rank 0 prepares the run directory and the MLflow run, and finishes them.

    Raises:
        RaytrainError: any of the tree, on every rank where it is a user's error.
    """
    listen()
    runtime = replace(torchrun_runtime(use_gpu=request.config.scaling.use_gpu), stop_requested=signal_to_stop)
    try:
        _run(request, runtime)
    finally:
        dist.destroy_process_group()


def _run(request: Request, runtime: Runtime) -> None:
    config, folder = _on_rank_0(runtime, lambda: runs.resolve(request))
    if _on_rank_0(runtime, lambda: runs.is_finished(folder)):
        if runtime.rank == 0:
            print(f"run {folder.name} is finished\n{summary(folder)}")
        return
    # the checks of a user's mistakes come to the same on all ranks
    config = runs.with_workers(config, runtime.world_size)
    check_precision(config.train.precision, runtime.device.type)
    sources = open_sources(config.data, print)
    check_model(config.model, config.data, len(sources.train.class_names))
    plan = make_plan(config.train, len(sources.train.labels))
    make_schedule(config, plan)
    with ExitStack() as stack:

        def start() -> runs.Run:
            stack.enter_context(runs.claim(folder, resume="--resume" in request.flags))
            tags = runs.place_tags(runtime.world_size, runtime.device.type)
            return runs.next_attempt(runs.start(config, folder, plan.num_images, tags, _warn))

        run = _on_rank_0(runtime, start)
        monitor = Monitor(runtime.rank, socket.gethostname())
        with _watching(monitor, config.train.step_timeout_seconds):
            if runtime.rank != 0:
                work(run, runtime, lambda _: None, monitor, sources)
                return
            with Console(plan) as console, finishing(run, console):
                console.workers(runtime.world_size)
                work(run, runtime, console.handle, monitor, sources)


@contextmanager
def _watching(monitor: Monitor, limit_seconds: float | None) -> Iterator[None]:
    """Ends this process, with a message, where a step takes too long; torchrun then ends the others."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            status = monitor.status(stack=True)
            if limit_seconds is not None and status.seconds > limit_seconds and status.phase != "start":
                print("raytrain: " + "\n".join(describe_hang([status], limit_seconds)), file=sys.stderr, flush=True)
                time.sleep(STACKS_SECONDS)  # for the others to say where they are
                os._exit(1)

    threading.Thread(target=watch, name="watch", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _warn(text: str) -> None:
    print(f"warning: {text}")


def _on_rank_0(runtime: Runtime, call: Callable[[], T]) -> T:
    """What the call returns or raises on rank 0, on all ranks."""
    outcome: list[object] = [None]
    if runtime.rank == 0:
        try:
            outcome = [call()]
        except RaytrainError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, device=runtime.device)
    if isinstance(outcome[0], RaytrainError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]
