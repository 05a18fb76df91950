"""One process of `raytrain.bench.comm`: takes turns at training by one strategy after the other, as it is told.

    python -m raytrain.bench.comm_rank [section.key=value ...]          with torchrun's environment

It reads lines and answers each with one. `probe`: it measures what predictions need, and says it as JSON. `turn
STRATEGY STEPS`: it builds the strategy's state, takes steps to warm up, and says `ready` when all ranks are. `go`: it
takes the steps, and says when all ranks have, as the JSON of `Turn`.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from raytrain.comm.compression import Half, Uncompressed
from raytrain.comm.probe import measure_computation, measure_sums
from raytrain.comm.topology import Topology, nodes_of
from raytrain.commandline import parse
from raytrain.config import Config
from raytrain.data.loader import Batch, StepBatches
from raytrain.distributed import Runtime, resolve_precision, torchrun_runtime
from raytrain.loop import AUTOCAST_DTYPES, apply, compute_gradients
from raytrain.model import build_model
from raytrain.monitor import Monitor
from raytrain.optim import make_optimizer
from raytrain.plan import make_plan
from raytrain.schedule import make_schedule
from raytrain.state import TrainState

WORKLOAD = ("data.image_size=64", "train.micro_batch_size=48")
"""What a worker computes in a step, unless the recipe says otherwise."""
CLASSES = 10
WARM_UP_STEPS = 2
LEAD_IN_STEPS = 1
"""Before those that are timed, with no pause between: what a step leaves to the next one is then paid for, too."""


class Strategy(NamedTuple):
    """A way of communication."""

    overrides: tuple[str, ...] = ()
    """What it changes in the config."""
    is_sync: bool = True
    """Whether it is synchronous SGD with gradients of 16 bits or more."""
    cycle: int = 1
    """Steps in which it does all that it does."""


REFERENCES = {"computation": Strategy(), "ddp": Strategy()}
"""`computation`: raytrain, each rank for itself. `ddp`: DistributedDataParallel as it comes, with its defaults."""
STRATEGIES = {
    "plain": Strategy(),
    "fp16": Strategy(("comm.compression=fp16",)),
    "bf16": Strategy(("comm.compression=bf16",)),
    "bf16+5MiB": Strategy(("comm.compression=bf16", "comm.bucket_cap_mb=5")),
    "bf16+10MiB": Strategy(("comm.compression=bf16", "comm.bucket_cap_mb=10")),
    "powersgd": Strategy(
        ("comm.compression=powersgd", f"comm.powersgd_start_step={WARM_UP_STEPS}"),
        is_sync=False,
    ),
    "onebit": Strategy(("comm.compression=onebit",), is_sync=False),
    "hierarchical": Strategy(("comm.topology=hierarchical",)),
    "next_step": Strategy(("comm.overlap=next_step",), is_sync=False),
    "next_step+bf16": Strategy(("comm.overlap=next_step", "comm.compression=bf16"), is_sync=False),
    "next_step+onebit": Strategy(("comm.overlap=next_step", "comm.compression=onebit"), is_sync=False),
    "onebit_adam": Strategy(("optim.name=onebit_adam", f"optim.freeze_step={WARM_UP_STEPS}"), is_sync=False),
    "local_sgd": Strategy(("comm.sync=local_sgd", "comm.period=8"), is_sync=False, cycle=8),
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


def main() -> None:
    """Answers lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed goes to standard error
    runtime = torchrun_runtime(use_gpu=False)
    recipe = tuple(sys.argv[1:])
    for line in iter(sys.stdin.readline, ""):
        if line.startswith("probe"):
            answers.write(json.dumps(probe(recipe, runtime)) + "\n")
            continue
        _, name, count = line.split()
        steps, timed_from = int(count), WARM_UP_STEPS + LEAD_IN_STEPS
        side = make_side(name, recipe, runtime)
        side.take(range(WARM_UP_STEPS))
        side.finish()
        runtime.barrier()
        answers.write("ready\n")
        sys.stdin.readline()
        sent = side.sent_bytes()
        side.take(range(WARM_UP_STEPS, timed_from))
        side.waited()
        start = time.perf_counter()
        side.take(range(timed_from, timed_from + steps))
        seconds, waited = time.perf_counter() - start, side.waited()
        side.finish()
        runtime.barrier()
        turn = Turn(seconds, steps * side.images, waited, (side.sent_bytes() - sent) / (LEAD_IN_STEPS + steps))
        answers.write(json.dumps(turn._asdict()) + "\n")
        del side
        gc.collect()  # what DistributedDataParallel and its hook hold of each other
    dist.destroy_process_group()


def probe(recipe: Sequence[str], runtime: Runtime) -> dict[str, Any]:
    """What `comm.predict` needs of the strategies in PREDICTED, as its tuples. All ranks must call."""
    config = make_config("plain", recipe, runtime.world_size)
    dtype = AUTOCAST_DTYPES.get(resolve_precision(config.train.precision, runtime.device))
    sums = {}
    for name, compression in PREDICTED.items():
        hierarchical = name == "hierarchical"
        nodes = nodes_of(runtime.gather(runtime.node if hierarchical else runtime.rank), None)
        topology = Topology(nodes, runtime.rank)
        sums[name] = asdict(measure_sums(topology, compression, runtime, len(nodes)))
        topology.close()
    return {"computation": asdict(measure_computation(config, CLASSES, runtime, dtype)), "sums": sums}


def make_config(name: str, recipe: Sequence[str], world_size: int) -> Config:
    """A strategy's, with one micro-batch a worker.

    Raises:
        ConfigError: there is something wrong with the words of the recipe.
    """
    words = [*WORKLOAD, *recipe]
    images = next(word.partition("=")[2] for word in reversed(words) if word.startswith("train.micro_batch_size="))
    whole = int(images) * world_size if images.isdecimal() else images
    words += [f"train.global_batch_size={whole}", f"scaling.num_workers={world_size}"]
    words += (REFERENCES | STRATEGIES)[name].overrides
    return parse(words, "quickstart", frozenset()).config


def make_side(name: str, recipe: Sequence[str], runtime: Runtime) -> "Raytrain | BareDdp":
    """What takes the steps of a strategy. All ranks must call."""
    config = make_config(name, recipe, runtime.world_size)
    size, count = config.data.image_size, config.train.micro_batch_size
    torch.manual_seed(runtime.rank)
    images = torch.randint(256, (count, size, size, 3), dtype=torch.uint8)
    batch = Batch(images, torch.randint(CLASSES, (count,)), count)
    if name == "ddp":
        return BareDdp(config, batch, runtime)
    return Raytrain(config, batch, Runtime() if name == "computation" else runtime)


class Raytrain:
    """Steps as the loop takes them, with images that are ready in memory. All ranks must call its methods."""

    def __init__(self, config: Config, batch: Batch, runtime: Runtime) -> None:
        self._config, self._batch, self._runtime, self.images = config, batch, runtime, batch.count
        self._precision = resolve_precision(config.train.precision, runtime.device)
        self._state = TrainState(config, CLASSES, runtime, self._precision)
        self._learning_rate = make_schedule(config, make_plan(config.train, 100 * config.train.global_batch_size))

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


class BareDdp:
    """The same network and optimizer, and nothing else of raytrain. All ranks must call its methods."""

    def __init__(self, config: Config, batch: Batch, runtime: Runtime) -> None:
        self._config, self._batch, self.images = config, batch, batch.count
        self._world_size, self._sent_bytes = runtime.world_size, 0.0
        self._dtype = AUTOCAST_DTYPES.get(resolve_precision(config.train.precision, runtime.device))
        model = build_model(config.model, config.data, CLASSES, config.run.seed)
        self._model = DistributedDataParallel(model)
        self._optimizer = make_optimizer(model.parameters(), config.optim)

    def take(self, steps: range) -> None:
        """Takes steps."""
        for _ in steps:
            self._optimizer.zero_grad()
            with torch.autocast("cpu", self._dtype, enabled=self._dtype is not None):
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


if __name__ == "__main__":
    main()
