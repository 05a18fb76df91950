import concurrent.futures
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from raytrain import tracking
from raytrain.errors import TrackingError
from raytrain.tracking import MetricSender, TrackedRun
from raytrain.tracking.client import hold_request_limits, request_limits
from raytrain.tracking.curves import draw_curves

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in MLflow itself


def start(uri, experiment="cats", *, name="run", params=None, tags=None, config="a: 1\n", run_id=None):
    return tracking.start_run(
        uri, experiment, name=name, params=params or {}, tags=tags or {}, config=config, run_id=run_id
    )


def history(run, key):
    return [(m.step, m.value) for m in mlflow.MlflowClient(run.uri).get_metric_history(run.run_id, key)]


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def silent_server():
    """Accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def local_store(tmp_path_factory):
    """The embedded default's URI; its schema takes a second to make."""
    return tracking.resolve_uri("sqlite:///mlflow.db", tmp_path_factory.mktemp("launch"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("raytrain.tracking.sender.SEND_EVERY_SECONDS", 0.05)
    monkeypatch.setattr("raytrain.tracking.client.REQUEST_SECONDS", 2)


# The URI


@pytest.mark.parametrize(
    ("uri", "resolved"),
    [
        (None, "sqlite:////launch/mlflow.db"),
        ("sqlite:///x.db", "sqlite:////launch/x.db"),
        ("sqlite:///../x.db?timeout=9", "sqlite:////x.db?timeout=9"),
        ("sqlite:////data/x.db", "sqlite:////data/x.db"),
        ("sqlite+pysqlite:///x.db", "sqlite+pysqlite:////launch/x.db"),
        ("file:runs", "file:///launch/runs"),
        ("file:///data/runs", "file:///data/runs"),
        ("./runs", "file:///launch/runs"),
        ("http://host:5000", "http://host:5000"),
        ("postgresql+psycopg2://user:word@host/db", "postgresql+psycopg2://user:word@host/db"),
        ("databricks", "databricks"),
    ],
)
def test_uri_is_absolute_and_relative_to_the_launch_directory(uri, resolved):
    assert tracking.resolve_uri(uri, Path("/launch")) == resolved


def test_uri_of_the_environment_is_relative_to_the_launch_directory_too(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///env.db")
    assert tracking.resolve_uri(None, Path("/launch")) == "sqlite:////launch/env.db"


def test_import_loads_neither_mlflow_nor_torch():
    code = "import sys, raytrain.tracking; print(sorted({'mlflow', 'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Starting


def test_a_new_store_is_one_file_in_the_launch_directory(tmp_path, monkeypatch, capfd):
    launch, elsewhere = tmp_path / "launch it", tmp_path / "worker"
    launch.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # where a worker would be
    run = start(tracking.resolve_uri("sqlite:///runs.db", launch), tags={"mlflow.parentRunId": "p"})
    sender = MetricSender(pickle.loads(pickle.dumps(run)), pytest.fail)
    sender.send(row(1, {"train/loss": 1.0}))
    assert sender.close(20) == 0

    assert list(tmp_path.rglob("*.db")) == [launch / "runs.db"]
    assert not list(elsewhere.iterdir())
    stored = mlflow.MlflowClient(run.uri).get_run(run.run_id)
    assert stored.info.artifact_uri == f"{launch}/mlruns/{run.run_id}/artifacts"
    assert (launch / "mlruns" / run.run_id / "artifacts" / "config.yaml").read_text() == "a: 1\n"
    assert stored.info.run_name == "run"
    assert stored.data.tags["mlflow.parentRunId"] == "p"
    assert history(run, "train/loss") == [(1, 1.0)]
    assert capfd.readouterr() == ("", "")


def in_processes(count, uri, experiment):
    code = textwrap.dedent("""
        import sys
        from raytrain import tracking
        run = tracking.start_run(sys.argv[1], sys.argv[2], name="r", params={}, tags={}, config="")
        tracking.finish_run(run, "FINISHED", print)
        print(run.run_id)
    """)
    command = [sys.executable, "-c", code, uri, experiment]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(count)]
    results = [process.communicate(timeout=80) for process in processes]
    assert [error for _, error in results] == [""] * count
    assert [process.returncode for process in processes] == [0] * count
    return {output.strip() for output, _ in results}


def test_six_processes_start_at_the_same_new_store(tmp_path):
    uri = tracking.resolve_uri("sqlite:///new/x.db", tmp_path)
    run_ids = in_processes(6, uri, "sweep")
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("sweep").experiment_id
    assert experiment != "0"
    assert {run.info.run_id for run in client.search_runs([experiment])} == run_ids
    assert len(run_ids) == 6
    assert {run.info.status for run in client.search_runs([experiment])} == {"FINISHED"}


def test_a_deleted_experiment_is_refused_with_the_remedy(local_store):
    client = mlflow.MlflowClient(local_store)
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(TrackingError, match=r"restore it .*--experiment-id \d+.*tracking.experiment=NAME"):
        start(local_store, "gone")


def test_a_long_value_is_no_parameter_and_hinders_nothing(local_store):
    params = {
        "optim.lr": 0.1,
        "data.path": None,
        "data.classes": "x" * 9000,
        **{f"k{i}": i for i in range(120)},
    }
    config = "classes: " + "x" * 9000
    run = start(local_store, params=params, config=config)
    client = mlflow.MlflowClient(local_store)
    stored = client.get_run(run.run_id).data.params
    assert stored.keys() == params.keys() - {"data.classes"}
    assert (stored["optim.lr"], stored["data.path"]) == ("0.1", "None")
    artifact = Path(client.get_run(run.run_id).info.artifact_uri, "config.yaml")
    assert artifact.read_text() == config


def test_artifacts_that_cannot_be_written_are_found_at_the_start(local_store):
    client = mlflow.MlflowClient(local_store)
    experiment = client.create_experiment("elsewhere", artifact_location="/proc/nowhere")
    with pytest.raises(TrackingError, match=r"/proc/nowhere.* cannot be written"):
        start(local_store, "elsewhere")
    assert [run.info.status for run in client.search_runs([experiment])] == ["FAILED"]


def test_a_closed_port_is_refused_in_seconds():
    uri = f"http://user:secret@127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(TrackingError, match=r"127\.0\.0\.1.*Connection refused.*enabled=false") as caught:
        start(uri)
    assert time.monotonic() - began < 10
    assert "secret" not in str(caught.value)


def test_a_server_that_does_not_answer_is_refused_in_seconds(monkeypatch):
    monkeypatch.undo()  # with the times of real use
    began = time.monotonic()
    with silent_server() as uri, pytest.raises(TrackingError, match=uri):
        start(uri)
    assert time.monotonic() - began < 10
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ


def test_a_work_that_never_ends_is_given_up():
    with pytest.raises(TimeoutError, match="no answer"):
        tracking.start._within(0.1, lambda: time.sleep(1))


def row(step, metrics, when=None):
    """Of metrics.jsonl."""
    return {"step": step, "time": time.time() if when is None else when, **metrics}


# Going on


def test_a_resumed_run_has_each_step_once_and_ends_as_it_ends(local_store):
    """A07, B35: what a killed process had recorded is sent by the next one, if it was not sent before."""
    client = mlflow.MlflowClient(local_store)
    run = start(local_store, params={"seed": 1})
    run_id = run.run_id
    rows = [row(step, {"train/loss": step + 0.5}, 1000 + step / 7) for step in range(10, 220, 10)]
    sender = MetricSender(run, pytest.fail)
    for one in rows[:15]:
        sender.send(one)
    assert sender.close(20) == 0
    assert tracking.finish_run(run, "FAILED", pytest.fail)
    assert client.get_run(run_id).info.status == "FAILED"

    for last in (220, 230):
        run = start(local_store, "another", params={"seed": 2}, run_id=run_id)
        assert (run.run_id, run.experiment) == (run_id, "cats")
        assert client.get_run(run_id).info.status == "RUNNING"
        sender = MetricSender(run, pytest.fail, rows)
        sender.send(rows[-1])  # once more, as by a request whose answer was lost
        rows.append(row(last, {"train/loss": last + 0.5, "val/top1": 0.6}, 1000 + last / 7))
        sender.send(rows[-1])
        assert sender.close(20) == 0
        assert tracking.finish_run(run, "KILLED", pytest.fail)
        assert client.get_run(run_id).info.status == "KILLED"

    assert history(run, "train/loss") == [(step, step + 0.5) for step in range(10, 240, 10)]
    assert history(run, "val/top1") == [(220, 0.6), (230, 0.6)]
    data = client.get_run(run_id).data
    assert data.metrics["train/loss"] == 230.5
    assert data.params["seed"] == "1"


def test_a_run_that_was_deleted_or_is_unknown_is_refused(local_store):
    run = start(local_store)
    mlflow.MlflowClient(local_store).delete_run(run.run_id)
    with pytest.raises(TrackingError, match="mlflow runs restore --run-id"):
        start(local_store, run_id=run.run_id)
    with pytest.raises(TrackingError, match="not found"):
        start(local_store, run_id="0" * 32)


def test_limits_in_any_order_leave_what_the_user_has_set(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)

    def limits():
        return os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT"), os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES")

    first, second = hold_request_limits(), hold_request_limits()
    with request_limits(retries=1, upload=True):
        assert limits() == ("120", "1")
        first()
        second()  # as of a sender that is closed while its thread waits for an answer
        assert limits() == ("120", "1")
    assert limits() == ("77", None)


# Metrics


def test_values_that_are_not_finite_are_not_sent(local_store):
    run = start(local_store)
    sender = MetricSender(run, pytest.fail)
    sender.send(row(1, {"a": float("nan"), "b": float("inf"), "c": 1.0}))
    sender.send(row(2, {"a": 2.0}))
    assert sender.close(20) == 0
    assert mlflow.MlflowClient(local_store).get_run(run.run_id).data.metrics == {"a": 2.0, "c": 1.0}


def test_what_waits_goes_in_few_requests(local_store, monkeypatch):
    run = start(local_store)
    batches = []
    real = mlflow.MlflowClient.log_batch

    def count(self, run_id, **kwargs):
        batches.append(len(kwargs["metrics"]))
        return real(self, run_id, **kwargs)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", count)
    monkeypatch.setattr("raytrain.tracking.sender.SEND_EVERY_SECONDS", 30)
    sender = MetricSender(run, pytest.fail)
    for step in range(250):
        sender.send(row(step, dict.fromkeys("abcdefghij", 1.0)))
    assert sender.close(20) == 0
    assert batches == [1000, 1000, 500]
    assert len(history(run, "j")) == 250


def test_what_mlflow_refuses_holds_nothing_up(local_store):
    run = start(local_store)
    warnings = []
    sender = MetricSender(run, warnings.append)
    sender.send(row(1, {"bad*name": 1.0}))
    wait_until(lambda: warnings)
    sender.send(row(1, {"good": 1.0}))
    wait_until(lambda: not sender._waiting)
    assert sender.close(20) == 1
    assert history(run, "good") == [(1, 1.0)]
    assert "bad*name" in warnings[0]


def test_a_tracker_that_hangs_costs_one_warning_and_no_time(monkeypatch):
    monkeypatch.setattr("raytrain.tracking.client.REQUEST_SECONDS", 1)
    monkeypatch.setattr("raytrain.tracking.sender.MAX_WAITING_POINTS", 300)
    warnings = []
    with silent_server() as uri:
        sender = MetricSender(TrackedRun(uri, "cats", "0" * 32), warnings.append)
        slowest = 0.0
        for step in range(400):
            began = time.perf_counter()
            sender.send(row(step, {"train/loss": 1.0}))
            slowest = max(slowest, time.perf_counter() - began)
            time.sleep(0.01)
        wait_until(lambda: warnings)
        assert sender.close(0.5) == 400
        assert len(sender._waiting) == 300
    assert slowest < 0.1
    assert len(warnings) == 1
    assert uri in warnings[0]
    sender._thread.join(10)
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ


def test_a_machine_is_watched(local_store, monkeypatch):
    monkeypatch.setattr("raytrain.tracking.sender.MACHINE_EVERY_SECONDS", 1.0)
    run = start(local_store)
    for _ in range(2):  # as by two processes of a run, one after the other
        sender = MetricSender(run, pytest.fail, system_metrics=True)
        time.sleep(3)
        assert sender.close(20) == 0
    steps = [step for step, _ in history(run, "system/cpu_utilization_percentage")]
    assert len(steps) >= 2
    assert steps == sorted(set(steps))
    assert 0 <= steps[0] < steps[-1] < 120  # seconds since the run began


# The end


ROWS = [
    {
        "step": step,
        "train/loss": 6 * 0.995**step + 1 + 0.2 * np.sin(step),
        "train/lr": 0.4 * min(1, step / 50) * (1 - step / 400),
        "perf/images_per_second": 800 + 20 * np.cos(step),
    }
    | ({"val/loss": 6 * 0.994**step + 1.2, "val/top1": 0.76 - 0.7 * 0.99**step} if step % 40 == 0 else {})
    | ({"val/top5": 0.93 - 0.7 * 0.98**step} if step % 40 == 0 else {})
    for step in range(1, 401)
]


def test_files_and_curves_are_stored(local_store, tmp_path):
    run = start(local_store)
    (tmp_path / "step_00000010").mkdir()
    (tmp_path / "step_00000010" / "state.json").write_text("{}")
    (tmp_path / "log.txt").write_text("hello")
    files = {tmp_path / "step_00000010": "checkpoints/step_00000010", tmp_path / "log.txt": ""}
    assert tracking.log_files(run, files, pytest.fail)
    assert tracking.log_curves(run, ROWS, pytest.fail)
    assert tracking.log_curves(run, ROWS[:1], pytest.fail)
    assert tracking.log_curves(run, [], pytest.fail)
    root = Path(mlflow.MlflowClient(local_store).get_run(run.run_id).info.artifact_uri)
    assert (root / "checkpoints/step_00000010/state.json").read_text() == "{}"
    assert (root / "log.txt").read_text() == "hello"
    assert (root / "learning_curves.png").read_bytes()[:4] == b"\x89PNG"
    assert [axes.get_title(loc="left") for axes in draw_curves(ROWS).axes] == [
        "loss", "validation accuracy", "learning rate", "images / s",
    ]  # fmt: skip


def test_a_tracker_that_is_gone_at_the_end_costs_warnings(tmp_path):
    run = TrackedRun(f"http://127.0.0.1:{free_port()}", "cats", "0" * 32)
    warnings = []
    began = time.monotonic()
    assert not tracking.log_files(run, {tmp_path: "x"}, warnings.append)
    assert not tracking.log_curves(run, ROWS[:2], warnings.append)
    assert tracking.log_model(run, TinyNet(), IMAGES, CLASSES, warnings.append) is None
    assert not tracking.finish_run(run, "FINISHED", warnings.append)
    assert time.monotonic() - began < 20
    assert len(warnings) == 4
    assert all("Connection refused" in warning for warning in warnings)


CLASSES = ["cat", "dog", "owl"]
IMAGES = np.random.default_rng(0).integers(0, 256, (7, 16, 16, 3), dtype=np.uint8)


class TinyNet(torch.nn.Module):
    """uint8 [N, H, W, 3] to float32 [N, 3], with the parts of a ResNet that an export could stumble over."""

    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)
        self.pool = torch.nn.AdaptiveAvgPool2d(1)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, images):
        x = images.permute(0, 3, 1, 2).float().div(255).sub(0.5)
        return self.head(self.pool(self.norm(self.convolution(x)).relu()).flatten(1))


PREDICT = """
import sys, mlflow, numpy as np
sys.modules["raytrain"] = None  # importing it raises
import torch
torch.cuda.is_available = lambda: True  # as on a machine with a GPU
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
images = np.load(sys.argv[3])
outputs = [model.predict(images[:count]) for count in (1, 2, len(images))]
np.savez(sys.argv[4], *outputs, names=model.metadata.metadata["class_names"])
"""


def test_a_stored_model_predicts_without_raytrain(local_store, tmp_path, capfd):
    torch.manual_seed(0)
    module = TinyNet().train()
    run = start(local_store)
    sender = MetricSender(run, pytest.fail)
    sender.send(row(30, {"val/top1": 0.5}))
    sender.close(20)
    uri = tracking.log_model(run, module, IMAGES[:1], CLASSES, pytest.fail, step=30)
    assert capfd.readouterr() == ("", "")
    assert module.training
    client = mlflow.MlflowClient(local_store)
    stored = client.get_run(run.run_id)
    assert stored.info.status == "RUNNING"
    assert [f"models:/{output.model_id}" for output in stored.outputs.model_outputs] == [uri]
    assert client.get_logged_model(uri.removeprefix("models:/")).status == "READY"
    assert mlflow.active_run() is None

    images = np.random.default_rng(1).integers(0, 256, (359, 16, 16, 3), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    command = [sys.executable, "-c", PREDICT, run.uri, uri, tmp_path / "images.npy", tmp_path / "out.npz"]
    subprocess.run(command, check=True, cwd=tmp_path)
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(images)).numpy()
    outputs = np.load(tmp_path / "out.npz")
    assert outputs["names"].tolist() == CLASSES
    for key, count in (("arr_0", 1), ("arr_1", 2), ("arr_2", 359)):
        assert outputs[key].dtype == np.float32
        np.testing.assert_array_equal(outputs[key].argmax(1), expected[:count].argmax(1))
        np.testing.assert_allclose(outputs[key], expected[:count], atol=1e-4)


# A real server


@contextmanager
def mlflow_server(directory, *options):
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", *options]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (directory / "server.log").open("w") as log:
        # A session of its own, so that a signal reaches the server's workers too.
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def answers():
        assert process.poll() is None, (directory / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False

    try:
        wait_until(answers, 60)
        yield f"http://127.0.0.1:{port}", process
    finally:
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_with_a_real_server(tmp_path, monkeypatch):
    # The quickstart's run first: a bare server in the launch directory is to show it with its artifacts.
    local = start(tracking.resolve_uri(None, tmp_path), "local", config="b: 2\n")
    monkeypatch.setattr("raytrain.tracking.sender.MAX_SEND_EVERY_SECONDS", 0.5)
    monkeypatch.setattr("raytrain.tracking.client.REQUEST_SECONDS", 5)
    with mlflow_server(tmp_path) as (uri, process):
        query = urllib.parse.urlencode({"path": "config.yaml", "run_uuid": local.run_id})
        with urllib.request.urlopen(f"{uri}/get-artifact?{query}", timeout=10) as answer:
            assert answer.read() == b"b: 2\n"

        client = mlflow.MlflowClient(uri)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: tracking.start._experiment_id(client, uri, "new"), range(8)))
            runs = list(pool.map(lambda i: start(uri, "new", name=f"r{i}", params={"i": i}), range(8)))
        experiments = {client.get_run(run.run_id).info.experiment_id for run in runs}
        assert experiments == found
        assert len(experiments) == 1
        assert experiments != {"0"}

        run = runs[0]
        warnings = []
        sender = MetricSender(run, warnings.append)
        sender.send(row(1, {"train/loss": 1.0}))
        wait_until(lambda: not sender._waiting)
        monkeypatch.setattr("raytrain.tracking.client.REQUEST_SECONDS", 1)
        os.killpg(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        for step in range(2, 100):
            sender.send(row(step, {"train/loss": 1.0 / step}))
        assert time.monotonic() - began < 0.5
        wait_until(lambda: warnings)
        time.sleep(2)
        os.killpg(process.pid, signal.SIGCONT)
        wait_until(lambda: not sender._waiting)
        sender.send(row(100, {"train/loss": 0.0}))
        assert sender.close(20) == 0
        assert len(warnings) == 1
        assert [step for step, _ in history(run, "train/loss")] == list(range(1, 101))

        monkeypatch.setattr("raytrain.tracking.client.REQUEST_SECONDS", 5)
        assert tracking.log_curves(run, ROWS[:50], warnings.append)
        model_uri = tracking.log_model(run, TinyNet(), IMAGES, CLASSES, warnings.append, step=100)
        assert tracking.finish_run(run, "FINISHED", warnings.append)
        assert len(warnings) == 1
        assert {file.path for file in client.list_artifacts(run.run_id)} >= {
            "config.yaml",
            "learning_curves.png",
        }
        assert client.get_run(run.run_id).info.status == "FINISHED"
        assert client.get_logged_model(model_uri.removeprefix("models:/")).status == "READY"

        # A server whose artifacts are on a path that only it has.
        client.create_experiment("server path", artifact_location="/proc/nowhere")
        with pytest.raises(TrackingError, match="cannot be written from here"):
            start(uri, "server path")
