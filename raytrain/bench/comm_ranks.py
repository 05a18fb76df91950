"""The workers of `raytrain.bench.comm`, wherever they are, as the benchmark sees them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from raytrain.bench.comm_rank import REFERENCES, STRATEGIES, Turn
from raytrain.comm.predict import Computation, Sums, predict_step

ANSWER_SECONDS, TRAIN_SECONDS = 600, 7200
"""How long a turn may take or the workers' start, and a training on the digits."""


def patience(method: str) -> int:
    """Seconds that a method of `comm_rank.Worker` may take."""
    return TRAIN_SECONDS if method == "train" else ANSWER_SECONDS


class Measured(NamedTuple):
    """A turn, over all ranks."""

    images_per_second: float
    wire_bytes: float | None
    """That a host sent in a step, mean over hosts; None where there is no wire between them."""
    sent_bytes: float
    """That a worker sent in a step by arithmetic, mean over workers."""
    wait_fraction: float | None
    """Of the time, in which computation waited, mean over workers; None where nothing tells."""


class Probe(NamedTuple):
    """What predictions are made from."""

    computation: Computation
    sums: dict[str, Sums]
    """By strategy, of those that are predicted."""
    world_size: int

    def step_seconds(self, name: str, world_size: int) -> float:
        """Predicted, with a strategy, for so many workers on hosts like these, no fewer than these."""
        sums = self.sums[name]
        return predict_step(self.computation, sums.over(-(-world_size * sums.ranks // self.world_size)))


class Ranks(ABC):
    """All of them; see `comm_rank.Worker` for what they can be asked."""

    world_size: int
    has_data_parallel = False
    """Whether a process with several GPUs can take turns too."""

    @abstractmethod
    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of all workers at once, and waits for what they return, in the order of rank.

        Raises:
            WorkerError: one died or does not answer. It says which and what is known of it.
        """

    @abstractmethod
    def shape(self, rate: str | None) -> None:
        """Gives the links a rate such as "500mbit", or none."""

    @abstractmethod
    def sent_on_wire(self) -> float | None:
        """Bytes that a host has sent, mean over hosts; None where there is one host."""

    @contextmanager
    def server(self, name: str, seed: int | None = None) -> Iterator[Any]:
        """The parameter server, where a strategy needs one; with a seed for the digits."""
        del name, seed
        yield None

    def turn(self, name: str, rate: str | None, steps: int) -> Measured:
        """Lets all train by a strategy, with links of a rate, for so many steps or what makes its cycles whole."""
        self.shape(rate)
        lead_in = (REFERENCES | STRATEGIES)[name].cycle
        steps = -(-steps // lead_in) * lead_in
        with self.server(name) as server:
            self.ask("prepare", name, server)
            before = self.sent_on_wire()
            turns = [Turn(**fields) for fields in self.ask("take", lead_in, steps)]
            after = self.sent_on_wire()
        waits = [turn.wait_seconds / turn.seconds for turn in turns if turn.wait_seconds is not None]
        return Measured(
            images_per_second=sum(turn.images / turn.seconds for turn in turns),
            wire_bytes=None if before is None or after is None else (after - before) / (lead_in + steps),
            sent_bytes=sum(turn.sent_bytes for turn in turns) / len(turns),
            wait_fraction=sum(waits) / len(waits) if waits else None,
        )

    def probe(self, rate: str | None) -> Probe:
        """What the workers measure for predictions, with links of a rate."""
        self.shape(rate)
        found = self.ask("probe")[0]
        buckets = tuple((ready, size) for ready, size in found["computation"].pop("buckets"))
        sums = {name: Sums(**figures) for name, figures in found["sums"].items()}
        return Probe(Computation(buckets=buckets, **found["computation"]), sums, self.world_size)

    def top1(self, name: str, seed: int) -> float:
        """What a strategy comes to on the digits by quickstart's recipe."""
        self.shape(None)
        with self.server(name, seed) as server:
            return self.ask("train", name, seed, server)[0]
