"""One worker of `raytrain.bench.comm`, which does as it is asked: takes turns at training, measures, trains to the end.

    python -m raytrain.bench.comm_rank [section.key=value ...]          with torchrun's environment

It reads lines, a method of `Worker` with its arguments as JSON each, and answers each with what the method returns.
"""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel

from raytrain.comm.compression import Half, Uncompressed
from raytrain.comm.probe import measure_computation, measure_delay, measure_sums, now
from raytrain.comm.topology import Topology, nodes_of
from raytrain.commandline import parse
from raytrain.config import Config
from raytrain.data.loader import Batch, StepBatches
from raytrain.data.source import open_sources
from raytrain.distributed import Runtime, resolve_precision, torchrun_runtime
from raytrain.errors import ConfigError, RunError
from raytrain.loop import AUTOCAST_DTYPES, apply, compute_gradients, train
from raytrain.model import build_model
from raytrain.monitor import Monitor
from raytrain.optim import make_optimizer
from raytrain.plan import make_plan
from raytrain.recorder import Recorder
from raytrain.schedule import make_schedule
from raytrain.state import TrainState
from raytrain.storage import Storage

WORKLOAD = ("data.image_size=64", "train.micro_batch_size=48")
"""What a worker computes in a step, unless the recipe says otherwise."""
CLASSES = 10
STEPS_PER_EPOCH = 100
"""As far as a schedule of the learning rate is concerned."""
OWN_KEYS = ("comm.", "train.global_batch_size=", "scaling.num_workers=")
"""How keys begin that the benchmark sets."""
WARM_UP_STEPS = 2


class Strategy(NamedTuple):
    """A way of communication."""

    overrides: tuple[str, ...] = ()
    """What it changes in the config."""
    is_sync: bool = True
    """Whether it is synchronous SGD with gradients of 16 bits or more."""
    at_once: tuple[str, ...] = ()
    """What it takes besides not to train otherwise at first."""
    cycle: int = 1
    """Steps in which it does all that it does."""
    needs_ray: bool = False


REFERENCES = {"computation": Strategy(), "ddp": Strategy(), "data_parallel": Strategy()}
"""`computation`: raytrain, each rank for itself. `ddp`: DistributedDataParallel as it comes, with its defaults.
`data_parallel`: torch's DataParallel, one process with all GPUs of its host."""
STRATEGIES = {
    "plain": Strategy(),
    "fp16": Strategy(("comm.compression=fp16",)),
    "bf16": Strategy(("comm.compression=bf16",)),
    "bf16+5MiB": Strategy(("comm.compression=bf16", "comm.bucket_cap_mb=5")),
    "bf16+10MiB": Strategy(("comm.compression=bf16", "comm.bucket_cap_mb=10")),
    "powersgd": Strategy(
        ("comm.compression=powersgd",), is_sync=False, at_once=(f"comm.powersgd_start_step={WARM_UP_STEPS}",)
    ),
    "onebit": Strategy(("comm.compression=onebit",), is_sync=False),
    "hierarchical": Strategy(("comm.topology=hierarchical",)),
    "next_step": Strategy(("comm.overlap=next_step",), is_sync=False),
    "next_step+bf16": Strategy(("comm.overlap=next_step", "comm.compression=bf16"), is_sync=False),
    "next_step+onebit": Strategy(("comm.overlap=next_step", "comm.compression=onebit"), is_sync=False),
    "onebit_adam": Strategy(
        ("optim.name=onebit_adam", "optim.base_lr=0.001"),
        is_sync=False,
        at_once=(f"optim.freeze_step={WARM_UP_STEPS}",),
    ),
    "local_sgd": Strategy(("comm.sync=local_sgd", "comm.period=8"), is_sync=False, cycle=8),
    "async": Strategy(("comm.sync=async", "comm.period=8"), is_sync=False, cycle=8, needs_ray=True),
}
PREDICTED = {"plain": Uncompressed(), "fp16": Half(torch.float16), "hierarchical": Uncompressed()}
"""Strategies that `comm.predict` predicts."""


class Turn(NamedTuple):
    """What a rank has done in a turn."""

    seconds: float
    images: int
    """In those seconds."""
    wait_seconds: float | None
    """Of them, in which computation waited for communication; None where nothing tells."""
    sent_bytes: float
    """To other ranks in a step, by arithmetic."""


class Worker:
    """One rank. All ranks must be asked the same.

    Args:
        runtime: this process.
        recipe: what it computes, as section.key=value over WORKLOAD.
    """

    def __init__(self, runtime: Runtime, recipe: Sequence[str]) -> None:
        self._runtime, self._recipe = runtime, recipe
        self._side: Raytrain | Bare | None = None

    def prepare(self, name: str, server: Any = None) -> None:
        """Builds the state of a strategy and warms up; `take` is to follow.

        Args:
            name: of the strategy.
            server: the parameter server, where it needs one.
        """
        self._side = make_side(name, self._recipe, replace(self._runtime, server=server))
        self._side.take(range(WARM_UP_STEPS))
        self._side.finish()
        self._runtime.barrier()

    def take(self, lead_in: int, steps: int) -> dict[str, Any]:
        """Takes steps by the strategy, and says what it has done, as the fields of `Turn`.

        Args:
            lead_in: steps that are not timed. Those that are follow without a pause: so what a step leaves to the next
                one is paid for.
            steps: that are timed.
        """
        side, timed_from = self._side, WARM_UP_STEPS + lead_in
        assert side is not None
        sent = side.sent_bytes()
        side.take(range(WARM_UP_STEPS, timed_from))
        side.waited()
        start = now(self._runtime.device)
        side.take(range(timed_from, timed_from + steps))
        seconds, waited = now(self._runtime.device) - start, side.waited()
        side.finish()
        self._runtime.barrier()
        turn = Turn(seconds, steps * side.images, waited, (side.sent_bytes() - sent) / (lead_in + steps))
        side.close()
        self._side = side = None
        gc.collect()  # what DistributedDataParallel and its hook hold of each other
        return turn._asdict()

    def probe(self) -> dict[str, Any]:
        """What `comm.predict` needs of the strategies in PREDICTED, as the fields of its tuples."""
        runtime, sums = self._runtime, {}
        delay = measure_delay(runtime)
        config = make_config("plain", self._recipe, runtime.world_size)
        dtype = AUTOCAST_DTYPES.get(resolve_precision(config.train.precision, runtime.device))
        for name, compression in PREDICTED.items():
            hierarchical = name == "hierarchical"
            nodes = nodes_of(runtime.gather(runtime.node if hierarchical else runtime.rank), None)
            if len(nodes) > 1:  # else nothing goes over the network
                topology = Topology(nodes, runtime.rank)
                sums[name] = asdict(measure_sums(topology, compression, runtime, len(nodes), delay))
                topology.close()
        return {"computation": asdict(measure_computation(config, CLASSES, runtime, dtype)), "sums": sums}

    def train(self, name: str, seed: int, server: Any = None) -> float:
        """Trains by quickstart's recipe on the digits, and says which top-1 it came to at the end."""
        config = make_digits_config(name, seed, self._runtime.world_size)
        with tempfile.TemporaryDirectory() as folder:
            runtime, sources = replace(self._runtime, server=server), open_sources(config.data)
            progress = train(config, runtime, sources, Storage(Path(folder), RunError), Recorder())
            runtime.barrier()
        return progress.metrics["val/top1"]

    def sent_on_wire(self, address: str) -> int:
        """Bytes that this machine's interface of an address has sent."""
        counters = psutil.net_io_counters(pernic=True)
        names = [name for name, own in psutil.net_if_addrs().items() if address in {one.address for one in own}]
        return sum(counters[name].bytes_sent for name in names)


def main() -> None:
    """Answers lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed goes to standard error
    worker = Worker(torchrun_runtime(use_gpu=False), tuple(sys.argv[1:]))
    for line in iter(sys.stdin.readline, ""):
        method, *arguments = json.loads(line)
        answers.write(json.dumps(getattr(worker, method)(*arguments)) + "\n")
    dist.destroy_process_group()


def make_config(name: str, recipe: Sequence[str], world_size: int) -> Config:
    """A strategy's, with one micro-batch a worker.

    Raises:
        ConfigError: there is something wrong with the words of the recipe.
    """
    if unfit := [word for word in recipe if word.startswith(OWN_KEYS)]:
        raise ConfigError(f"{unfit[0]}: the benchmark sets this; a recipe says what a worker computes")
    words = [*WORKLOAD, *recipe]
    images = next(word.partition("=")[2] for word in reversed(words) if word.startswith("train.micro_batch_size="))
    whole = int(images) * world_size if images.isdecimal() else images
    words += [f"train.global_batch_size={whole}", f"scaling.num_workers={world_size}"]
    strategy = (REFERENCES | STRATEGIES)[name]
    words += (*strategy.overrides, *strategy.at_once)
    return parse(words, "quickstart", frozenset()).config


def make_digits_config(name: str, seed: int, world_size: int) -> Config:
    """Quickstart by a strategy, its batch in as large micro-batches as there are workers for.

    Raises:
        ConfigError: there are more workers than micro-batches of 2 in a batch.
    """
    batch = parse((), "quickstart", frozenset()).config.train.global_batch_size
    size = next((size for size in range(batch, 2, -1) if batch % size == 0 and batch // size >= world_size), 2)
    words = [*STRATEGIES[name].overrides, f"run.seed={seed}", f"train.micro_batch_size={size}"]
    words += [f"scaling.num_workers={world_size}", "checkpoint.every_epochs=null"]
    return parse(words, "quickstart", frozenset()).config


def make_side(name: str, recipe: Sequence[str], runtime: Runtime) -> "Raytrain | Bare":
    """What takes the steps of a strategy. All ranks must call."""
    config = make_config(name, recipe, runtime.world_size)
    size, count = config.data.image_size, config.train.micro_batch_size
    if name == "data_parallel":
        count *= max(torch.cuda.device_count(), 1)
    torch.manual_seed(runtime.rank)
    images = torch.randint(256, (count, size, size, 3), dtype=torch.uint8)
    batch = Batch(images.to(runtime.device), torch.randint(CLASSES, (count,)).to(runtime.device), count)
    if name in {"ddp", "data_parallel"}:
        return Bare(config, batch, runtime, DistributedDataParallel if name == "ddp" else DataParallel)
    return Raytrain(config, batch, Runtime(device=runtime.device) if name == "computation" else runtime)


class Raytrain:
    """Steps as the loop takes them, with images that are ready in memory. All ranks must call its methods."""

    def __init__(self, config: Config, batch: Batch, runtime: Runtime) -> None:
        self._config, self._batch, self._runtime, self.images = config, batch, runtime, batch.count
        self._precision = resolve_precision(config.train.precision, runtime.device)
        self._state = TrainState(config, CLASSES, runtime, self._precision)
        plan = make_plan(config.train, STEPS_PER_EPOCH * config.train.global_batch_size)
        self._learning_rate = make_schedule(config, plan)

    def take(self, steps: range) -> None:
        """Takes steps, of which the last may have left something under way."""
        own, monitor = StepBatches([self._batch], self._runtime.rank), Monitor()
        count = self._runtime.world_size
        images = count * self._batch.count
        for step in steps:
            outcome = compute_gradients(
                self._config,
                self._state,
                own,
                count,
                images,
                step,
                self._precision,
                self._runtime,
                monitor,
                agree=False,
            )
            apply(self._config, self._state, outcome, step, self._learning_rate)

    def finish(self) -> None:
        """Ends what is under way."""
        if (outcome := self._state.reduction.flush()) is not None:
            assert outcome.step is not None
            apply(self._config, self._state, outcome, outcome.step, self._learning_rate)

    def waited(self) -> float | None:
        """Seconds in which computation waited for communication since this was last called."""
        return self._state.reduction.clock.seconds()

    def sent_bytes(self) -> float:
        """To other ranks, by arithmetic, since the beginning."""
        return self._state.reduction.sent_bytes

    def close(self) -> None:
        """Ends its process groups."""
        self._state.reduction.close()


class Bare:
    """The same network and optimizer, in torch's wrapping, and nothing else. All ranks must call its methods."""

    def __init__(self, config: Config, batch: Batch, runtime: Runtime, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self._config, self._batch, self.images = config, batch, batch.count
        self._world_size, self._sent_bytes = runtime.world_size, 0.0
        dtype = AUTOCAST_DTYPES.get(resolve_precision(config.train.precision, runtime.device))
        model = build_model(config.model, config.data, CLASSES, config.run.seed).to(runtime.device)
        self._model = wrap(_InAutocast(model, runtime.device.type, dtype))
        self._optimizer = make_optimizer(model.parameters(), config.optim)

    def take(self, steps: range) -> None:
        """Takes steps."""
        for _ in steps:
            self._optimizer.zero_grad()
            logits = self._model(self._batch.images)
            smoothing = self._config.train.label_smoothing
            functional.cross_entropy(logits, self._batch.labels, label_smoothing=smoothing).backward()
            self._optimizer.step()
            size = sum(parameter.nbytes for parameter in self._model.parameters())
            self._sent_bytes += 2 * (self._world_size - 1) / self._world_size * size  # around a ring

    def finish(self) -> None:
        """Nothing is under way."""

    def waited(self) -> float | None:
        """Nothing tells."""
        return None

    def sent_bytes(self) -> float:
        """To other ranks, by arithmetic, since the beginning."""
        return self._sent_bytes

    def close(self) -> None:
        """It has no process group of its own."""


class _InAutocast(nn.Module):
    """A network that turns autocast on by itself, since DataParallel's threads know nothing of their caller's dtype."""

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._model, self._device_type, self._dtype = model, device_type, dtype

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device_type, self._dtype, enabled=self._dtype is not None):
            return self._model(images)


if __name__ == "__main__":
    main()
