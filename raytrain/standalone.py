"""A run in the processes that torchrun started, without Ray: `torchrun --nproc-per-node 2 -m raytrain.fit ...`."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
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
from raytrain.plan import make_plan
from raytrain.schedule import make_schedule
from raytrain.worker import work

T = TypeVar("T")


def run_standalone(request: Request) -> None:
    """Takes part in a run as one of torchrun's processes, all of which must call.

    Rank 0 prepares the run directory and the MLflow run, and finishes them.

    Raises:
        RaytrainError: any of the tree, on every rank where it is a user's error.
    """
    stop: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: stop.append(number))
    runtime = replace(
        torchrun_runtime(use_gpu=request.config.scaling.use_gpu), stop_requested=lambda: stop[0] if stop else 0
    )
    try:
        _run(request, runtime)
    finally:
        dist.destroy_process_group()


def _run(request: Request, runtime: Runtime) -> None:
    config, path = _on_rank_0(runtime, lambda: runs.resolve(request))
    if _on_rank_0(runtime, lambda: runs.is_finished(path)):
        if runtime.rank == 0:
            print(f"run {path.name} is finished\n{runs.summary(path)}")
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
            stack.enter_context(runs.claim(path, resume="--resume" in request.flags))
            tags = runs.place_tags(runtime.world_size, runtime.device.type)
            return runs.start(config, path, plan.num_images, tags)

        run = _on_rank_0(runtime, start)
        if runtime.rank != 0:
            work(run, runtime, lambda _: None, sources)
            return
        with Console(plan, runtime.world_size) as console, runs.finishing(run, console):
            work(run, runtime, console.handle, sources)


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
