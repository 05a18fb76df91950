"""What strategies of communication are worth on a cluster, or on links of some rate.

All workers train by one strategy at a time, and strategies take turns, in every round. Who the workers are is the
business of `comm_hosts` and `comm_ray`.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain.bench.comm_rank import CLASSES, STEPS_PER_EPOCH, STRATEGIES, make_config, make_digits_config
from raytrain.bench.comm_ranks import Probe, Ranks
from raytrain.bench.comm_report import CommReport, Figures, link_name
from raytrain.bench.hosts import bits_per_second
from raytrain.errors import ConfigError
from raytrain.model import check_model
from raytrain.plan import make_plan
from raytrain.schedule import make_schedule

FASTEST, SLOWEST = 20e9, 20e6
"""Bits per second between which a rate is looked for."""
TOLERANCE = 0.03


@dataclass(frozen=True)
class Wanted:
    """What is to be measured.

    Args:
        rates: of the links, such as "500mbit"; None leaves them as they are.
        rounds: measured ones. Each turn of each round warms up.
        steps: of a turn.
        strategies: of STRATEGIES.
        recipe: what the workers compute, as section.key=value over quickstart's; by default images of 64 pixels, 48 of
            them a worker.
        fall_to: in place of the rates, the one at which DistributedDataParallel has this fraction of its speed on links
            that are not shaped, and a tenth of it.
        predict: numbers of workers for which a step is to be predicted, none below what there is.
        seeds: of the trainings on the digits, by each strategy.

    Raises:
        ConfigError: there is no such strategy or rate, or the recipe has no sense.
    """

    rates: Sequence[str | None] = (None,)
    rounds: int = 5
    steps: int = 3
    strategies: Sequence[str] = ()
    recipe: Sequence[str] = ()
    fall_to: float | None = None
    predict: Sequence[int] = ()
    seeds: int = 0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.strategies if name not in STRATEGIES]:
            raise ConfigError(f"no strategy {unknown[0]}; there are {', '.join(STRATEGIES)}")
        try:
            unfit = [rate for rate in self.rates if rate is not None and bits_per_second(rate) < 1]
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if unfit:
            raise ConfigError(f"a link of {unfit[0]} lets nothing through")
        if self.fall_to is not None and not 0 < self.fall_to < 1:
            raise ConfigError(f"--find-rate {self.fall_to:g}: a fraction of ddp's speed, between 0 and 1")
        for name in ("plain", *self.strategies):
            config = make_config(name, self.recipe, 2)
            check_model(config.model, config.data, CLASSES)
            make_schedule(config, make_plan(config.train, STEPS_PER_EPOCH * config.train.global_batch_size))

    def check_size(self, world_size: int) -> None:
        """Raises ConfigError where so many workers are too many or too few."""
        for name in self.strategies if self.seeds else ():
            make_digits_config(name, 0, world_size)
        if self.predict and min(self.predict) < max(world_size, 2):
            raise ConfigError(f"--predict {min(self.predict)}: larger clusters than this one of {world_size} worker(s)")


def bench_comm(wanted: Wanted, ranks: Ranks, place: str) -> CommReport:
    """Measures images/s of strategies, and of DistributedDataParallel and computation alone beside them.

    Args:
        wanted: what is to be measured.
        ranks: the workers.
        place: what they are, for the report.

    Raises:
        ConfigError: there are too many workers for the digits, or for what is to be predicted.
        WorkerError: a worker died, or does not answer.
    """
    config = make_config("plain", wanted.recipe, ranks.world_size)
    wanted.check_size(ranks.world_size)
    images = f"{config.data.image_size} px, {config.train.micro_batch_size} images a worker"
    notes = [
        f"{config.model.name}, {images}, {wanted.steps} steps a turn; {place}.",
        "computation: each worker for itself, all at once. ddp: DistributedDataParallel with its defaults.",
        "Lost to communication: time that computation alone does not take. On the wire: what a host's interface sends.",
    ]
    rates = wanted.rates
    if wanted.fall_to is not None:
        found, fraction = _find_rate(ranks, wanted.steps, wanted.fall_to)
        rates = [found, _mbit(bits_per_second(found) / 10)]
        notes.append(f"Asked for was the rate at which ddp has {wanted.fall_to:g} of its speed; found: {fraction:.2f}.")
    pairs = [(None, "computation"), (None, "ddp"), *[(None, "data_parallel")] * ranks.has_data_parallel]
    pairs += [(rate, name) for rate in rates for name in ("ddp", *wanted.strategies)]
    figures: Figures = {pair: [] for pair in pairs}
    probes: dict[str | None, list[Probe]] = {rate: [] for rate in rates if wanted.predict}
    for number in range(wanted.rounds):
        for rate, name in list(figures)[:: -1 if number % 2 else 1]:  # who follows whom changes
            figures[rate, name].append(ranks.turn(name, rate, wanted.steps))
            speed = figures[rate, name][-1].images_per_second
            _say(f"round {number + 1}/{wanted.rounds}: {name} {link_name(rate)}: {speed:.1f} images/s")
        for rate, measured in probes.items():
            measured.append(ranks.probe(rate))
    top1: dict[str, list[float]] = {name: [] for name in wanted.strategies}
    for name, scores in top1.items():
        for seed in range(wanted.seeds):
            scores.append(ranks.top1(name, seed))
            _say(f"{name} on the digits, seed {seed}: top-1 {scores[-1]:.4f}")
    if ranks.has_data_parallel:
        notes.append("data_parallel: torch's DataParallel, one process with all GPUs.")
    if wanted.seeds:
        notes.append(f"Top-1 on the digits: quickstart's recipe, seeds 0 to {wanted.seeds - 1}, on the same workers.")
    sync = [name for name in wanted.strategies if STRATEGIES[name].is_sync]
    sizes = {"images_per_step": config.train.global_batch_size, "predict": wanted.predict}
    return CommReport.of(figures, wanted.strategies, sync, tuple(notes), top1, probes, **sizes)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _find_rate(ranks: Ranks, steps: int, fall_to: float) -> tuple[str, float]:
    """A rate at which DistributedDataParallel has about a fraction of its speed unshaped, and the fraction it has."""
    low, high = SLOWEST, FASTEST
    while True:
        rate = _mbit(math.sqrt(low * high))
        fraction = ranks.turn("ddp", rate, steps).images_per_second / ranks.turn("ddp", None, steps).images_per_second
        _say(f"ddp at {rate}: {fraction:.3f} of its speed unshaped")
        if abs(fraction - fall_to) <= TOLERANCE or high < 1.1 * low:
            return rate, fraction
        low, high = (bits_per_second(rate), high) if fraction < fall_to else (low, bits_per_second(rate))


def _mbit(bits: float) -> str:
    return f"{bits / 1e6:.0f}mbit"
