"""What the trials of a sweep have come to, read from their run directories, and which of them is the best.

The best trial is the one with the best value of `sweep.metric` over its evaluations, the newest of equal ones, or with
`sweep.best=last` the best value at its last evaluation. Score, config, epoch and checkpoint of a trial all come from
that one evaluation. A trial that diverged is never the best, nor is a value that is no number.
"""

import json
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from raytrain.checkpoint import BETTER, saved
from raytrain.recorder import read_metrics
from raytrain.storage import Storage
from raytrain.sweep.space import Params
from raytrain.sweep.spec import Sweep

State = Literal["waiting", "begun", "finished", "stopped", "diverged", "failed"]
"""`stopped` by the scheduler, `begun` and not come to an end. `waiting` and `begun` are what --resume goes on with."""
STATE_FILE = "trial.json"


class Evaluation(NamedTuple):
    """One value of the metric."""

    step: int
    epoch: float
    value: float


class Outcome(NamedTuple):
    """What a trial has come to."""

    number: int
    params: Params
    state: State
    reason: str
    """Why it is in that state, of one that diverged or failed."""
    evaluations: list[Evaluation]
    """With a finite value, in order."""
    counted: Evaluation | None
    """The one that the trial counts with."""
    checkpoint: Storage | None
    """After that evaluation, where it is still there."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is to come of it."""
        return self.state not in ("waiting", "begun")


def trial_name(number: int) -> str:
    """Of its run, and of its directory in the sweep's."""
    return f"trial_{number:03d}"


def mark(folder: Storage, state: State, reason: str = "") -> None:
    """Writes down how a trial has ended, or that it is to be stopped; its run directory must be there."""
    folder.write(STATE_FILE, (json.dumps({"state": state, "reason": reason}) + "\n").encode())


def read_outcome(sweep: Sweep, folder: Storage, number: int, params: Params) -> Outcome:
    """What a trial has come to by now.

    Args:
        sweep: says what counts.
        folder: the trial's run directory, whether it is there or not.
        number: of the trial, from 0.
        params: its values.
    """
    state, reason = _state(folder)
    evaluations = _evaluations(folder, sweep.metric)
    counted = _counted(evaluations, sweep)
    name = None if counted is None else f"step_{counted.step:08d}"
    checkpoint = next((path for path in saved(folder / "checkpoints") if path.name == name), None)
    return Outcome(number, params, state, reason, evaluations, counted, checkpoint)


def rank(outcomes: Iterable[Outcome], sweep: Sweep) -> list[Outcome]:
    """The best first, of equal ones the one with the lower number; last those that diverged or have no score."""

    def place(outcome: Outcome) -> tuple[bool, float, int]:
        counts = outcome.counted is not None and outcome.state != "diverged"
        score = outcome.counted.value * BETTER[sweep.metric] if outcome.counted is not None and counts else 0.0
        return not counts, -score, outcome.number

    return sorted(outcomes, key=place)


def best(outcomes: Iterable[Outcome], sweep: Sweep) -> Outcome | None:
    """The best trial, or None where each diverged or has no score."""
    first = next(iter(rank(outcomes, sweep)), None)
    return first if first is not None and first.counted is not None and first.state != "diverged" else None


def delete_checkpoints(outcomes: Iterable[Outcome], sweep: Sweep, keep: int, folder: Storage) -> list[int]:
    """Deletes the checkpoints of all ended trials but the best of them. Those that have not ended keep theirs.

    What is deleted here would not be among the best at the end either: there are as many better ones already.

    Args:
        outcomes: of all trials.
        sweep: says what counts.
        keep: trials that keep their checkpoints.
        folder: the sweep's.

    Returns:
        The numbers of those that lost theirs.
    """
    ended = [outcome for outcome in outcomes if outcome.has_ended]
    lost = []
    for outcome in rank(ended, sweep)[keep:]:
        trial = folder / trial_name(outcome.number)
        if (trial / "checkpoints").is_folder():
            trial.delete_folder("checkpoints")
            lost.append(outcome.number)
    return lost


def _state(folder: Storage) -> tuple[State, str]:
    if folder.exists(STATE_FILE):
        content = json.loads(folder.read(STATE_FILE))
        return content["state"], content["reason"]
    if folder.exists("result.json"):  # it was killed before it could say so
        return "finished", ""
    return ("begun" if folder.exists("config.yaml") else "waiting"), ""


def _evaluations(folder: Storage, metric: str) -> list[Evaluation]:
    epochs: dict[int, float] = {}
    values: dict[int, float] = {}
    for row in read_metrics(folder):
        step = int(row["step"])
        if "epoch" in row:
            epochs[step] = row["epoch"]
        if metric in row and math.isfinite(row[metric]):
            values[step] = row[metric]
    return [Evaluation(step, epochs[step], values[step]) for step in sorted(values) if step in epochs]


def _counted(evaluations: list[Evaluation], sweep: Sweep) -> Evaluation | None:
    if not evaluations:
        return None
    if sweep.best == "last":
        return evaluations[-1]
    return max(evaluations, key=lambda one: (one.value * BETTER[sweep.metric], one.step))
