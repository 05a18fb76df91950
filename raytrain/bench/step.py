"""What the loop costs beside the computation: `train` itself against the least that DistributedDataParallel needs.

Each process runs all sides in threads of its own that pass a baton: a side computes its steps of the round, then
waits. So the sides alternate on the same cores, with the same process group, and `train` is measured as it is:
loader, batch-norm statistics, logging, MLflow and checks included. Evaluation and checkpoints lie between steps
and are not measured here.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from raytrain.bench.report import Report
from raytrain.commandline import parse
from raytrain.config import Config
from raytrain.data.source import open_sources
from raytrain.distributed import Runtime, available_cores, resolve_precision
from raytrain.errors import RunError
from raytrain.loop import AUTOCAST_DTYPES, train
from raytrain.model import build_model
from raytrain.recorder import Listener, Recorder
from raytrain.storage import Storage

RATIOS = {
    "raytrain_vs_bare_ddp": ("raytrain", "bare_ddp"),
    "raytrain_vs_bare_ddp_fused": ("raytrain", "bare_ddp_fused"),
    "exact_vs_float": ("raytrain_exact", "raytrain"),
}


def bench_step(workers: int, rounds: int, steps: int) -> Report:
    """Measures images/s of the quickstart's recipe on so many processes."""
    if torch.cuda.is_available():
        workers = min(workers, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (workers, rounds, steps, folder), workers)
        rows = torch.load(Path(folder) / "rows.pt", weights_only=True)
    tracked = "MLflow in a SQLite store" if find_spec("mlflow") else "no MLflow, which is not installed"
    notes = (
        f"ResNet-50, 32 px, global batch 32, {workers} processes, {steps} steps a round; raytrain with {tracked}.",
        "bare_ddp: DDP(model), torch.optim.SGD with its defaults, images ready in memory; fused: with fused=True.",
    )
    return Report("step", "images/s", rows, RATIOS, notes)


class Baton:
    """Lets the sides of a process compute in turn, and times each turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._over = False

    def wait(self) -> None:
        """Called by a side: ends its turn, returns at the next one."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._done.release()
        self._turn.acquire()
        if self._over:
            raise _OverError

    def run(self) -> float:
        """Called by the conductor: lets the side have a turn, and returns its seconds."""
        dist.barrier()
        start = time.perf_counter()
        self._turn.release()
        self._done.acquire()
        dist.barrier()
        return time.perf_counter() - start

    def end(self, thread: threading.Thread) -> None:
        """Ends a side that waits for its turn."""
        self._over = True
        self._turn.release()
        thread.join()

    def start(self, side: Callable[["Baton"], None], threads: int) -> threading.Thread:
        """Starts a side, and returns when it is ready for its first turn."""

        def body() -> None:
            torch.set_num_threads(threads)
            with suppress(_OverError):
                side(self)

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        self._done.acquire()
        return thread


class _OverError(Exception):
    pass


def _rank(rank: int, workers: int, rounds: int, steps: int, folder: str) -> None:
    use_gpu = torch.cuda.is_available()
    threads = max(1, available_cores() // workers)
    torch.set_num_threads(threads)
    device = torch.device("cuda", rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    meet = f"file://{folder}/meet"
    dist.init_process_group("nccl" if use_gpu else "gloo", init_method=meet, rank=rank, world_size=workers)
    runtime = Runtime(rank, rank, workers, device)
    sides = {
        "bare_ddp": partial(_bare_side, runtime, steps, fused=False),
        "bare_ddp_fused": partial(_bare_side, runtime, steps, fused=True),
        "raytrain": partial(_raytrain_side, runtime, steps, Path(folder), "float"),
        "raytrain_exact": partial(_raytrain_side, runtime, steps, Path(folder), "exact"),
    }
    batons = {name: Baton(device) for name in sides}
    threads_of = [batons[name].start(side, threads) for name, side in sides.items()]
    rows: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:  # who follows whom changes from round to round
            seconds = batons[name].run()
            if number > 0:  # the first one warms up
                rows[name].append(steps * _quickstart().train.global_batch_size / seconds)
    for baton, thread in zip(batons.values(), threads_of, strict=True):
        baton.end(thread)
    if rank == 0:
        torch.save(rows, Path(folder) / "rows.pt")
    dist.destroy_process_group()


def _quickstart(reduction: str = "float") -> Config:
    words = [f"comm.reduction={reduction}", "train.epochs=1000", "train.eval_every_epochs=1000"]
    return parse([*words, "checkpoint.every_epochs=null"], "quickstart", frozenset()).config


def _bare_side(runtime: Runtime, steps: int, baton: Baton, *, fused: bool) -> None:
    """The least that trains: one micro-batch a process, in memory, normalised beforehand."""
    config = _quickstart()
    model = build_model(config.model, config.data, 10, config.run.seed).body.to(runtime.device)
    parallel = DistributedDataParallel(model, device_ids=[runtime.device] if runtime.device.type == "cuda" else None)
    optim, size = config.optim, config.train.global_batch_size // runtime.world_size
    optimizer = torch.optim.SGD(
        parallel.parameters(),
        optim.base_lr,
        optim.momentum,
        0,
        optim.weight_decay,
        nesterov=optim.nesterov,
        fused=fused,
    )
    images = torch.randn(size, 3, config.data.image_size, config.data.image_size, device=runtime.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (size,), device=runtime.device)
    dtype = AUTOCAST_DTYPES.get(resolve_precision(config.train.precision, runtime.device))
    while True:
        baton.wait()
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(runtime.device.type, dtype, enabled=dtype is not None):
                logits = parallel(images)
                loss = functional.cross_entropy(logits, labels, label_smoothing=config.train.label_smoothing)
            loss.backward()
            optimizer.step()


def _raytrain_side(runtime: Runtime, steps: int, folder: Path, reduction: str, baton: Baton) -> None:
    """`train` as it is. The recorder, which every rank has here, ends a turn when it is told the metrics."""
    config = _quickstart(reduction)
    config = config.model_copy(update={"train": config.train.model_copy(update={"log_every": steps})})
    (folder / reduction).mkdir(exist_ok=True)
    directory = Storage(folder / reduction, RunError)

    def end_turn(event: dict[str, Any]) -> None:
        if event["kind"] == "metrics":
            baton.wait()

    with ExitStack() as stack:
        listeners: list[Listener] = [end_turn]
        if runtime.rank == 0 and find_spec("mlflow"):
            listeners.insert(0, stack.enter_context(_send_to_mlflow(config, directory)))
        recorder = Recorder(directory if runtime.rank == 0 else None, *listeners)
        baton.wait()
        train(config, runtime, open_sources(config.data), directory, recorder)


def _send_to_mlflow(config: Config, directory: Storage) -> AbstractContextManager[Listener]:
    from raytrain import tracking
    from raytrain.run import Run
    from raytrain.worker import sending

    uri = f"sqlite:///{directory.path / 'mlflow.db'}"
    tracked = tracking.start_run(uri, "bench", name="bench", params={}, tags={}, config="")
    return sending(Run(config, directory, tracked), lambda _: None)
