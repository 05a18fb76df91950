"""Runs that end badly, in every way they can: what the user is told, what MLflow shows, and how they go on."""

import json
import os
import re
import signal
import time

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from raytrain.checkpoint import verify
from raytrain.data.order import epoch_order
from tests.ray.conftest import (
    LIGHT,
    background,
    check_quiet,
    fit,
    mlflow_points,
    only_mlflow_run,
    photo_folder,
    recorded_points,
    steps_of,
)

pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore")  # in MLflow itself

# a network with batch norm whose steps are short, so that the faults come between many of them
SHORT = (*LIGHT, "model.name=shufflenet_v2_x0_5", "comm.reduction=exact", "scaling.cpus_per_worker=1", "run.name=run")
END_SECONDS = 60
"""In which a run that was asked to stop has stopped, on a machine with other work too."""


def state_of(cwd):
    run = only_mlflow_run(cwd)
    return run.info.status, run.info.end_time is not None


def check_in_agreement(cwd):
    """MLflow has what the run directory has, each once."""
    assert mlflow_points(cwd, only_mlflow_run(cwd).info.run_id) == recorded_points(cwd / "runs" / "run")


def test_an_image_that_cannot_be_decoded_fails_the_run_at_its_step(tmp_path):
    launch, data = tmp_path / "launch", tmp_path / "data"
    train = photo_folder(data)
    bad = train[epoch_order(0, 0, len(train))[-1]]  # in the third and last step of the epoch
    bad.write_bytes(bad.read_bytes()[:100])
    ended, _ = fit(launch, *SHORT, "data.source=folder", f"data.path={data}", "train.epochs=1")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stderr.startswith(f"raytrain: cannot decode image {bad}: ")
    assert "repair or remove it" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    check_quiet(ended.stdout + ended.stderr)
    assert state_of(launch) == ("FAILED", True)
    assert list((launch / "runs" / "run").glob("checkpoints/step_*")) == []
    assert steps_of(recorded_points(launch / "runs" / "run"), "train/loss") == [1, 2]
    check_in_agreement(launch)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    launch = tmp_path / "launch"
    ended, _ = fit(launch, *SHORT, "train.max_steps=20", "optim.base_lr=1e30", "checkpoint.every_steps=1", "run.seed=1")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stderr.startswith("raytrain: the loss is not finite at step ")
    message = re.match(
        r"raytrain: the loss is not finite at step (\d+) on rank ([\d, ]+), learning rate ([\d.e+]+); .*optim.base_lr",
        ended.stderr,
    )
    step, ranks, lr = message.groups()
    assert 1 <= int(step) < 20  # the first step has its weights from the seed
    assert set(ranks.split(", ")) <= {"0", "1"}
    cosine = 1e30 * (1 + np.cos(np.pi * int(step) / 19)) / 2
    assert float(lr) == pytest.approx(cosine, rel=1e-5)
    assert len(ended.stderr.splitlines()) == 1
    check_quiet(ended.stdout + ended.stderr)
    assert state_of(launch) == ("FAILED", True)
    assert steps_of(recorded_points(launch / "runs" / "run"), "train/loss") == list(range(1, int(step) + 1))
    saved = sorted((launch / "runs" / "run" / "checkpoints").glob("*"))
    assert [path.name for path in saved] == [f"step_{n:08d}" for n in range(1, int(step) + 1)][-2:]
    for path in saved:
        assert all(tensor.isfinite().all() for tensor in load_file(path / "model.safetensors").values())
    check_in_agreement(launch)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_run_that_is_told_to_stop_saves_and_stops(tmp_path, signum):
    launch = tmp_path / "launch"
    with background(launch, *SHORT, "train.max_steps=5000", "checkpoint.every_epochs=null") as run:
        run.wait_for("step 3/5,000")
        tree = run.tree()
        if signum == signal.SIGINT:
            os.killpg(run.process.pid, signum)  # as a terminal does: all of the group
        else:
            run.process.send_signal(signum)
        started = time.monotonic()
        assert run.wait() == 128 + signum, run.out() + run.err()
        assert time.monotonic() - started < END_SECONDS
        stopped = int(re.search(r"raytrain: stopped after step (\d+) of 5000", run.err())[1])
        assert len(run.err().splitlines()) == 1
        check_quiet(run.out() + run.err())
        check_gone(tree)
    assert 3 <= stopped < 5000
    assert state_of(launch) == ("KILLED", True)
    assert steps_of(recorded_points(launch / "runs" / "run"), "train/loss") == list(range(1, stopped + 1))
    (saved,) = (launch / "runs" / "run" / "checkpoints").iterdir()
    assert saved.name == f"step_{stopped:08d}"
    assert verify(saved) is None
    state = json.loads((saved / "state.json").read_text())
    assert (state["step"], state["progress"]["step"]) == (stopped, stopped)
    check_in_agreement(launch)


def workers_of(processes):
    """Those of a run's processes that train."""
    return [process for process in processes if "TrainWorker" in " ".join(process.cmdline())]


def check_gone(processes):
    """Nothing that a run has started lives on after it for long."""
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []


def test_a_driver_that_was_killed_goes_on_in_the_same_run(tmp_path):
    launch = tmp_path / "launch"
    words = (*SHORT, "train.max_steps=60", "checkpoint.every_steps=4")
    with background(launch, *words) as run:
        run.wait_for("step 7/60")
        workers = workers_of(run.tree())
        assert len(workers) == 2
        run.process.kill()
        assert run.wait() == -signal.SIGKILL
        first = only_mlflow_run(launch)
        assert first.info.status == "RUNNING"

        ended, _ = fit(launch, *words, "--resume")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        check_gone(workers)  # Ray's own agents take up to a minute to notice
    assert ended.stderr == ""
    check_quiet(ended.stdout)
    resumed = int(re.search(r"resuming after step (\d+) from ", ended.stdout)[1])
    assert resumed >= 4
    assert resumed % 4 == 0 or resumed == 45  # the end of the first epoch is saved too
    shown = [int(step) for step in re.findall(r"step (\d+)/60", ended.stdout)]
    assert shown == list(range(resumed + 1, 61))

    run = only_mlflow_run(launch)
    assert run.info.run_id == first.info.run_id
    assert (run.info.status, run.info.end_time is not None) == ("FINISHED", True)
    points, there = recorded_points(launch / "runs" / "run"), mlflow_points(launch, run.info.run_id)
    assert steps_of(points, "train/loss") == list(range(1, 61))
    assert steps_of(points, "val/top1") == [45, 60]
    newest = max((launch / "runs" / "run" / "checkpoints").iterdir())
    assert newest.name == "step_00000060"
    assert verify(newest) is None
    # steps that were computed twice came to the same bits, so it does not matter which of them MLflow has
    same = [place for place in points if place[0].startswith(("train/", "val/", "epoch"))]
    assert {place: there.get(place) for place in same} == {place: points[place] for place in same}
    assert set(there) == set(points)


def test_a_worker_that_was_killed_fails_the_run(tmp_path):
    launch = tmp_path / "launch"
    with background(launch, *SHORT, "train.max_steps=5000", "checkpoint.every_steps=2") as run:
        run.wait_for("step 5/5,000")
        tree = run.tree()
        workers = workers_of(tree)
        assert len(workers) == 2, tree
        workers[-1].kill()
        started = time.monotonic()
        assert run.wait() == 1, run.out() + run.err()
        assert time.monotonic() - started < END_SECONDS
        check_gone(tree)
    assert state_of(launch) == ("FAILED", True)
    points = recorded_points(launch / "runs" / "run")
    assert steps_of(points, "train/loss")[:4] == [1, 2, 3, 4]
    saved = sorted((launch / "runs" / "run" / "checkpoints").glob("step_*"))
    assert saved
    assert {verify(path) for path in saved} == {None}
    assert torch.load(saved[-1] / "training.pt", weights_only=True)["optimizer"]["state"]
    assert "--resume" in run.err()
    check_quiet(run.err())
    assert re.match(r"raytrain: .*(worker|rank).* died", run.err()), run.err()  # in its first line
    assert len(run.err().splitlines()) <= 5, run.err()
    check_quiet(run.out())
