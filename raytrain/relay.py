"""What goes between the workers of a run and its driver: events and signs of life one way, orders the other."""

import time
from collections import deque
from typing import Any, NamedTuple

from raytrain.monitor import Status


class Orders(NamedTuple):
    """What a worker is told."""

    stop: int = 0
    """The signal to stop for after the present step, or 0."""
    abort: bool = False
    """To end at once."""


class Relay:
    """An actor that holds what workers say until the driver fetches it, and what the driver has to say to them."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Forgets what was, and tells workers of other attempts to end."""
        self._attempt, self._orders = attempt, Orders()
        self._events: deque[dict[str, Any]] = deque(maxlen=10_000)
        self._beats: dict[int, tuple[float, Status]] = {}

    def push(self, attempt: int, event: dict[str, Any]) -> None:
        """Takes an event of rank 0's recorder."""
        if attempt == self._attempt:
            self._events.append(event)

    def beat(self, attempt: int, status: Status, *, done: bool) -> Orders:
        """Takes what a worker says of itself."""
        if attempt != self._attempt:
            return Orders(abort=True)
        self._beats[status.rank] = time.monotonic(), status
        if done:
            del self._beats[status.rank]
        return self._orders

    def order(self, orders: Orders) -> None:
        """Has all workers told."""
        self._orders = orders

    def fetch(self) -> tuple[list[dict[str, Any]], list[tuple[float, Status]]]:
        """The events since the last call; for each rank that is at work, how long ago it spoke, and what it said."""
        events, now = list(self._events), time.monotonic()
        self._events.clear()
        return events, [(now - when, status) for when, status in self._beats.values()]
