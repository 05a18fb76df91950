"""What to do when training ends before its end: a failure goes in, a decision with its reason comes out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from raytrain.config import Scaling

SAME_STEP_LIMIT = 3
"""Failures one after the other at one and the same step that are not taken for chance."""
MAX_DELAY_SECONDS = 60.0


@dataclass(frozen=True)
class Failure:
    """One end of the workers that nobody asked for."""

    reason: str
    """What happened, to which rank, on which node."""
    details: str = ""
    """More lines of it, such as a stack."""
    step: int | None = None
    """That was being computed; None before the first one, or where no rank could say."""
    is_transient: bool = True
    """Whether the same may go well another time. A user's error, or a loss that is no number, would come again."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""


@dataclass(frozen=True)
class Decision:
    """What follows from a failure."""

    restart: bool
    reason: str
    """One line, of the failure and of what is done about it."""
    delay_seconds: float = 0.0
    """To wait before a restart."""
    hopeless_step: int | None = None
    """One that has failed again and again."""


def decide(failure: Failure, earlier: Sequence[Failure], scaling: Scaling) -> Decision:
    """Whether the run is started anew from its newest checkpoint.

    Args:
        failure: the latest.
        earlier: those before it in this run, in their order.
        scaling: the config's section.
    """
    if not failure.is_transient:
        return Decision(restart=False, reason=failure.reason)
    latest = [*earlier, failure][-SAME_STEP_LIMIT:]
    if len(latest) == SAME_STEP_LIMIT and failure.step is not None and {one.step for one in latest} == {failure.step}:
        return Decision(
            restart=False,
            reason=f"{failure.reason}; step {failure.step} has failed {SAME_STEP_LIMIT} times in a row",
            hopeless_step=failure.step,
        )
    since = failure.time - scaling.failure_window_seconds
    count = 1 + sum(one.time >= since for one in earlier)
    of = f"{scaling.max_failures} in {scaling.failure_window_seconds:g} s"
    if count > scaling.max_failures:
        return Decision(restart=False, reason=f"{failure.reason}; scaling.max_failures, {of}, is used up")
    # what fails again before it has come any further may need time to come right; else nothing is gained by waiting
    stuck = _stuck([*earlier, failure])
    delay = min(2.0**stuck, MAX_DELAY_SECONDS) if stuck else 0.0
    wait = f" in {delay:g} s" if delay else ""
    return Decision(
        restart=True,
        reason=f"{failure.reason}; starting again{wait} from the newest checkpoint (failure {count} of {of})",
        delay_seconds=delay,
    )


def _stuck(failures: Sequence[Failure]) -> int:
    """How many of the last failures came no further than the one before them."""
    count = 0
    for before, after in reversed(list(pairwise(failures))):
        if after.step is not None and (before.step is None or after.step > before.step):
            break
        count += 1
    return min(count, 10)
