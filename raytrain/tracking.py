"""MLflow, in its only place: one run that is started, fed, given its artifacts and ended.

The driver calls `start_run` before anything is loaded, and gets a `TrackedRun` to hand to the worker of
rank 0, whose `MetricSender` sends metrics beside the training. At the end the driver adds the files, the
curves and the model, and calls `finish_run`.

What fails at the start is a `TrackingError` within seconds. What fails later costs a warning and no more:
the run directory has the same numbers and files. Nothing here touches MLflow's process-wide state (active
run, tracking URI, experiment), so that a user's own MLflow code beside it is left alone.
"""

import copy
import fcntl
import functools
import itertools
import logging
import math
import os
import re
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from raytrain.errors import TrackingError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from mlflow.entities import RunInfo

Scalar = str | int | float | bool | None
Warn = Callable[[str], None]
T = TypeVar("T")

REQUEST_SECONDS = 5
"""How long one request may take; MLflow's own 120 s and 7 retries make a refused call last 4 minutes."""
UPLOAD_SECONDS = 120
"""The same where the server passes a file on to its store before it answers."""
START_SECONDS = 9
"""How long `start_run` may take with a server."""
START_SECONDS_LOCAL = 300
"""How long with a database: many runs that start at once take turns."""
MAX_PARAM_LENGTH = 500
"""Longer values are no parameters (MLflow cuts at 6000 characters, older servers refuse 500)."""
SEND_EVERY_SECONDS = 1.0
"""How long metrics gather into one request."""
MAX_SEND_EVERY_SECONDS = 30.0
"""How long between two tries while the tracker fails."""
MAX_WAITING_POINTS = 100_000
"""How many metric values are kept while the tracker fails; about 20 MB."""
MACHINE_EVERY_SECONDS = 10.0
"""How often CPU, memory, disk, network and GPU are read."""

_requests_lock = threading.Lock()


@dataclass(frozen=True)
class TrackedRun:
    """The identity of an MLflow run: all that a process on another machine needs to add to it."""

    uri: str
    """Tracking URI, absolute."""
    experiment: str
    """The name of the experiment."""
    run_id: str
    last_steps: dict[str, int] = field(default_factory=dict)
    """For each metric, the highest step that is stored already; empty in a new run."""


def resolve_uri(uri: str | None, directory: Path) -> str:
    """The absolute tracking URI, for use in any process and any working directory.

    Args:
        uri: As configured. None is MLFLOW_TRACKING_URI, and without that mlflow.db in `directory`, which is
            where `mlflow ui` looks too.
        directory: The launch directory, which relative paths are relative to.
    """
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    if match := re.fullmatch(r"(sqlite(?:\+\w+)?:///)([^?]+)(\?.*)?", uri):
        return f"{match[1]}{os.path.normpath(directory.absolute() / match[2])}{match[3] or ''}"
    if re.match(r"(?!file:)\w[\w+.-]*://", uri) or uri == "databricks":
        return uri
    path = uri.removeprefix("file:").removeprefix("//")
    return uri if uri.startswith("file:") and path.startswith("/") else (directory.absolute() / path).as_uri()


def is_local(uri: str) -> bool:
    """Whether a resolved URI names files, which workers on other machines do not have."""
    return uri.startswith(("sqlite", "file:"))


def start_run(
    uri: str,
    experiment: str,
    *,
    name: str,
    params: Mapping[str, Scalar],
    tags: Mapping[str, str],
    config: str,
    run_id: str | None = None,
) -> TrackedRun:
    """Start an MLflow run, or go on with one, and make sure that it can be written to.

    To be called by one process of a run. Any number of runs may start at once, on a new store too.

    Args:
        uri: A resolved tracking URI. Artifacts of a SQLite store go to `mlruns` beside it.
        experiment: The name of the experiment; made where it does not exist.
        name: The name of the run.
        params: Values over 500 characters are left out; `config` has them.
        tags: Such as `mlflow.parentRunId`.
        config: The resolved configuration, stored as the artifact `config.yaml`; this is also the proof that
            artifacts can be stored.
        run_id: A run to go on with. It is set back to RUNNING; its name, parameters and tags stay.

    Raises:
        TrackingError: The store cannot be reached or written, or the experiment was deleted. With a server,
            within 10 seconds of the import of MLflow.
    """
    client_type = _import_client()
    start = functools.partial(_start, client_type, uri, experiment, run_id)
    try:
        return _within(
            START_SECONDS_LOCAL if is_local(uri) else START_SECONDS,
            lambda: start(name=name, params=params, tags=tags, config=config),
        )
    except TrackingError:
        raise
    except Exception as error:
        raise TrackingError(
            f"MLflow at {_shown(uri)} cannot be used: {_reason(error)}. Start the server, correct "
            f"tracking.uri, or train without MLflow: tracking.enabled=false"
        ) from error


def _start(
    client_type: "type[MlflowClient]",
    uri: str,
    experiment: str,
    run_id: str | None,
    *,
    name: str,
    params: Mapping[str, Scalar],
    tags: Mapping[str, str],
    config: str,
) -> TrackedRun:
    from mlflow.tracking.context.registry import resolve_tags

    with _request_limits(REQUEST_SECONDS, retries=0):
        with _store_lock(uri):
            client = client_type(uri)
            experiment_id = _experiment_id(client, uri, experiment) if run_id is None else ""
        if run_id is None:
            run = client.create_run(experiment_id, tags=resolve_tags(dict(tags)), run_name=name)
        else:
            run = client.get_run(run_id)
            if run.info.lifecycle_stage == "deleted":
                raise TrackingError(
                    f"the MLflow run {run_id} in {_shown(uri)} was deleted: restore it (mlflow runs restore "
                    f"--run-id {run_id}), or start a new run"
                )
            experiment = client.get_experiment(run.info.experiment_id).name
        try:
            if run_id is None:
                _log_params(client, run.info.run_id, params)
            _log_config(client, run.info, experiment, config)
        except Exception:
            if run_id is None:  # or it would be RUNNING for ever
                with suppress(Exception):
                    client.set_terminated(run.info.run_id, "FAILED")
            raise
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
    # MLflow's latest value of a metric is that of its highest step.
    last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
    return TrackedRun(uri=uri, experiment=experiment, run_id=run.info.run_id, last_steps=last_steps)


def _log_params(client: "MlflowClient", run_id: str, params: Mapping[str, Scalar]) -> None:
    from mlflow.entities import Param

    texts = {key: str(value) for key, value in params.items()}
    short = [Param(key, text) for key, text in texts.items() if len(text) <= MAX_PARAM_LENGTH]
    for first in range(0, len(short), 100):  # MLflow takes 100 in a request
        client.log_batch(run_id, params=short[first : first + 100])


def _log_config(client: "MlflowClient", info: "RunInfo", experiment: str, config: str) -> None:
    try:
        client.log_text(info.run_id, config, "config.yaml")
    except Exception as error:
        raise TrackingError(
            f"MLflow keeps the artifacts of experiment {experiment!r} in {_shown(info.artifact_uri or '')}, "
            f"which cannot be written from here: {_reason(error)}. Make it writable, take a new "
            f"tracking.experiment, or start the server with --serve-artifacts"
        ) from error


def _experiment_id(client: "MlflowClient", uri: str, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        store = _sqlite_file(uri)
        # Without a location MLflow takes `mlruns` in whatever directory the process is in.
        location = str(store.parent / "mlruns") if store else None
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException:
            # Another run was faster, on a server, where no lock of ours holds it.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise TrackingError(
            f"the MLflow experiment {name!r} in {_shown(uri)} was deleted: restore it (mlflow experiments "
            f"restore --experiment-id {found.experiment_id}), or take another name: tracking.experiment=NAME"
        )
    return found.experiment_id


def finish_run(run: TrackedRun, status: Literal["FINISHED", "FAILED", "KILLED"], warn: Warn) -> bool:
    """End the run with a status. Returns whether that was stored; where not, it costs a warning."""
    with _warned(run, f"the status {status}", warn) as failed, _request_limits(REQUEST_SECONDS, retries=1):
        _import_client()(run.uri).set_terminated(run.run_id, status)
    return not failed


def log_files(run: TrackedRun, files: Mapping[Path, str], warn: Warn) -> bool:
    """Store files and whole directories as artifacts of the run.

    Args:
        run: The run.
        files: From path to artifact directory, "" for the top. A directory's contents go into it.
        warn: Called once if not all could be stored.

    Returns:
        Whether all were stored.
    """
    with _warned(run, "files", warn) as failed:
        client, info = _connect(run)
        with _request_limits(UPLOAD_SECONDS, retries=1):
            for path, artifact_directory in files.items():
                store = client.log_artifacts if path.is_dir() else client.log_artifact
                store(info.run_id, str(path), artifact_directory or None)
    return not failed


def log_curves(run: TrackedRun, metrics: Sequence[Mapping[str, float]], warn: Warn) -> bool:
    """Store the learning curves as `learning_curves.png`.

    Args:
        run: The run.
        metrics: Rows with `step` and the metrics of that step, ascending.
        warn: Called if they could not be stored.

    Returns:
        Whether they were stored.
    """
    with _warned(run, "the learning curves", warn) as failed, tempfile.TemporaryDirectory() as folder:
        client, info = _connect(run)
        path = Path(folder) / "learning_curves.png"
        draw_curves(metrics).savefig(path, dpi=130)
        with _request_limits(UPLOAD_SECONDS, retries=1):
            client.log_artifact(info.run_id, str(path))
    return not failed


def draw_curves(metrics: Sequence[Mapping[str, float]]) -> "Figure":
    """Loss, accuracy, learning rate and throughput over the step, as far as there are any."""
    from matplotlib.figure import Figure  # without pyplot there is no display and no state to care for

    panels: list[tuple[str, dict[str, str]]] = [
        ("loss", {"train/loss": "train", "val/loss": "validation"}),
        ("validation accuracy", {"val/top1": "top 1", "val/top5": "top 5"}),
        ("learning rate", {"train/lr": ""}),
        ("images / s", {"perf/images_per_second": ""}),
    ]
    names = [key for _, keys in panels for key in keys]
    curves = {key: [(row["step"], row[key]) for row in metrics if key in row] for key in names}
    panels = [(title, keys) for title, keys in panels if any(curves[key] for key in keys)]
    columns = min(2, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(5.2 * columns, 3.1 * rows), layout="constrained")
    for place, (title, keys) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for color, (key, label) in zip(("#4269d0", "#ef7d1a"), keys.items(), strict=False):
            if not curves[key]:
                continue
            steps, values = zip(*curves[key], strict=True)
            dense = len(steps) > 60
            width, marker = (1.2, "") if dense else (1.8, "o")
            axes.plot(steps, values, color=color, label=label, linewidth=width, marker=marker, markersize=3.5)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step", color="#666666")
        axes.grid(visible=True, color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors="#666666")
        if "accuracy" in title:
            axes.yaxis.set_major_formatter("{x:.0%}")
        if any(keys.values()):
            axes.legend(frameon=False)
        else:
            axes.set_ylim(bottom=0)
    return figure


def log_model(
    run: TrackedRun,
    module: "torch.nn.Module",
    example: "np.ndarray",
    class_names: Sequence[str],
    warn: Warn,
    *,
    step: int = 0,
) -> str | None:
    """Store a model that `mlflow.pyfunc.load_model(uri).predict(images)` runs without raytrain.

    It is a graph in PyTorch's pt2 format: no pickle, no class to import, any number of images at a time.

    Args:
        run: The run that the model belongs to.
        module: From uint8 [N, H, W, 3] to float32 logits [N, C]. Left as it is, a copy on the CPU is stored.
        example: uint8 [N, H, W, 3], one image or more. They are stored with the model.
        class_names: Stored in the model's metadata, in the order of the logits.
        warn: Called if the model could not be stored.
        step: The step whose weights these are.

    Returns:
        The model's URI, or None.
    """
    with _warned(run, "the model", warn), tempfile.TemporaryDirectory() as folder:
        client, info = _connect(run)
        import mlflow
        import numpy as np
        import torch
        from mlflow.entities import LoggedModelOutput, LoggedModelStatus
        from mlflow.models import Model, ModelSignature
        from mlflow.pytorch import save_model
        from mlflow.types import Schema, TensorSpec

        versions = {"mlflow": mlflow.__version__, "torch": torch.__version__.split("+")[0]}
        model = Model(run_id=run.run_id, metadata={"class_names": list(class_names), "step": step})
        path = Path(folder) / "model"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.export.save warns of what it does itself
            save_model(
                copy.deepcopy(module).cpu().eval(),
                str(path),
                mlflow_model=model,
                signature=ModelSignature(
                    inputs=Schema([TensorSpec(np.dtype("uint8"), (-1, *example.shape[1:]))]),
                    outputs=Schema([TensorSpec(np.dtype("float32"), (-1, len(class_names)))]),
                ),
                # A dimension of 1 would be exported as a constant.
                input_example=np.concatenate([example, example])[:2],
                serialization_format="pt2",
                # Without these MLflow loads the model in a new process to see what it imports.
                pip_requirements=[f"{library}=={version}" for library, version in versions.items()],
            )
        logged = client.create_logged_model(info.experiment_id, name="model", source_run_id=run.run_id)
        model.model_id = model.model_uuid = logged.model_id
        model.artifact_path = logged.artifact_location
        # A graph stays on the device it was exported on, while MLflow takes a GPU where there is one and then
        # refuses to load.
        model.flavors["python_function"]["config"] = {"device": "cpu"}
        model.save(str(path / "MLmodel"))
        status = LoggedModelStatus.FAILED
        try:
            with _request_limits(UPLOAD_SECONDS, retries=1):
                client.log_model_artifacts(logged.model_id, str(path))
            status = LoggedModelStatus.READY
        finally:
            with _request_limits(REQUEST_SECONDS, retries=1):
                client.finalize_logged_model(logged.model_id, status)
        with _request_limits(REQUEST_SECONDS, retries=1):
            client.log_outputs(run.run_id, [LoggedModelOutput(logged.model_id, step)])
        return logged.model_uri
    return None


class MetricSender:
    """Sends metrics to a run from a thread of its own. For the worker of rank 0.

    While the tracker fails, values wait in memory and are tried again, at longer and longer intervals; an
    outage costs one warning, from the thread. A value is sent with the time of `send`, and MLflow keeps one
    of equal (metric, step, time, value): a request that was stored though its answer was lost does no harm.
    """

    def __init__(self, run: TrackedRun, warn: Warn, *, system_metrics: bool = False) -> None:
        self._run = run
        self._warn = warn
        self._system_metrics = system_metrics
        self._last_steps = dict(run.last_steps)
        self._waiting: deque[tuple[str, float, int, int]] = deque()  # key, value, milliseconds, step
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._client: MlflowClient | None = None
        self._lost = 0
        self._failing = False
        # For as long as it lives, so that its thread does not change the environment of a training process.
        with _requests_lock:
            self._limits_before = _set_request_limits(str(REQUEST_SECONDS), "0")
        self._thread = threading.Thread(target=self._work, name="tracking-sender", daemon=True)
        self._thread.start()

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the metrics of a step; returns at once and never raises.

        A (metric, step) at or before one that was sent is dropped: a resumed run repeats steps. So is a value
        that is not finite: MLflow would show infinity as 1.8e308.
        """
        now = int(time.time() * 1000)
        with self._lock:
            for key, value in metrics.items():
                if step <= self._last_steps.get(key, -1) or not math.isfinite(value):
                    continue
                if len(self._waiting) >= MAX_WAITING_POINTS:
                    self._lost += 1
                    continue
                self._last_steps[key] = step
                self._waiting.append((key, float(value), now, step))

    def close(self, timeout_s: float) -> int:
        """Send what is waiting, in one try, and stop.

        Returns:
            How many values were not sent. Unless the outage was warned of already, they cost a warning.
        """
        self._closing.set()
        self._thread.join(timeout_s)
        _set_request_limits(*self._limits_before)
        unsent = len(self._waiting) + self._lost
        if unsent:
            self._fail(f"{unsent} metric values were not sent in {timeout_s:g} s")
        return unsent

    def _work(self) -> None:
        pause = SEND_EVERY_SECONDS
        machine = self._watch_machine() if self._system_metrics else None
        closing = False
        while not closing:
            closing = self._closing.wait(pause)
            if machine:
                next(machine)
            sent = True
            while sent and self._waiting:
                sent = self._deliver()
            pause = SEND_EVERY_SECONDS if sent else min(2 * pause, MAX_SEND_EVERY_SECONDS)

    def _deliver(self) -> bool:
        with self._lock:
            points = list(itertools.islice(self._waiting, 1000))  # MLflow takes 1000 in a request
        refused = False
        try:
            with _request_limits(REQUEST_SECONDS, retries=0):
                self._client = self._client or _import_client()(self._run.uri)
                from mlflow.entities import Metric

                batch = [Metric(*point) for point in points]
                self._client.log_batch(self._run.run_id, metrics=batch, synchronous=True)
        except Exception as error:  # noqa: BLE001 - no failure of the tracker is one of the training
            self._fail(_reason(error))
            # What the server finds wrong with a request stays wrong, and would hold up all that follows.
            refused = getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE"
            if not refused:
                return False
        else:
            self._failing = False
        with self._lock:
            for _ in points:
                self._waiting.popleft()
            self._lost += len(points) if refused else 0
        return True

    def _fail(self, reason: str) -> None:
        if not self._failing:
            self._failing = True
            self._warn(
                f"MLflow at {_shown(self._run.uri)} does not take metrics: {reason}. The training goes "
                f"on; the run directory has all metrics, and they are sent when the tracker is back"
            )

    def _watch_machine(self) -> Iterator[None]:
        """Sends the machine's state when it is due, at each `next`."""
        monitor = None
        try:
            _import_client()
            # Only its readers: its own thread stops for good at the first request that fails, after minutes.
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            monitor = SystemMetricsMonitor(self._run.run_id, tracking_uri=self._run.uri)
            monitor.collect_metrics()  # the first reading of a CPU's load is 0
        except Exception as error:  # noqa: BLE001 - a library or a driver is missing
            self._warn(f"tracking.system_metrics: the machine cannot be watched: {_reason(error)}")
        stored = [step for key, step in self._last_steps.items() if key.startswith("system/")]
        step = max(stored, default=-1) + 1
        due = time.monotonic() + MACHINE_EVERY_SECONDS
        while True:
            yield
            if monitor and time.monotonic() >= due:
                due = time.monotonic() + MACHINE_EVERY_SECONDS
                for reader in monitor.monitors:
                    reader.clear_metrics()
                monitor.collect_metrics()
                readings = monitor.aggregate_metrics()
                self.send({f"system/{key}": value for key, value in readings.items()}, step)
                step += 1


def _import_client() -> "type[MlflowClient]":
    """Imports MLflow, which takes a second or two, and has it and what it uses speak of problems only."""
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return MlflowClient


def _within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread: name look-ups and object stores have no timeout to set."""
    outcome: list[T] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, name="tracking-start", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return outcome[0]


def _connect(run: TrackedRun) -> "tuple[MlflowClient, RunInfo]":
    """A short request before a long one, which a server that is gone would take minutes to fail."""
    with _request_limits(REQUEST_SECONDS, retries=1):
        client = _import_client()(run.uri)
        return client, client.get_run(run.run_id).info


@contextmanager
def _request_limits(seconds: int, *, retries: int) -> Iterator[None]:
    with _requests_lock:
        before = _set_request_limits(str(seconds), str(retries))
        try:
            yield
        finally:
            _set_request_limits(*before)


def _set_request_limits(seconds: str | None, retries: str | None) -> tuple[str | None, str | None]:
    """Sets what MLflow reads at each request, and nowhere else. Returns what it was, to be set again."""
    names = ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    before = tuple(os.environ.get(name) for name in names)
    for name, old, new in zip(names, before, (seconds, retries), strict=True):
        if new is None:
            os.environ.pop(name, None)
        elif new != old:  # setenv is not safe beside another thread's getenv
            os.environ[name] = new
    return before[0], before[1]


@contextmanager
def _store_lock(uri: str) -> Iterator[None]:
    """Held by one process of this machine at a time while it makes a SQLite store or an experiment in it."""
    store = _sqlite_file(uri)
    if store is None:
        yield
        return
    store.parent.mkdir(parents=True, exist_ok=True)
    with (store.parent / f".{store.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, also by the death of the process
        yield


@contextmanager
def _warned(run: TrackedRun, what: str, warn: Warn) -> Iterator[list[Exception]]:
    """Turns an error into a warning, and hands it over in the list."""
    failed: list[Exception] = []
    try:
        yield failed
    except Exception as error:  # noqa: BLE001 - no failure of the tracker is one of the training
        failed.append(error)
        warn(f"MLflow at {_shown(run.uri)} did not take {what}: {_reason(error)}")


def _sqlite_file(uri: str) -> Path | None:
    match = re.match(r"sqlite(?:\+\w+)?:///([^?]+)", uri)
    return Path(match[1]) if match else None


def _shown(uri: str) -> str:
    return re.sub(r"//[^/@]+@", "//***@", uri)  # no password in a log


def _reason(error: Exception) -> str:
    """One line; of a connection error, which MLflow and urllib3 wrap many times, its innermost part."""
    text = " ".join(str(error).split()).rsplit("Caused by ", 1)[-1].rstrip(")'\"")
    return f"{type(error).__name__}: {_shown(text)[:300]}" if text else type(error).__name__
