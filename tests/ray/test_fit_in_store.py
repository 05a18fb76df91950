"""A run whose directory is in an object store: nothing of it lies on a machine that may go."""

import json
import re
import subprocess
import sys

import boto3
import pytest
from moto.server import ThreadedMotoServer

from raytrain.checkpoint import load_state, saved, verify
from tests.places import at
from tests.ray.conftest import LIGHT, ROOT, background, environment, fit, mlflow_points, only_mlflow_run, steps_of

pytestmark = pytest.mark.filterwarnings("ignore")  # in MLflow itself


@pytest.fixture
def store(monkeypatch):
    """The environment of a real S3 server with the bucket `bucket`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    keys |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    client.close()
    yield environment()
    server.stop()


def test_a_run_in_a_bucket_is_stopped_goes_on_and_is_brought_to_another_mlflow(tmp_path, store):
    words = (*LIGHT, "model.name=shufflenet_v2_x0_5", "train.max_steps=60", "checkpoint.every_steps=4")
    words = (*words, "run.storage_path=s3://bucket/runs", "run.name=run")
    folder = at("s3://bucket/runs/run")
    first, second = tmp_path / "first", tmp_path / "second"
    with background(first, *words, env=store) as run:
        run.wait_for("step 9/60")
        run.process.terminate()
        assert run.wait() == 143, run.out() + run.err()
    stopped = int(re.search(r"stopped after step (\d+) of 60", run.err())[1])
    assert [path.name for path in saved(folder / "checkpoints")][-1] == f"step_{stopped:08d}"

    # from another directory, as on another machine
    ended, _ = fit(second, *words, "--resume", f"tracking.uri=sqlite:///{first}/mlflow.db", env=store)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"resuming after step {stopped} from s3://bucket/runs/run/checkpoints/step_" in ended.stdout
    newest = saved(folder / "checkpoints")[-1]
    assert verify(newest) is None
    assert load_state(newest)["step"] == json.loads(folder.read("result.json"))["step"] == 60
    tracked = only_mlflow_run(first)
    assert tracked.info.status == "FINISHED"
    points = mlflow_points(first, tracked.info.run_id)
    assert steps_of(points, "train/loss") == list(range(1, 61))
    assert not list(first.glob("runs")) + list(second.glob("runs"))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-m", "raytrain.rebuild", str(folder), f"tracking.uri=sqlite:///{elsewhere}/mlflow.db"]
    rebuilt = subprocess.run(command, cwd=ROOT, env=store, capture_output=True, text=True, check=False)
    assert rebuilt.returncode == 0, rebuilt.stdout + rebuilt.stderr
    copy = only_mlflow_run(elsewhere)
    assert copy.info.status == "FINISHED"
    params = [
        {key: value for key, value in one.data.params.items() if key != "tracking.uri"} for one in (copy, tracked)
    ]
    assert params[0] == params[1]
    assert mlflow_points(elsewhere, copy.info.run_id) == points
