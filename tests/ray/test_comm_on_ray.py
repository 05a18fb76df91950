"""Strategies whose state must outlive a worker, on Ray: one is killed, and the run goes on."""

import json
import re

import pytest

from tests.ray.conftest import LIGHT, background, check_quiet, fit, recorded_points, steps_of
from tests.ray.test_faults import newest_weights, workers_of

pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore")  # in MLflow itself

SHORT = (
    *LIGHT,
    "tracking.enabled=false",
    "model.name=shufflenet_v2_x0_5",
    "scaling.cpus_per_worker=1",
    "run.name=run",
    "train.max_steps=40",
    "checkpoint.every_steps=5",
)
LATE_SIGNS = ("comm.compression=onebit", "comm.overlap=next_step")


def kill_a_worker(launch, *words):
    """Runs to the end, with one worker killed in the middle; returns the driver's output."""
    with background(launch, *SHORT, *words) as run:
        run.wait_for("step 12/40")
        workers_of(run.tree())[-1].kill()
        assert run.wait() == 0, run.out() + run.err()
    check_quiet(run.out() + run.err())
    assert re.search(r"the worker process of rank \d .* died", run.out() + run.err())
    return run.out()


def test_errors_and_late_gradients_outlive_a_worker(tmp_path):
    """What a rank keeps from step to step is evened out at checkpoints: so the run ends as if nothing had happened."""
    kill_a_worker(tmp_path / "killed", *LATE_SIGNS)
    ended, _ = fit(tmp_path / "undisturbed", *SHORT, *LATE_SIGNS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (name, weights), (other_name, others) = (newest_weights(tmp_path / kind) for kind in ("killed", "undisturbed"))
    assert name == other_name == "step_00000040"
    assert [key for key in weights if not weights[key].equal(others[key])] == []


def test_a_parameter_server_is_started_again_with_its_workers(tmp_path):
    launch = tmp_path / "launch"
    kill_a_worker(launch, "comm.sync=async", "comm.period=3")
    rows = [json.loads(line) for line in (launch / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    staleness = [row["perf/comm_staleness"] for row in rows if "perf/comm_staleness" in row]
    assert max(staleness) > 0  # the workers did not wait for each other
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < losses[0]
    agreed = {step for step in range(1, 41) if step % 3 == 0 or step % 5 == 0}
    assert set(steps_of(recorded_points(launch / "runs" / "run"), "train/loss")) == agreed
