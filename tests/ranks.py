"""Runs a function on several ranks, each a process of its own in a gloo group on this machine."""

import pickle
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing

from raytrain.distributed import Runtime


def run_ranks(world_size, function, *args, timeout_seconds=600):
    """[function(runtime, *args) of each rank]. With one rank it runs in this process, without a group.

    A collective that takes longer than the timeout fails.
    """
    if world_size == 1:
        return [function(Runtime(), *args)]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            _rank, (world_size, folder, timedelta(seconds=timeout_seconds), function, args), world_size
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def _rank(rank, world_size, folder, timeout, function, args):
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, timeout=timeout, rank=rank, world_size=world_size)
    result = function(Runtime(rank, rank, world_size), *args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
