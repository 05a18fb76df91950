"""Whole runs: what late and local steps come to, what is resumed from a checkpoint, what is logged of communication."""

import atexit
import shutil
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from raytrain import checkpoint
from raytrain.data.source import Sources
from raytrain.distributed import Runtime
from raytrain.errors import StoppedError
from raytrain.loop import train
from raytrain.monitor import Monitor
from raytrain.recorder import Recorder, read_metrics
from tests.places import at
from tests.ranks import run_ranks
from tests.unit import test_loop
from tests.unit.comm_ranks import LATE, ONEBIT, PAIRS, SIZE, as_many_as, tiny_models
from tests.unit.comm_replicas import IMAGES, simulate_local, simulate_sums
from tests.unit.test_loop import Noise, assert_same_bits, series

POWERSGD = {"comm__compression": "powersgd", "comm__powersgd_rank": 1, "comm__powersgd_start_step": 2}
ADAM = {"optim__name": "onebit_adam", "optim__base_lr": 1e-5, "optim__freeze_step": 3}
LOCAL = {"comm__sync": "local_sgd", "comm__period": 3}
KEPT = {
    "onebit": ONEBIT,
    "powersgd": POWERSGD,
    "late": LATE,
    "local": LOCAL,
    "late_onebit": LATE | ONEBIT,
    "adam": ADAM,
}
"""Strategies of which a run goes on after a stop; flat on 1 and 2 ranks, hierarchical on 4."""
SIMULATED = {
    "plain": (1, 2, 4),
    "late": (1, 2, 4),
    "local": (1, 2, 4),
    "period_1": (1, 2, 4),
    "warm": (2, 4),
}
COUNTED = {"none": {}, "fp16": {"comm__compression": "fp16"}, "bf16": {"comm__compression": "bf16"}, "onebit": ONEBIT}


def make_config(**keys):
    """Seven steps of 24 images, six micro-batches, and one of eight, in two epochs of four: shares are uneven."""
    sizes = {"train__global_batch_size": 24, "train__epochs": 2, "data__image_size": SIZE, "optim__base_lr": 0.02}
    return test_loop.make_config(**sizes | keys)


def resumed_config(name, *, pairs):
    every = {"checkpoint__every_steps": 3, "train__ema_decay": 0.8}
    return make_config(**KEPT[name] | (PAIRS if pairs else {}) | every)


SIMULATED_KEYS = {
    "plain": {},
    "late": LATE,
    "local": LOCAL,
    "period_1": LOCAL | {"comm__period": 1},
    "warm": LOCAL | {"comm__warmup_steps": 2, "comm__period": 2},
}


def run(runtime, config, folder, images=IMAGES, stop_after=None, monitor=None):
    """Trains the small network, and is asked to stop after so many steps, if any."""
    asked = []

    def stop_requested():
        asked.append(1)
        return 15 if stop_after is not None and len(asked) >= stop_after else 0

    recorder = Recorder(at(folder)) if runtime.rank == 0 else Recorder()
    sources = Sources(Noise(images), Noise(5, seed=1))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        train(
            config,
            replace(runtime, stop_requested=stop_requested),
            sources,
            at(folder / "checkpoints"),
            recorder,
            monitor,
        )
    except StoppedError:
        assert stop_after is not None
    finally:
        recorder.close()
        runtime.barrier()


class LateRank(Monitor):
    """Holds its rank up before each backward pass."""

    def enter(self, phase):
        if phase == "backward":
            time.sleep(0.3)
        super().enter(phase)


def all_runs(runtime, folder):
    world_size = runtime.world_size
    here = folder / str(world_size)
    with tiny_models():
        for name, world_sizes in SIMULATED.items():
            if world_size in world_sizes:
                run(runtime, make_config(train__log_every=50, **SIMULATED_KEYS[name]), here / name)
        for name in KEPT:
            config = resumed_config(name, pairs=world_size == 4)
            run(runtime, config, here / f"{name}_straight")
            # a late step's request to stop comes one step late, too; all are to stop where a checkpoint is due anyway
            run(runtime, config, here / f"{name}_stopped", stop_after=2 if "late" in name else 3)
            assert test_loop.saved_steps(here / f"{name}_stopped") == [3]
            if runtime.rank == 0:
                shutil.copytree(here / f"{name}_stopped", folder / f"{name}_from_{world_size}")
            run(runtime, config, here / f"{name}_stopped")
            if world_size in (2, 4):
                run(runtime, resumed_config(name, pairs=False), folder / f"{name}_from_{world_size // 2}")
        if world_size == 2:
            one_step = {"train__global_batch_size": 8, "schedule__warmup_epochs": 0, "train__max_steps": 4}
            for name, keys in {"plain": {}, "late": LATE}.items():
                for late_rank in (0, 1):
                    monitor = LateRank() if runtime.rank == late_rank else Monitor()
                    config = make_config(**one_step | keys)
                    run(runtime, config, here / f"{name}_waits_for_{late_rank}", 32, monitor=monitor)
    for name, keys in COUNTED.items():
        short = {"train__max_steps": 2, "train__global_batch_size": 16, "schedule__warmup_epochs": 0}
        run(runtime, make_config(data__image_size=32, **short, **keys), here / f"{name}_counted")
    return 0


@cache
def folder():
    """Of all runs."""
    name = Path(tempfile.mkdtemp(prefix="test_comm_state_"))
    atexit.register(shutil.rmtree, name)
    run_ranks(4, as_many_as, (1, 2, 4), all_runs, name)
    with tiny_models():
        for kind in KEPT:
            run(Runtime(), resumed_config(kind, pairs=False), name / f"{kind}_from_4")
    return name


def last_weights(path):
    checkpoints = checkpoint.saved(at(path / "checkpoints"))
    assert checkpoints[-1].name == "step_00000008"
    return checkpoint.load_weights(at(checkpoints[-1]))


# late and local steps against simulations


def assert_same_weights(got, want, tolerance):
    """Relative to each tensor's norm; batch norm's statistics to 1e-6 at best, as means have their own roundings."""
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        difference = float((got[key].double() - tensor.double()).norm())
        allowed = max(tolerance, 1e-6) if "running" in key else tolerance
        assert difference <= allowed * float(tensor.double().norm()), (key, difference)


def assert_losses(path, losses, first):
    """Logged are the mean losses of the first so many steps, and of the others."""
    rows = read_metrics(at(path))
    want = [sum(loss for loss, _ in part) / sum(n for _, n in part) for part in (losses[:first], losses[first:])]
    assert [step for step, _ in series(rows, "train/loss")] == [4, 8]
    assert [loss for _, loss in series(rows, "train/loss")] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("name", "delay"), [("plain", 0), ("late", 1)])
def test_a_run_is_that_of_plain_or_late_sgd(world_size, name, delay):
    """In the same bits where no sum is of more than two ranks. A loss is logged with the steps that were applied."""
    path = folder() / str(world_size) / name
    weights, losses = simulate_sums(make_config(), world_size, delay)
    assert_same_weights(last_weights(path), weights, 1e-5 if world_size == 4 else 0)
    assert_losses(path, losses, 4 - delay)


@pytest.mark.parametrize(("world_size", "name"), [(n, name) for name in ("local", "warm") for n in SIMULATED[name]])
def test_a_run_of_local_sgd_is_that_of_a_replica_each_rank(world_size, name):
    config, path = make_config(**SIMULATED_KEYS[name]), folder() / str(world_size) / name
    weights, losses = simulate_local(config, world_size)
    assert_same_weights(last_weights(path), weights, 1e-5)
    assert_losses(path, losses, 4)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_local_sgd_of_period_1_is_plain_sgd(world_size):
    path = folder() / str(world_size)
    assert_same_weights(last_weights(path / "period_1"), last_weights(path / "plain"), 1e-6)


@pytest.mark.parametrize("name", ["late", "local", "warm"])
def test_late_and_local_runs_are_runs_of_their_own(name):
    ours, plain = (last_weights(folder() / "2" / kind)["0.weight"] for kind in (name, "plain"))
    assert float((ours - plain).norm()) > 1e-3 * float(plain.norm())


# checkpoints


def assert_same_reduction(one, two):
    ours, theirs = (checkpoint.load_training(at(path))["reduction"] for path in (one, two))
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not ours[key].equal(theirs[key])] == []


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_run_that_was_stopped_ends_in_the_same_bits(world_size, name):
    ends = [folder() / str(world_size) / f"{name}_{how}/checkpoints/step_00000008" for how in ("straight", "stopped")]
    for end in ends:
        assert test_loop.saved_steps(end.parents[1]) == [3, 6, 8]
    assert_same_bits(*ends)
    assert_same_reduction(*ends)
    straight, stopped = (read_metrics(at(path.parents[1])) for path in ends)
    for key in ("train/loss", "train/lr", "val/loss"):
        assert series(stopped, key) == series(straight, key)


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("origin", [1, 2, 4])
def test_a_run_goes_on_with_another_number_of_ranks(origin, name):
    """From 1 to 2, from 2 to 4, from 4 of two nodes to 1."""
    path = folder() / f"{name}_from_{origin}"
    weights = last_weights(path)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    state = checkpoint.load_state(at(path / "checkpoints/step_00000008"))
    assert state["progress"]["step"] == 8
    assert np.isfinite(state["metrics"]["val/loss"])
    for key, tensor in last_weights(folder() / str(origin) / f"{name}_straight").items():
        if tensor.ndim > 1:
            assert float((weights[key] - tensor).norm()) < 0.2 * float(tensor.norm())


# what is logged


def test_every_run_logs_a_fraction_and_bytes():
    runs = sorted(folder().glob("*/*/metrics.jsonl"))
    assert len(runs) > 30
    for path in runs:
        rows = [row for row in read_metrics(at(path.parent)) if "train/lr" in row]
        for row in rows:
            assert 0 <= row["perf/comm_fraction"] <= 1
            assert row["perf/comm_bytes_per_step"] >= 0
            if path.parts[-3] == "1":
                assert row["perf/comm_fraction"] == 0.0
                assert row["perf/comm_bytes_per_step"] == 0


def bytes_per_step(world_size, name):
    rows = read_metrics(at(folder() / str(world_size) / f"{name}_counted"))
    return [value for _, value in series(rows, "perf/comm_bytes_per_step")]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_are_those_of_the_parameters(world_size):
    path = folder() / str(world_size) / "none_counted/checkpoints/step_00000002"
    parameters = sum(tensor.numel() for tensor in checkpoint.load_weights(at(path)).values())
    plain = 2 * (world_size - 1) / world_size * 4 * parameters
    sent = {name: bytes_per_step(world_size, name) for name in COUNTED}
    assert {name: len(values) for name, values in sent.items()} == dict.fromkeys(COUNTED, 2)
    assert sent["none"] == pytest.approx([plain] * 2, rel=0.01)
    assert sent["fp16"] == pytest.approx([plain / 2] * 2, rel=0.01)
    assert sent["bf16"] == sent["fp16"]
    assert all(value <= plain / 30 for value in sent["onebit"])
    if world_size > 1:
        assert min(sent["onebit"]) >= plain / 32


@pytest.mark.parametrize("name", ["plain", "late"])
def test_the_fraction_is_the_time_that_another_rank_has_held_this_one_up(name):
    """Rank 1 is 0.3 s late before each backward pass. The first two steps start everything, and are left out."""
    rows = read_metrics(at(folder() / "2" / f"{name}_waits_for_1"))
    rows = [row for row in rows if "perf/comm_fraction" in row and row["step"] > 2]
    assert len(rows) == 2
    for row in rows:
        seconds = 8 / row["perf/images_per_second"]
        assert 0.25 <= row["perf/comm_fraction"] * seconds <= seconds


@pytest.mark.parametrize("name", ["plain", "late"])
def test_a_rank_that_is_late_itself_waits_for_no_one(name):
    rows = read_metrics(at(folder() / "2" / f"{name}_waits_for_0"))
    rows = [row for row in rows if "perf/comm_fraction" in row and row["step"] > 2]
    assert len(rows) == 2
    seconds = [8 / row["perf/images_per_second"] for row in rows]
    assert max(seconds) >= 0.3
    assert min(row["perf/comm_fraction"] * s for row, s in zip(rows, seconds, strict=True)) < 0.15
