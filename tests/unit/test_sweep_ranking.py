"""What trials have come to, read from run directories, and which is the best."""

import math

import pytest
import torch

from raytrain import checkpoint
from raytrain.recorder import Recorder
from raytrain.sweep.ranking import best, delete_checkpoints, mark, rank, read_outcome, trial_name
from raytrain.sweep.spec import Sweep
from tests.places import at

TOP1, LOSS, LAST = Sweep(), Sweep(metric="val/loss", mode="min"), Sweep(best="last")


def make_trial(folder, number, top1, *, losses=None, keep=None, state=None):
    """A run directory as training leaves it: an evaluation and a checkpoint an epoch of ten steps."""
    trial = at(folder) / trial_name(number)
    trial.path.mkdir()
    trial.write("config.yaml", b"{}")
    recorder = Recorder(trial)
    for epoch, (score, loss) in enumerate(zip(top1, losses or [1.0] * len(top1), strict=True), 1):
        metrics = {"val/top1": score, "val/loss": loss}
        recorder.metrics(10 * epoch, {"epoch": float(epoch), "train/loss": 1.0})
        recorder.metrics(10 * epoch, metrics)
        if keep is None or epoch in keep:
            weights = {"model": {"fc.bias": torch.zeros(2)}}
            checkpoint.save(trial / "checkpoints", 10 * epoch, weights, {}, {"metrics": metrics})
    recorder.close()
    if state is not None:
        mark(trial, state)


def outcomes(folder, sweep=TOP1, count=None):
    count = count or len(at(folder).folders())
    return [read_outcome(sweep, at(folder) / trial_name(number), number, {"n": number}) for number in range(count)]


def order(folder, sweep=TOP1):
    return [outcome.number for outcome in rank(outcomes(folder, sweep), sweep)]


def test_score_epoch_and_checkpoint_are_of_one_evaluation_the_newest_of_equals(tmp_path):
    make_trial(tmp_path, 0, [0.5, 0.9, 0.9, 0.7])
    [one] = outcomes(tmp_path)
    assert one.counted == (30, 3.0, 0.9)
    assert one.checkpoint.name == "step_00000030"
    [one] = outcomes(tmp_path, LAST)
    assert one.counted == (40, 4.0, 0.7)
    assert one.checkpoint.name == "step_00000040"


def test_the_least_loss_is_the_best(tmp_path):
    make_trial(tmp_path, 0, [0.9, 0.9], losses=[0.4, 0.6])
    make_trial(tmp_path, 1, [0.1, 0.2], losses=[0.5, 0.3])
    assert order(tmp_path, LOSS) == [1, 0]
    assert best(outcomes(tmp_path, LOSS), LOSS).counted == (20, 2.0, 0.3)


def test_a_checkpoint_that_is_gone_is_named_by_no_other(tmp_path):
    make_trial(tmp_path, 0, [0.9, 0.7], keep={2})
    [one] = outcomes(tmp_path)
    assert one.counted == (10, 1.0, 0.9)
    assert one.checkpoint is None


@pytest.mark.parametrize("worst", [math.nan, math.inf])
def test_what_is_no_number_is_never_the_best(tmp_path, worst):
    make_trial(tmp_path, 0, [0.5, worst])
    make_trial(tmp_path, 1, [0.6, 0.4])
    make_trial(tmp_path, 2, [worst])
    assert order(tmp_path) == [1, 0, 2]
    assert best(outcomes(tmp_path), TOP1).number == 1


def test_one_that_diverged_is_never_the_best_whatever_it_had_reached(tmp_path):
    make_trial(tmp_path, 0, [0.99], state="diverged")
    make_trial(tmp_path, 1, [0.4], state="finished")
    make_trial(tmp_path, 2, [], state="failed")
    assert order(tmp_path) == [1, 0, 2]
    assert best(outcomes(tmp_path), TOP1).number == 1
    assert best(outcomes(tmp_path)[::2], TOP1) is None


def test_equal_trials_come_in_their_order(tmp_path):
    for number in range(3):
        make_trial(tmp_path, number, [0.5])
    assert order(tmp_path) == [0, 1, 2]


def test_states(tmp_path):
    make_trial(tmp_path, 0, [0.5])
    make_trial(tmp_path, 1, [0.5])
    (at(tmp_path) / trial_name(1)).write("result.json", b"{}")
    make_trial(tmp_path, 2, [0.5], state="stopped")
    found = outcomes(tmp_path, count=4)
    assert [one.state for one in found] == ["begun", "finished", "stopped", "waiting"]
    assert [one.has_ended for one in found] == [False, True, True, False]


def test_a_row_that_a_kill_has_cut_is_none(tmp_path):
    make_trial(tmp_path, 0, [0.5, 0.9])
    path = tmp_path / trial_name(0) / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    [one] = outcomes(tmp_path)
    assert one.counted == (10, 1.0, 0.5)


def test_only_the_best_ended_trials_keep_their_checkpoints_and_those_at_work(tmp_path):
    for number, (top1, state) in enumerate(((0.5, "finished"), (0.9, "stopped"), (0.1, None), (0.7, "finished"))):
        make_trial(tmp_path, number, [top1], state=state)
    make_trial(tmp_path, 4, [0.99], state="diverged")
    assert sorted(delete_checkpoints(outcomes(tmp_path), TOP1, 2, at(tmp_path))) == [0, 4]
    assert [one.checkpoint is not None for one in outcomes(tmp_path)] == [False, True, True, True, False]
    assert delete_checkpoints(outcomes(tmp_path), TOP1, 2, at(tmp_path)) == []
    assert order(tmp_path) == [1, 3, 0, 2, 4]
