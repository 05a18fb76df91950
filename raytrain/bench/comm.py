"""What strategies of communication are worth on links of some rate: hosts in namespaces of this machine, shaped links.

A worker is a process of `raytrain.bench.comm_rank`. All of them train by one strategy at a time; between the turns the
links are shaped, and what a host sends in a turn is read at its interface.
"""

import json
import math
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from raytrain.bench.comm_rank import LEAD_IN_STEPS, REFERENCES, STRATEGIES, Turn, make_config
from raytrain.bench.comm_report import CommReport, Figures, Measured, link_name
from raytrain.bench.hosts import Host, bits_per_second, cluster_of, environment, why_not
from raytrain.comm.predict import Computation, Sums
from raytrain.distributed import available_cores
from raytrain.errors import ConfigError, ResourceError, WorkerError

PORT = 29500
ANSWER_SECONDS = 600
"""How long a turn may take, or the ranks' start."""
FASTEST, SLOWEST = 20e9, 20e6
"""Bits per second between which a rate is looked for."""
TOLERANCE = 0.03
Deal = Literal["node", "round"]


class Layout(NamedTuple):
    """Who is where."""

    hosts: int
    workers_per_host: int
    deal: Deal
    """`node`: the ranks of a host follow each other. `round`: rank r is on host r modulo their number."""

    @property
    def world_size(self) -> int:
        """Ranks on all hosts."""
        return self.hosts * self.workers_per_host

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's host, and its number there."""
        if self.deal == "node":
            return divmod(rank, self.workers_per_host)
        return rank % self.hosts, rank // self.hosts


def bench_comm(
    layout: Layout,
    rates: Sequence[str | None],
    rounds: int,
    steps: int,
    strategies: Sequence[str],
    recipe: Sequence[str] = (),
    fall_to: float | None = None,
) -> CommReport:
    """Measures images/s of strategies, and of DistributedDataParallel and computation alone beside them.

    Args:
        layout: hosts and workers.
        rates: of the links, such as "500mbit"; None leaves them as they are.
        rounds: measured ones. Each turn of each round warms up.
        steps: of a turn.
        strategies: of STRATEGIES.
        recipe: what the workers compute, as section.key=value over quickstart's; by default images of 64 pixels, 48 of
            them a worker.
        fall_to: in place of the rates, the one at which DistributedDataParallel has this fraction of its speed on links
            that are not shaped, and a tenth of it.

    Raises:
        ConfigError: there is no such strategy or rate.
        ResourceError: this machine cannot have such hosts.
        WorkerError: a worker died, or does not answer.
    """
    if unknown := [name for name in strategies if name not in STRATEGIES]:
        raise ConfigError(f"no strategy {unknown[0]}; there are {', '.join(STRATEGIES)}")
    try:
        for rate in rates:
            bits_per_second(rate or "1bit")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config = make_config("plain", recipe, layout.world_size)
    if (reason := why_not()) is not None:
        raise ResourceError(f"this benchmark cannot run here: {reason}")
    with tempfile.TemporaryDirectory(prefix="raytrain-bench-") as temp, cluster_of(layout.hosts, Path(temp)) as hosts:
        ranks = Ranks(hosts, layout, Path(temp), recipe)
        if fall_to is not None:
            found = _find_rate(ranks, steps, fall_to)
            rates = [found, _mbit(bits_per_second(found) / 10)]
        names = [*(name for name in REFERENCES if name != "computation"), *strategies]
        pairs = [(None, "computation"), (None, "ddp"), *((rate, name) for rate in rates for name in names)]
        figures: Figures = {pair: [] for pair in pairs}
        for number in range(rounds):
            for rate, name in list(figures)[:: -1 if number % 2 else 1]:  # who follows whom changes
                figures[rate, name].append(ranks.turn(name, rate, steps))
                speed = figures[rate, name][-1].images_per_second
                print(f"round {number + 1}/{rounds}: {name} {link_name(rate)}: {speed:.1f} images/s", file=sys.stderr)
    images = f"{config.data.image_size} px, {config.train.micro_batch_size} images a worker"
    notes = (
        f"{config.model.name}, {images}, {steps} steps a turn; gloo.",
        f"{layout.world_size} workers of {_threads(layout)} thread(s), on {layout.hosts} hosts in network namespaces.",
        "computation: each worker for itself, all at once. ddp: DistributedDataParallel with its defaults.",
        "Lost to communication: time that computation alone does not take. On the wire: what a host's interface sends.",
    )
    sync = [name for name in strategies if STRATEGIES[name].is_sync]
    return CommReport.of(figures, strategies, sync, config.train.global_batch_size, notes)


class Ranks:
    """The workers, one process each, from their start to the end of their hosts.

    Args:
        hosts: that are on.
        layout: of the workers on them.
        folder: for what they print.
        recipe: what they compute, see `bench_comm`.

    Raises:
        WorkerError: by every method: a worker died, or does not answer. It says which and what it printed last.
    """

    def __init__(self, hosts: Sequence[Host], layout: Layout, folder: Path, recipe: Sequence[str] = ()) -> None:
        self._hosts, self._folder, self._rate = hosts, folder, None
        self._host_of = [hosts[layout.place(rank)[0]] for rank in range(layout.world_size)]
        self._processes: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(self._host_of):
            env = environment(
                RANK=str(rank),
                LOCAL_RANK=str(layout.place(rank)[1]),
                WORLD_SIZE=str(layout.world_size),
                MASTER_ADDR=hosts[0].address,
                MASTER_PORT=str(PORT),
                OMP_NUM_THREADS=str(_threads(layout)),
            )
            command = (sys.executable, "-m", "raytrain.bench.comm_rank", *recipe)
            self._processes.append(host.converse(*command, env=env, log=self._log(rank)))

    def turn(self, name: str, rate: str | None, steps: int) -> Measured:
        """Lets all train by a strategy, with links of a rate, for so many steps or what makes its cycles whole."""
        for host in self._hosts:
            host.shape(rate)
        cycle = (REFERENCES | STRATEGIES)[name].cycle
        steps = -(-steps // cycle) * cycle
        self._tell(f"turn {name} {steps}")
        self._answers()
        before = [host.sent_bytes() for host in self._hosts]
        self._tell("go")
        turns = [Turn(**json.loads(line)) for line in self._answers()]
        sent = sum(host.sent_bytes() for host in self._hosts) - sum(before)
        waits = [turn.wait_seconds / turn.seconds for turn in turns if turn.wait_seconds is not None]
        return Measured(
            images_per_second=sum(turn.images / turn.seconds for turn in turns),
            wire_bytes=sent / len(self._hosts) / (LEAD_IN_STEPS + steps),
            sent_bytes=sum(turn.sent_bytes for turn in turns) / len(turns),
            wait_fraction=sum(waits) / len(waits) if waits else None,
        )

    def probe(self, rate: str | None) -> tuple[Computation, dict[str, Sums]]:
        """What the ranks measure for predictions, with links of a rate."""
        for host in self._hosts:
            host.shape(rate)
        self._tell("probe")
        found = json.loads(self._answers()[0])
        buckets = tuple((ready, size) for ready, size in found["computation"].pop("buckets"))
        sums = {name: Sums(**figures) for name, figures in found["sums"].items()}
        return Computation(buckets=buckets, **found["computation"]), sums

    def _tell(self, line: str) -> None:
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._lost(rank) from None

    def _answers(self) -> list[str]:
        """A line of each rank."""
        lines: dict[int, str] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, (rank, process.stdout))
            while len(lines) < len(self._processes):
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    raise self._lost(min(set(range(len(self._processes))) - set(lines)))
                for key, _ in ready:
                    rank, stream = key.data
                    lines[rank] = stream.readline()
                    if not lines[rank]:
                        raise self._lost(rank)
                    selector.unregister(stream)
        return [lines[rank] for rank in range(len(self._processes))]

    def _lost(self, rank: int) -> WorkerError:
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        status = process.returncode
        what = f"has not answered in {ANSWER_SECONDS} s" if status is None else f"ended with status {status}"
        last = self._log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return WorkerError(
            "\n".join([f"rank {rank} on host {self._host_of[rank].name} {what}; it printed last:", *last])
        )

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


def _find_rate(ranks: Ranks, steps: int, fall_to: float) -> str:
    """The rate at which DistributedDataParallel has a fraction of its speed on links that are not shaped."""
    low, high = SLOWEST, FASTEST
    while True:
        rate = _mbit(math.sqrt(low * high))
        fraction = ranks.turn("ddp", rate, steps).images_per_second / ranks.turn("ddp", None, steps).images_per_second
        print(f"ddp at {rate}: {fraction:.3f} of its speed unshaped", file=sys.stderr)
        if abs(fraction - fall_to) <= TOLERANCE or high < 1.1 * low:
            return rate
        low, high = (bits_per_second(rate), high) if fraction < fall_to else (low, bits_per_second(rate))


def _mbit(bits: float) -> str:
    return f"{bits / 1e6:.0f}mbit"


def _threads(layout: Layout) -> int:
    return max(1, available_cores() // layout.world_size)
