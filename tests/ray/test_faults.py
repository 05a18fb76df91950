"""Runs that end badly, in every way they can: what the user is told, what MLflow shows, and how they go on."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from raytrain.checkpoint import verify
from raytrain.data.order import epoch_order
from tests.places import at
from tests.ray.conftest import (
    LIGHT,
    ROOT,
    background,
    check_quiet,
    environment,
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
    assert verify(at(saved)) is None
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
    assert verify(at(newest)) is None
    # steps that were computed twice came to the same bits, so it does not matter which of them MLflow has
    same = [place for place in points if place[0].startswith(("train/", "val/", "epoch"))]
    assert {place: there.get(place) for place in same} == {place: points[place] for place in same}
    assert set(there) == set(points)


def events_of(cwd):
    """What events.jsonl tells: (kind, row)."""
    rows = (cwd / "runs" / "run" / "events.jsonl").read_text().splitlines()
    return [(row["kind"], row) for row in map(json.loads, rows)]


def newest_weights(cwd):
    newest = max((cwd / "runs" / "run" / "checkpoints").glob("step_*"))
    return newest.name, load_file(newest / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Weights after 60 steps that nothing happened to, of one worker."""
    launch = tmp_path_factory.mktemp("undisturbed") / "launch"
    ended, _ = fit(launch, *SHORT, "train.max_steps=60", "scaling.num_workers=1", "tracking.enabled=false")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return newest_weights(launch)


def check_as_undisturbed(launch, undisturbed):
    name, weights = newest_weights(launch)
    assert name == undisturbed[0]
    assert weights.keys() == undisturbed[1].keys()
    assert [key for key in weights if not weights[key].equal(undisturbed[1][key])] == []


def kill(process):
    process.kill()


def stop_for_good(process):
    process.suspend()


@pytest.mark.parametrize("fault", [kill, stop_for_good])
def test_workers_are_started_again_and_end_in_the_same_bits(tmp_path, fault, undisturbed):
    """A07, B35: one worker is killed, or hangs, in one MLflow run whose history has each step once."""
    launch = tmp_path / "launch"
    words = (*SHORT, "train.max_steps=60", "checkpoint.every_steps=5", "train.step_timeout_seconds=6")
    with background(launch, *words) as run:
        run.wait_for("step 12/60")
        tree = run.tree()
        workers = workers_of(tree)
        assert len(workers) == 2
        # what Ray would give a process of its own, for seconds of imports at each start
        assert [name for process in tree if "Controller" in (name := " ".join(process.cmdline()))] == []
        fault(workers[-1])
        assert run.wait() == 0, run.out() + run.err()
        check_gone(tree)
    assert run.err() == ""
    check_quiet(run.out())
    told = next(line for line in run.out().splitlines() if line.startswith("warning: "))
    if fault is kill:
        assert re.match(r"warning: the worker process of rank \d on \S+ died: ", told)
    else:
        assert re.match(r"warning: step \d+ took longer than train.step_timeout_seconds 6: rank \d on \S+ is in ", told)
    assert "starting again from the newest checkpoint (failure 1 of 3 in 3600 s)" in told
    resumed = int(re.search(r"resuming after step (\d+) from ", run.out())[1])
    assert resumed >= 10
    assert [kind for kind, _ in events_of(launch)] == ["start", "failure", "start", "end"]
    check_as_undisturbed(launch, undisturbed)
    assert state_of(launch) == ("FINISHED", True)
    assert steps_of(recorded_points(launch / "runs" / "run"), "train/loss") == list(range(1, 61))
    check_in_agreement(launch)


# A rank that waits in its Python code at a step: what the watchdog is to name.
SLEEPY = """
import sys, time
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "raytrain.loop":
            sys.meta_path.remove(self)
            import raytrain.data.loader as loader
            batches = loader.train_batches
            def over_slept(*args, **kwargs):
                for number, own in enumerate(batches(*args, **kwargs), args[6]):
                    if args[4] == 1 and number == 7:
                        time.sleep(1000)
                    yield own
            loader.train_batches = over_slept
        return None

sys.meta_path.insert(0, Finder())
"""


def test_a_step_that_hangs_again_and_again_is_named_with_its_stack_and_its_images(tmp_path):
    launch = tmp_path / "launch"
    (tmp_path / "sitecustomize.py").write_text(SLEEPY)
    env = environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    words = (*SHORT, "train.max_steps=60", "checkpoint.every_steps=5", "train.step_timeout_seconds=4")
    ended, _ = fit(launch, *words, env=env)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    check_quiet(ended.stdout)
    assert ended.stdout.count("is in phase data; rank 0 waited") == 2
    assert ended.stdout.count("over_slept") >= 2  # the function in which it waits
    assert "step 7 has failed 3 times in a row" in ended.stderr.splitlines()[0]
    images = epoch_order(0, 0, 1438)[7 * 32 : 8 * 32].tolist()
    assert f"its training images are {', '.join(map(str, images[:8]))}, ..." in ended.stderr
    listed = (launch / "runs" / "run" / "samples_of_step_7.txt").read_text().split()
    assert [int(sample) for sample in listed] == images
    assert state_of(launch) == ("FAILED", True)
    assert [kind for kind, _ in events_of(launch)] == ["start", "failure"] * 3
    recorded = sorted((launch / "runs" / "run").glob("flight_recorder-*.json"))
    assert recorded
    assert json.loads(recorded[0].read_text())["entries"]


def test_a_signal_to_one_worker_stops_all_after_the_same_step(tmp_path):
    """C58: with nothing to start them again, the run ends with a code of its own; else see the harness on hosts."""
    launch = tmp_path / "launch"
    words = (*SHORT, "train.max_steps=5000", "checkpoint.every_epochs=null", "scaling.max_failures=0")
    with background(launch, *words) as run:
        run.wait_for("step 3/5,000")
        tree = run.tree()
        workers_of(tree)[-1].send_signal(signal.SIGUSR1)
        started = time.monotonic()
        assert run.wait() == 143, run.out() + run.err()
        assert time.monotonic() - started < END_SECONDS
        stopped = int(re.search(r"raytrain: stopped after step (\d+) of 5000", run.err())[1])
        check_gone(tree)
    (saved,) = (launch / "runs" / "run" / "checkpoints").iterdir()
    assert saved.name == f"step_{stopped:08d}"
    assert verify(at(saved)) is None
    assert state_of(launch) == ("KILLED", True)


def test_without_a_budget_a_worker_that_was_killed_fails_the_run(tmp_path):
    launch = tmp_path / "launch"
    words = (*SHORT, "train.max_steps=5000", "checkpoint.every_steps=2", "scaling.max_failures=0")
    with background(launch, *words) as run:
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
    assert {verify(at(path)) for path in saved} == {None}
    assert torch.load(saved[-1] / "training.pt", weights_only=True)["optimizer"]["state"]
    assert "--resume" in run.err()
    check_quiet(run.err())
    assert re.match(r"raytrain: .*(worker|rank).* died", run.err()), run.err()  # in its first line
    assert len(run.err().splitlines()) <= 5, run.err()
    check_quiet(run.out())


def test_a_disk_that_is_full_for_a_while_costs_warnings(tmp_path, undisturbed):
    """B25."""
    launch, disk = tmp_path / "launch", tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", disk]
    if os.geteuid() != 0 or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        words = (*SHORT, "train.max_steps=60", "checkpoint.every_steps=5", f"run.storage_path={disk}")
        with background(launch, *words) as run:
            run.wait_for("step 12/60")
            filler = disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**16))
            os.truncate(filler, filler.stat().st_size - 2**17)  # room for rows of metrics, and for no checkpoint
            run.wait_for("cannot write checkpoint")
            filler.unlink()
            assert run.wait() == 0, run.out() + run.err()
        told = [line for line in run.out().splitlines() if line.startswith("warning: ")]
        assert any(
            re.search(r"cannot write checkpoint \S+step_\d+: .*No space left.* [\d,]+ bytes", line) for line in told
        )
        newest = max((disk / "run" / "checkpoints").glob("step_*"))
        weights = load_file(newest / "model.safetensors")
        assert (newest.name, [key for key in weights if not weights[key].equal(undisturbed[1][key])]) == (
            undisturbed[0],
            [],
        )
        assert steps_of(recorded_points(disk / "run"), "train/loss") == list(range(1, 61))
        assert [path.name for path in (disk / "run").rglob(".writing*")] == []
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
