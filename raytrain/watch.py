"""Finds the rank that hangs, and the one whose machine is gone, in what all ranks say of themselves."""

import time
from collections.abc import Sequence

from raytrain.cluster import Node, answers
from raytrain.monitor import Status, describe_hang

SILENT_SECONDS = 3.0
"""Without a word from a worker, until its node is asked whether it is there at all."""
LOST_SECONDS = 15.0
"""Without a word from a worker whose node answers, or a worker without one from the driver, until it counts as gone. It
is a thread of its own that speaks, which a busy step does not hold up."""
STACKS_SECONDS = 2.5
"""In which all ranks have told where a step hangs."""


class Watch:
    """Finds the rank that hangs or is gone."""

    def __init__(self, limit_seconds: float | None, nodes: Sequence[Node]) -> None:
        self._limit, self._nodes = limit_seconds, {node["NodeID"]: node for node in nodes}
        self._over_since: float | None = None
        self.statuses: list[Status] = []
        self.spoken: set[int] = set()
        self.fault: str | None = None
        self.details = ""

    def look(self, beats: list[tuple[float, Status]]) -> None:
        """Takes in what all ranks last said."""
        self.spoken.update(status.rank for _, status in beats)
        self.statuses = [status for _, status in beats] or self.statuses
        for age, status in beats:
            if age > SILENT_SECONDS and not answers(self._nodes[status.node_id]):
                self.fault = f"the node of rank {status.rank}, {status.node}, has not been heard of for {age:.0f} s"
            elif age > LOST_SECONDS:
                self.fault = f"rank {status.rank} on {status.node} has not been heard of for {age:.0f} s"
        if any(status.stack for status in self.statuses):
            self._over_since = self._over_since or time.monotonic()
            if time.monotonic() - self._over_since > STACKS_SECONDS:
                assert self._limit is not None
                self.fault, self.details = describe_hang(self.statuses, self._limit)

    @property
    def step(self) -> int | None:
        """The farthest that a rank has come."""
        begun = [status.step for status in self.statuses if status.phase != "start"]
        return max(begun) if begun else None

    def node_of(self, rank: int) -> str:
        """Where a rank was, as ` on NODE`."""
        return next((f" on {status.node}" for status in self.statuses if status.rank == rank), "")
