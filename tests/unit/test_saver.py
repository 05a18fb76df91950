"""Checkpoints beside the step: what is copied, what a step waits for, what room they take, what a kill leaves."""

import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from raytrain import checkpoint
from raytrain.config import Checkpoint
from raytrain.data.source import Sources
from raytrain.distributed import Runtime
from raytrain.errors import NonFiniteError, RunError
from raytrain.loop import train
from raytrain.recorder import Recorder, read_metrics
from raytrain.saver import Saver
from tests.places import at
from tests.unit.killed_saves import kill_at, training_of, weights_of
from tests.unit.test_loop import Noise, make_config

LONG = 60


@pytest.fixture
def new_saver():
    """Makes a saver, which the end of the test closes; `saver.warnings` has what it warned of."""
    made = []

    def new(folder, keep_last=2, keep_best=0, **options):
        warnings = []
        saver = Saver(at(folder), keep_last, keep_best, warnings.append, **options)
        saver.warnings = warnings
        made.append(saver)
        return saver

    yield new
    for saver in made:
        saver.close()


@pytest.fixture
def slow_disk(monkeypatch):
    """Writes wait for an event; (begun, may go on)."""
    begun, may_go_on, write = threading.Event(), threading.Event(), checkpoint.save

    def save(*args, **named):
        begun.set()
        assert may_go_on.wait(LONG)
        return write(*args, **named)

    monkeypatch.setattr(checkpoint, "save", save)
    yield begun, may_go_on
    may_go_on.set()


def save(saver, step, top1=None, weights=None, training=None):
    metrics = {} if top1 is None else {"val/top1": top1}
    model = {"model": weights or weights_of(step)}
    saver.save(step, model, training or training_of(step), {"metrics": metrics})


def steps(folder):
    return [int(path.name.removeprefix("step_")) for path in checkpoint.saved(at(folder))]


def newest(folder):
    """The step of the newest valid checkpoint, and the warnings."""
    warnings = []
    path = checkpoint.newest_valid(at(folder), warnings.append)
    return path and int(path.name.removeprefix("step_")), warnings


def assert_holds(folder, step):
    """The checkpoint of a step is whole, and of that step in all its parts."""
    path = at(folder) / f"step_{step:08d}"
    assert checkpoint.verify(path) is None
    weights, expected = checkpoint.load_weights(path), weights_of(step)
    assert weights.keys() == expected.keys()
    assert [key for key in expected if not weights[key].equal(expected[key])] == []
    training, expected = checkpoint.load_training(path), training_of(step)
    assert training["momentum"][0].equal(expected["momentum"][0])
    assert training["updates"] == step
    assert checkpoint.load_state(path)["step"] == step


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def in_thread(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


# beside the steps


def policy_of(saver, step, monkeypatch, **options):
    """The scheduling policy of the thread that writes a checkpoint."""
    policies, write = [], checkpoint.save

    def watched(*args):
        policies.append(os.sched_getscheduler(threading.get_native_id()))
        return write(*args)

    monkeypatch.setattr(checkpoint, "save", watched)
    saver.save(step, {"model": weights_of(step)}, training_of(step), {"metrics": {}}, **options)
    saver.finish()
    monkeypatch.undo()
    return policies


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no policy of their own")
def test_a_write_takes_what_the_steps_leave_of_the_cores_unless_it_is_urgent(tmp_path, new_saver, monkeypatch):
    saver, usual = new_saver(tmp_path), os.sched_getscheduler(0)
    assert policy_of(saver, 1, monkeypatch) == [os.SCHED_IDLE]
    assert policy_of(saver, 2, monkeypatch, urgent=True) == [usual]
    assert policy_of(saver, 3, monkeypatch) == [os.SCHED_IDLE]
    assert os.sched_getscheduler(0) == usual
    assert steps(tmp_path) == [2, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no policy of their own")
def test_after_a_write_that_was_slow_the_next_ones_take_their_share_of_the_cores(tmp_path, new_saver, monkeypatch):
    saver = new_saver(tmp_path)
    monkeypatch.setattr("raytrain.saver.PATIENCE_SECONDS", 0.0)
    save(saver, 1)
    saver.finish()
    monkeypatch.undo()
    assert policy_of(saver, 2, monkeypatch) == [os.sched_getscheduler(0)]
    assert policy_of(saver, 3, monkeypatch) == [os.sched_getscheduler(0)]


# copied


def test_what_was_saved_reads_back(tmp_path, new_saver):
    saver = new_saver(tmp_path / "run/checkpoints")
    save(saver, 45, 0.5)
    saver.finish()
    assert_holds(tmp_path / "run/checkpoints", 45)
    state = checkpoint.load_state(at(tmp_path / "run/checkpoints/step_00000045"))
    assert state["metrics"] == {"val/top1": 0.5}
    assert saver.warnings == []


def test_a_state_that_changes_after_save_has_returned_is_written_as_it_was(tmp_path, new_saver, slow_disk):
    _, may_go_on = slow_disk
    kinds = {
        "half": torch.arange(6, dtype=torch.bfloat16),
        "image": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.rand(6, 8)[1:4, ::2].t(),
        "parameter": torch.nn.Parameter(torch.rand(3)),
        "flag": torch.tensor(data=True),
        "none": torch.empty(0),
    }
    training = {"list": [torch.ones(3), {"deep": (torch.arange(3), 2.5)}], "scale": 1.5, "removed": torch.ones(1)}
    state = {"metrics": {"val/top1": 0.25}, "names": ["a"]}
    expected = {key: tensor.detach().clone() for key, tensor in kinds.items()}
    saver = new_saver(tmp_path)
    saver.save(1, {"model": kinds, "ema": {"half": kinds["half"] + 1}}, training, state)
    with torch.no_grad():
        for tensor in kinds.values():
            tensor.zero_()
        training["list"][0].fill_(7)
        training["list"][1]["deep"][0].fill_(7)
    training["scale"] = 9.0
    training["list"].append(1)
    del training["removed"]
    may_go_on.set()
    saver.finish()
    path = at(tmp_path) / "step_00000001"
    weights = checkpoint.load_weights(path)
    assert [key for key in expected if not weights[key].equal(expected[key])] == []
    assert [key for key in expected if weights[key].dtype != expected[key].dtype] == []
    assert checkpoint.load_weights(path, "ema")["half"].equal(expected["half"] + 1)
    written = checkpoint.load_training(path)
    assert written["list"][0].equal(torch.ones(3))
    assert written["list"][1]["deep"][0].equal(torch.arange(3))
    assert (written["list"][1]["deep"][1], len(written["list"]), written["scale"]) == (2.5, 2, 1.5)
    assert written["removed"].equal(torch.ones(1))


def test_a_description_that_changes_after_save_has_returned_is_written_as_it_was(tmp_path, new_saver, slow_disk):
    _, may_go_on = slow_disk
    state = {"metrics": {"val/top1": 0.25}, "names": ["a"]}
    saver = new_saver(tmp_path)
    saver.save(1, {"model": weights_of(1)}, training_of(1), state)
    state["metrics"]["val/top1"] = 0.75
    state["names"].append("b")
    may_go_on.set()
    saver.finish()
    written = checkpoint.load_state(at(tmp_path) / "step_00000001")
    assert (written["metrics"], written["names"]) == ({"val/top1": 0.25}, ["a"])


def test_tensors_that_are_changed_in_place_step_by_step_never_mix(tmp_path, new_saver):
    saver = new_saver(tmp_path, keep_last=20)
    weights, training = weights_of(0), training_of(0)
    for step in range(1, 9):
        for key, tensor in weights_of(step).items():
            weights[key].copy_(tensor)
        training["momentum"][0].copy_(training_of(step)["momentum"][0])
        training["updates"] = step
        save(saver, step, weights=weights, training=training)
    weights["fc.weight"].zero_()
    saver.finish()
    assert steps(tmp_path) == list(range(1, 9))
    for step in range(1, 9):
        assert_holds(tmp_path, step)


def test_tensors_that_come_go_and_grow_between_saves_are_each_written(tmp_path, new_saver):
    """An optimizer has no momentum before its first step."""
    saver = new_saver(tmp_path, keep_last=9)
    for step, sizes in enumerate(([], [3], [5, 2], [2], [4, 4, 4]), 1):
        momentum = [torch.full((size,), float(step), dtype=torch.float64) for size in sizes]
        weights = {f"w{i}": torch.full((size + step,), float(step)) for i, size in enumerate([1, *sizes])}
        saver.save(step, {"model": weights}, {"momentum": momentum}, {})
        del weights, momentum
    saver.finish()
    for step, sizes in enumerate(([], [3], [5, 2], [2], [4, 4, 4]), 1):
        path = at(tmp_path) / f"step_{step:08d}"
        assert [len(tensor) for tensor in checkpoint.load_training(path)["momentum"]] == sizes
        assert all((tensor == step).all() for tensor in checkpoint.load_training(path)["momentum"])
        weights = checkpoint.load_weights(path)
        assert {len(tensor) for tensor in weights.values()} == {size + step for size in [1, *sizes]}
        assert all((tensor == step).all() for tensor in weights.values())


# waited for


def test_save_returns_while_the_write_is_under_way_and_the_next_save_waits_for_it(tmp_path, new_saver, slow_disk):
    begun, may_go_on = slow_disk
    saver = new_saver(tmp_path)
    first = in_thread(lambda: save(saver, 1))
    first.join(LONG)
    assert not first.is_alive()
    assert begun.wait(LONG)
    assert steps(tmp_path) == []
    second = in_thread(lambda: save(saver, 2))
    second.join(0.3)
    assert second.is_alive()
    may_go_on.set()
    second.join(LONG)
    assert not second.is_alive()
    assert 1 in steps(tmp_path)
    saver.finish()
    assert steps(tmp_path) == [1, 2]
    assert_holds(tmp_path, 1)
    assert_holds(tmp_path, 2)


def test_finish_returns_when_the_checkpoint_is_visible(tmp_path, new_saver, slow_disk):
    _, may_go_on = slow_disk
    saver = new_saver(tmp_path)
    save(saver, 1)
    finish = in_thread(saver.finish)
    finish.join(0.2)
    assert finish.is_alive()
    may_go_on.set()
    finish.join(LONG)
    assert newest(tmp_path) == (1, [])


def test_close_waits_for_the_checkpoint_and_ends_the_thread(tmp_path, new_saver, slow_disk):
    _, may_go_on = slow_disk
    before = set(threading.enumerate())
    saver = new_saver(tmp_path)
    save(saver, 1)
    assert set(threading.enumerate()) - before
    close = in_thread(saver.close)
    close.join(0.2)
    assert close.is_alive()
    may_go_on.set()
    close.join(LONG)
    assert newest(tmp_path) == (1, [])
    assert set(threading.enumerate()) == before


def test_without_a_save_there_is_nothing_to_wait_for(tmp_path, new_saver):
    saver = new_saver(tmp_path / "none")
    saver.finish()
    saver.close()
    assert steps(tmp_path / "none") == []


# due


def due(saver, every, count=24, per_epoch=4):
    return [step for step in range(1, count + 1) if saver.is_due(step, step / per_epoch, every)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [4, 8, 12, 16, 20, 24]),
        ({"every_epochs": None}, []),
        ({"every_epochs": 2}, [8, 16, 24]),
        ({"every_epochs": None, "every_steps": 7}, [7, 14, 21]),
        ({"every_epochs": 3, "every_steps": 10}, [10, 12, 20, 24]),
        ({"every_epochs": None, "every_seconds": 1e-9}, []),  # each rank has its own clock
    ],
)
def test_a_checkpoint_is_due_after_so_many_steps_and_epochs(tmp_path, new_saver, keys, expected):
    assert due(new_saver(tmp_path), Checkpoint(**keys)) == expected


def test_epochs_that_are_no_round_share_of_a_step_are_met(tmp_path, new_saver):
    assert due(new_saver(tmp_path), Checkpoint(), count=490, per_epoch=49) == [49 * epoch for epoch in range(1, 11)]


def test_a_checkpoint_is_late_so_many_seconds_after_the_last(tmp_path, new_saver):
    saver, every = new_saver(tmp_path), Checkpoint(every_seconds=0.5)
    assert not saver.is_late(every)
    time.sleep(0.6)
    assert saver.is_late(every)
    assert not saver.is_late(Checkpoint(every_seconds=3600))
    assert not saver.is_late(Checkpoint(every_steps=1))
    save(saver, 1)
    assert not saver.is_late(every)
    time.sleep(0.6)
    assert saver.is_late(every)


def test_a_run_saves_by_its_clock(tmp_path):
    config = make_config(checkpoint__every_seconds=0.001, train__max_steps=5)
    train_here(config, tmp_path)
    assert steps(tmp_path / "checkpoints") == [1, 2, 3, 4, 5]
    train_here(make_config(checkpoint__every_seconds=3600, train__max_steps=5), tmp_path / "other")
    assert steps(tmp_path / "other/checkpoints") == [5]


# kept and removed

SCORES = (0.1, 0.9, 0.2, 0.3, 0.1, 0.4, 0.2, 0.95, 0.1, 0.1, 0.1, 0.1)


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "left"),
    [(1, 0, [12]), (2, 0, [11, 12]), (2, 1, [8, 11, 12]), (1, 2, [2, 8, 12]), (3, 2, [2, 8, 10, 11, 12])],
)
def test_the_newest_and_the_best_are_kept_and_at_no_time_more_than_one_beside(
    tmp_path, new_saver, keep_last, keep_best, left
):
    saver = new_saver(tmp_path, keep_last, keep_best)
    most, done, empty = [0], threading.Event(), []

    def watch():
        while not done.is_set():
            here = [name for name in names(tmp_path) if not name.startswith(".writing-removed")]  # also by its old name
            most[0] = max(most[0], len(here))
            if most[0] and not [name for name in here if name.startswith("step_")]:
                empty.append(here)

    watcher = None
    for step, top1 in enumerate(SCORES, 1):
        save(saver, step, top1)
        if watcher is None:
            until(lambda: steps(tmp_path) == [1])
            watcher = in_thread(watch)
    saver.finish()
    done.set()
    watcher.join(LONG)
    assert steps(tmp_path) == left
    assert names(tmp_path) == [f"step_{step:08d}" for step in left]
    assert most[0] <= keep_last + keep_best + 1
    assert empty == []
    assert saver.warnings == []


BIG = {"fc.weight": torch.arange(100_000.0)}  # 0.4 MB, and as much again for the momentum


def big(step):
    return {"weights": {"fc.weight": BIG["fc.weight"] + step}, "training": {"m": [BIG["fc.weight"] - step]}}


def kib_of(path):
    """What it takes on a disk of pages of 4 KiB, folder and all."""
    return sum(-(-file.stat().st_size // 4096) * 4 for file in path.iterdir()) + 8


@pytest.mark.parametrize(("keep_last", "keep_best"), [(1, 0), (2, 1), (1, 2)])
def test_a_disk_with_room_for_one_more_than_are_kept_is_large_enough(
    tmp_path, new_disk, new_saver, keep_last, keep_best
):
    save(other := new_saver(tmp_path / "other"), 1, **big(1))
    other.finish()
    disk = new_disk((keep_last + keep_best + 1) * kib_of(tmp_path / "other/step_00000001") + 64)
    saver = new_saver(disk / "checkpoints", keep_last, keep_best)
    for step, top1 in enumerate(SCORES, 1):
        save(saver, step, top1, **big(step))
        saver.finish()
    assert saver.warnings == []
    assert newest(disk / "checkpoints") == (12, [])
    assert len(steps(disk / "checkpoints")) == keep_last + keep_best


def test_a_damaged_one_that_was_set_aside_needs_no_room_of_its_own(tmp_path, new_disk, new_saver):
    save(other := new_saver(tmp_path / "other"), 1, **big(1))
    other.finish()
    disk = new_disk(4 * kib_of(tmp_path / "other/step_00000001") + 64)
    saver = new_saver(disk / "checkpoints", keep_last=3)
    for step in (10, 20, 30):
        save(saver, step, **big(step))
    saver.finish()
    for step in (20, 30):
        (disk / f"checkpoints/step_{step:08d}/training.pt").write_bytes(b"")
    assert newest(disk / "checkpoints")[0] == 10
    for step in (12, 14, 16, 18, 20):
        save(saver, step, **big(step))
        saver.finish()
    assert saver.warnings == []
    assert newest(disk / "checkpoints") == (20, [])
    assert names(disk / "checkpoints") == ["step_00000016", "step_00000018", "step_00000020"]


def test_the_best_is_kept_by_the_metric_that_is_asked_for(tmp_path, new_saver):
    saver = new_saver(tmp_path, keep_last=1, keep_best=1, best_by="val/loss")
    for step, loss in ((1, 0.7), (2, 0.2), (3, 0.9)):
        metrics = {"val/top1": step / 10, "val/loss": loss}
        saver.save(step, {"model": weights_of(step)}, training_of(step), {"metrics": metrics})
        saver.finish()
    assert steps(tmp_path) == [2, 3]


def test_one_that_a_kill_kept_from_being_pruned_needs_no_room_of_its_own(tmp_path, new_disk, new_saver):
    """Killed between two renamings: there is one more than are to be kept, and the next start finds no more room."""
    save(other := new_saver(tmp_path / "other"), 1, **big(1))
    other.finish()
    disk = new_disk(3 * kib_of(tmp_path / "other/step_00000001") + 64)
    for step in (1, 2, 3):
        parts = big(step)
        checkpoint.save(at(disk / "checkpoints"), step, {"model": parts["weights"]}, parts["training"], {"metrics": {}})
    assert newest(disk / "checkpoints") == (3, [])
    saver = new_saver(disk / "checkpoints", keep_last=2)
    save(saver, 4, **big(4))
    saver.finish()
    assert saver.warnings == []
    assert names(disk / "checkpoints") == ["step_00000003", "step_00000004"]


def test_the_only_valid_one_outlives_writes_that_fail(tmp_path, new_saver, monkeypatch):
    saver = new_saver(tmp_path, keep_last=1)
    save(saver, 1)
    saver.finish()
    monkeypatch.setattr(checkpoint, "save", raiser(RunError("the disk is gone")))
    for step in (2, 3, 4):
        save(saver, step)
    with pytest.raises(RunError, match="the disk is gone"):
        saver.finish()
    assert names(tmp_path) == ["step_00000001"]
    assert_holds(tmp_path, 1)
    assert len(saver.warnings) >= 2


def raiser(error):
    def call(*_, **__):
        raise error

    return call


# disks that fill


def fill(disk):
    """Takes all the room that is left."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def test_a_disk_that_fills_costs_a_warning_and_the_next_save_works_when_there_is_room(new_disk, new_saver):
    disk = new_disk(1024)
    folder = disk / "checkpoints"
    saver = new_saver(folder)
    save(saver, 1)
    saver.finish()
    fill(disk)
    save(saver, 2)
    until(lambda: saver.warnings)
    assert newest(folder) == (1, [])
    assert names(folder) == ["step_00000001"]
    [warning] = saver.warnings
    assert str(folder / "step_00000002") in warning
    assert "No space left" in warning
    assert any(word in warning for word in ("bytes", " B", "KiB", "MiB", "kB", "MB"))
    (disk / "filler").unlink()
    save(saver, 3)
    saver.finish()
    assert steps(folder) == [1, 3]
    assert_holds(folder, 3)
    assert len(saver.warnings) == 1


def test_the_warning_of_a_full_disk_says_how_many_bytes_are_needed_or_left(new_disk, new_saver):
    """B25: a user sees by how much."""
    disk = new_disk(1024)
    saver = new_saver(disk)
    save(saver, 1, weights={"fc.weight": torch.zeros(2**20)})
    until(lambda: saver.warnings)
    assert any(word.replace(",", "").isdigit() for word in saver.warnings[0].split()), saver.warnings[0]


def test_finish_raises_where_the_last_one_could_not_be_written(new_disk, new_saver):
    disk = new_disk(1024)
    saver = new_saver(disk / "checkpoints")
    save(saver, 1)
    saver.finish()
    fill(disk)
    save(saver, 2)
    with pytest.raises(RunError, match=r"step_00000002.*(?s:.)*No space left"):
        saver.finish()
    assert newest(disk / "checkpoints") == (1, [])
    (disk / "filler").unlink()
    save(saver, 3)
    saver.finish()
    assert newest(disk / "checkpoints") == (3, [])


def test_close_raises_nothing_whatever_became_of_the_last_one(new_disk, new_saver):
    disk = new_disk(256)
    saver = new_saver(disk / "checkpoints")
    save(saver, 1, **big(1))
    saver.close()
    assert steps(disk / "checkpoints") == []


def train_here(config, folder, listener=lambda _: None, images=18):
    folder.mkdir(exist_ok=True)
    recorder = Recorder(at(folder), listener)
    sources = Sources(Noise(images), Noise(5, seed=1))
    try:
        train(config, Runtime(), sources, at(folder / "checkpoints"), recorder)
    finally:
        recorder.close()


def test_a_disk_that_is_full_for_a_while_stops_no_run_and_costs_no_row(new_disk):
    """Steps 4 to 8 of 12 find no room for a checkpoint or for metrics."""
    disk, warnings = new_disk(32 * 1024), []

    def listen(event):
        if event["kind"] == "warning":
            warnings.append(event["text"])
        elif event["kind"] == "metrics" and event["step"] == 4 and not (disk / "filler").exists():
            until(lambda: steps(disk / "run/checkpoints")[-1:] == [3])
            time.sleep(0.05)
            fill(disk)
        elif event["kind"] == "metrics" and event["step"] == 8:
            (disk / "filler").unlink(missing_ok=True)

    config = make_config(checkpoint__every_steps=1, checkpoint__keep_last=2, checkpoint__keep_best=0)
    train_here(config, disk / "run", listen)
    assert newest(disk / "run/checkpoints") == (12, [])
    assert steps(disk / "run/checkpoints") == [11, 12]
    assert any("No space left" in warning and "step_" in warning for warning in warnings)
    losses = [row["step"] for row in read_metrics(at(disk / "run")) if "train/loss" in row]
    assert losses == list(range(1, 13))


def test_a_run_whose_last_checkpoint_finds_no_room_ends_with_an_error_and_the_one_before(new_disk):
    disk = new_disk(32 * 1024)

    def listen(event):
        if event["kind"] == "metrics" and event["step"] == 5 and not (disk / "filler").exists():
            until(lambda: steps(disk / "checkpoints") == [3])
            time.sleep(0.05)
            fill(disk)

    config = make_config(checkpoint__every_steps=3, train__max_steps=5)
    recorder = Recorder(None, listen)
    with pytest.raises(RunError, match=r"step_00000005"):
        train(config, Runtime(), Sources(Noise(18), Noise(5)), at(disk / "checkpoints"), recorder)
    assert newest(disk / "checkpoints") == (3, [])


# weights that are no numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("ask", ["finish", "save"])
def test_a_weight_that_is_not_finite_is_not_written_and_is_told_of(tmp_path, new_saver, ask, value):
    saver = new_saver(tmp_path)
    save(saver, 1)
    save(saver, 2, weights={"fc.bias": torch.tensor([0.0, value])})
    with pytest.raises(NonFiniteError, match=r"fc\.bias .*step 2"):
        saver.finish() if ask == "finish" else save(saver, 3)
    saver.close()
    assert 2 not in steps(tmp_path)
    assert {name[:5] for name in names(tmp_path)} == {"step_"}
    assert newest(tmp_path)[0] in (1, 3)


# what comes before


def test_before_is_called_once_for_each_checkpoint_while_it_is_not_yet_visible(tmp_path, new_saver):
    seen = []
    saver = new_saver(tmp_path, keep_last=9, before=lambda: seen.append((steps(tmp_path), threading.current_thread())))
    for step in (1, 2, 3):
        save(saver, step)
    saver.finish()
    assert [visible for visible, _ in seen] == [[], [1], [1, 2]]
    assert threading.main_thread() not in [thread for _, thread in seen]
    assert steps(tmp_path) == [1, 2, 3]


def test_where_before_fails_no_checkpoint_appears(tmp_path, new_saver):
    allowed = [True]

    def before():
        if not allowed[0]:
            raise RunError("other workers have been started")

    saver = new_saver(tmp_path, keep_last=1, before=before)
    save(saver, 1)
    saver.finish()
    allowed[0] = False
    save(saver, 2)
    with pytest.raises(RunError, match="other workers have been started"):
        saver.finish()
    assert names(tmp_path) == ["step_00000001"]
    assert_holds(tmp_path, 1)
    save(saver, 3)
    until(lambda: len(saver.warnings) == 2)
    assert names(tmp_path) == ["step_00000001"]
    allowed[0] = True
    save(saver, 4)
    saver.finish()
    assert names(tmp_path) == ["step_00000004"]


# kill -9


def test_a_hundred_kills_at_random_moments_leave_a_valid_checkpoint_each_time(tmp_path, new_saver):
    folder = tmp_path / "checkpoints"
    save(first := new_saver(folder), 1)
    first.finish()
    reached, torn = [1], 0
    numbers = random.Random(0)
    for _ in kill_at(folder, [lambda: time.sleep(numbers.uniform(0, 0.06))] * 100):
        torn += any(name.startswith(".") for name in names(folder))
        step, warnings = newest(folder)
        assert warnings == []
        assert step is not None
        assert step >= reached[-1]
        assert_holds(folder, step)
        for path in folder.iterdir():
            assert path.name.startswith("step_")
            manifest = json.loads((path / "manifest.json").read_text())
            assert set(names(path)) == {*manifest, "manifest.json"}
        reached.append(step)
    assert len(reached) == 101
    assert reached[-1] > 50  # they did save
    assert torn > 5  # and were killed while they did
