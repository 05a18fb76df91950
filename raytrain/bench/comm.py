"""What strategies of communication are worth on a cluster, or on links of some rate.

All workers train by one strategy at a time, and strategies take turns, in every round. Who the workers are is the
business of `comm_hosts` and `comm_ray`.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain.bench.comm_rank import STRATEGIES, make_config, make_digits_config
from raytrain.bench.comm_ranks import Probe, Ranks
from raytrain.bench.comm_report import CommReport, Figures, link_name
from raytrain.bench.hosts import bits_per_second
from raytrain.errors import ConfigError

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
        predict: numbers of workers for which a step is to be predicted.
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
            for rate in self.rates:
                bits_per_second(rate or "1bit")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        make_config("plain", self.recipe, 1)


def bench_comm(wanted: Wanted, ranks: Ranks, place: str) -> CommReport:
    """Measures images/s of strategies, and of DistributedDataParallel and computation alone beside them.

    Args:
        wanted: what is to be measured.
        ranks: the workers.
        place: what they are, for the report.

    Raises:
        ConfigError: there are too many workers for the digits.
        WorkerError: a worker died, or does not answer.
    """
    config = make_config("plain", wanted.recipe, ranks.world_size)
    if wanted.seeds:
        make_digits_config("plain", 0, ranks.world_size)
    rates = wanted.rates
    if wanted.fall_to is not None:
        found = _find_rate(ranks, wanted.steps, wanted.fall_to)
        rates = [found, _mbit(bits_per_second(found) / 10)]
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
    images = f"{config.data.image_size} px, {config.train.micro_batch_size} images a worker"
    notes = [
        f"{config.model.name}, {images}, {wanted.steps} steps a turn; {place}.",
        "computation: each worker for itself, all at once. ddp: DistributedDataParallel with its defaults.",
        "Lost to communication: time that computation alone does not take. On the wire: what a host's interface sends.",
    ]
    if ranks.has_data_parallel:
        notes.append("data_parallel: torch's DataParallel, one process with all GPUs of the first worker's host.")
    if wanted.seeds:
        notes.append(f"Top-1 on the digits: quickstart's recipe, seeds 0 to {wanted.seeds - 1}, on the same workers.")
    sync = [name for name in wanted.strategies if STRATEGIES[name].is_sync]
    sizes = {"images_per_step": config.train.global_batch_size, "predict": wanted.predict}
    return CommReport.of(figures, wanted.strategies, sync, tuple(notes), top1, probes, **sizes)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _find_rate(ranks: Ranks, steps: int, fall_to: float) -> str:
    """The rate at which DistributedDataParallel has a fraction of its speed on links that are not shaped."""
    low, high = SLOWEST, FASTEST
    while True:
        rate = _mbit(math.sqrt(low * high))
        fraction = ranks.turn("ddp", rate, steps).images_per_second / ranks.turn("ddp", None, steps).images_per_second
        _say(f"ddp at {rate}: {fraction:.3f} of its speed unshaped")
        if abs(fraction - fall_to) <= TOLERANCE or high < 1.1 * low:
            return rate
        low, high = (bits_per_second(rate), high) if fraction < fall_to else (low, bits_per_second(rate))


def _mbit(bits: float) -> str:
    return f"{bits / 1e6:.0f}mbit"
