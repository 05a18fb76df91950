"""What a rank is doing, since when, and where in the code: so that a hang has a name."""

import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

PHASES = ("start", "data", "forward", "backward", "all-reduce", "update", "evaluation", "checkpoint")
"""What a rank does one after the other in a step; `start` comes before the first one."""


@dataclass(frozen=True)
class Status:
    """What a rank says of itself."""

    rank: int
    node: str
    """Host name."""
    node_id: str
    """Ray's; empty without Ray."""
    step: int
    phase: str
    seconds: float
    """Since it last got on: began a step, or evaluated a batch."""
    stack: str = ""
    """Of its training thread; empty unless asked for."""

    @property
    def place(self) -> tuple[int, int]:
        """How far it has come; the least of all ranks is what the others wait for."""
        return self.step, PHASES.index(self.phase)


class Monitor:
    """Follows one thread, which tells where it is. The loop's; without anyone who asks it costs nothing.

    Args:
        rank: of this process.
        node: host name.
        node_id: Ray's.
    """

    def __init__(self, rank: int = 0, node: str = "", node_id: str = "") -> None:
        self._rank, self._node, self._node_id = rank, node, node_id
        self._thread = threading.get_ident()
        self._step, self._phase, self._since = 0, "start", time.monotonic()

    def begin(self, step: int, phase: str) -> None:
        """A step begins, with this phase, in the thread that calls."""
        self._thread = threading.get_ident()
        self._step, self._phase, self._since = step, phase, time.monotonic()

    def enter(self, phase: str) -> None:
        """One of PHASES begins, in the same step."""
        self._phase = phase

    def each(self, things: Iterable[T]) -> Iterator[T]:
        """The same things; with each of them the rank has got on."""
        for thing in things:
            self._since = time.monotonic()
            yield thing

    def status(self, *, stack: bool = False) -> Status:
        """What there is to say now; from any thread."""
        text = ""
        if stack and (frame := sys._current_frames().get(self._thread)) is not None:  # noqa: SLF001
            text = "".join(traceback.format_stack(frame))
        seconds = time.monotonic() - self._since
        return Status(self._rank, self._node, self._node_id, self._step, self._phase, seconds, text)


def describe_hang(statuses: Sequence[Status], limit_seconds: float) -> tuple[str, str]:
    """Who is late: one line, and the stacks of the ranks that have come least far.

    Args:
        statuses: what all ranks last said, with stacks.
        limit_seconds: what was exceeded.
    """
    least = min(status.place for status in statuses)
    late = [status for status in statuses if status.place == least]
    ranks = ", ".join(f"{status.rank} on {status.node}" for status in late)
    waiting = ", ".join(str(status.rank) for status in statuses if status.place != least)
    line = (
        f"step {late[0].step} took longer than train.step_timeout_seconds {limit_seconds:g}: rank {ranks} is in phase "
        f"{late[0].phase}{f'; rank {waiting} waited' if waiting else ''}"
    )
    silent = "  no answer: the process is stopped, or holds Python's lock"
    return line, "\n".join(f"rank {status.rank}:\n{status.stack.rstrip() or silent}" for status in late)
