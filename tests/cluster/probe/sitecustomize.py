"""Keeps a log of the steps that a worker of raytrain computes, in PROBE_FOLDER; for PYTHONPATH.

One file of JSON rows for each process. A step has a row when this rank begins to compute it, with the training samples
that it took for it, and one when the gradients of all ranks are summed. What a killed process wrote is not lost. A step
is as much longer as PROBE_FOLDER/pace says, in seconds.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import inspect
import json
import os
import socket
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ.get("PROBE_FOLDER", ""))
taken: list[int] = []
about = {"run": "", "attempt": 0}
epoch = [-1]


def write(kind, step, **more):
    row = {"time": round(time.time(), 3), "kind": kind, "step": step, **about, **more}
    log().write(json.dumps(row) + "\n")


@functools.cache
def log():
    name = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.jsonl"
    return (FOLDER / name).open("a", buffering=1)


def pause():
    with contextlib.suppress(OSError, ValueError):  # it is being written
        time.sleep(float((FOLDER / "pace").read_text()))


def patch_worker(module):
    work = module.work

    def work_of_attempt(run, *args, **options):
        about.update(run=run.folder.name, attempt=run.attempt)
        return work(run, *args, **options)

    module.work = work_of_attempt


def patch_loader(module):
    take = module._Pending.take

    def take_and_note(pending):
        if pending._job.seed is not None:  # else of an evaluation
            taken.extend(int(sample) for sample in pending._job.samples)
            epoch[0] = pending._job.epoch
        return take(pending)

    module._Pending.take = take_and_note


def patch_loop(module):
    compute = module.compute_gradients
    signature = inspect.signature(compute)

    def compute_and_note(*args, **options):
        given = signature.bind(*args, **options).arguments
        step, runtime = given["step"], given["runtime"]
        pause()
        who = {"rank": runtime.rank, "world_size": runtime.world_size}
        write("begin", step, **who, epoch=epoch[0], samples=taken)
        taken.clear()
        totals = compute(*args, **options)
        write("end", step, **who)
        return totals

    module.compute_gradients = compute_and_note


PATCHES = {"raytrain.worker": patch_worker, "raytrain.data.loader": patch_loader, "raytrain.loop": patch_loop}


class Finder(importlib.abc.MetaPathFinder):
    """Patches those modules when, and if, they are imported."""

    def find_spec(self, name, *_):
        if (patch := PATCHES.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        run_module = spec.loader.exec_module

        def run_and_patch(module):
            run_module(module)
            patch(module)

        spec.loader.exec_module = run_and_patch
        return spec


if "PROBE_FOLDER" in os.environ:
    sys.meta_path.insert(0, Finder())
