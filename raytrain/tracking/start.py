"""The start of a run, where everything that a run needs of its tracker is tried, and its end."""

import fcntl
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from raytrain.errors import TrackerDownError, TrackingError
from raytrain.tracking.client import TrackedRun, Warn, import_client, reason, request_limits, shown, warned

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import RunInfo

Scalar = str | int | float | bool | None
T = TypeVar("T")

START_SECONDS = 9
"""How long `start_run` may take with a server."""
START_SECONDS_LOCAL = 300
"""How long with a database: many runs that start at once take turns."""
MAX_PARAM_LENGTH = 500
"""Longer values are no parameters (MLflow cuts at 6000 characters, older servers refuse 500)."""


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


def how_to_open(uri: str) -> str:
    """The command that shows the runs of a resolved URI, or the address where they are seen."""
    if uri == f"sqlite:///{Path.cwd() / 'mlflow.db'}":
        return "mlflow ui"
    return f"mlflow ui --backend-store-uri {uri}" if is_local(uri) else uri


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
        TrackerDownError: The store cannot be reached. With a server, within 10 seconds of the import of MLflow.
        TrackingError: It cannot be written, or the experiment or the run was deleted.
    """
    client_type = import_client()

    def start() -> TrackedRun:
        with request_limits(retries=0):
            with _store_lock(uri):
                client = client_type(uri)
            if run_id is not None:
                return _go_on(client, uri, run_id, config)
            return _start_new(client, uri, experiment, name=name, params=params, tags=tags, config=config)

    try:
        return _within(START_SECONDS_LOCAL if is_local(uri) else START_SECONDS, start)
    except TrackingError:
        raise
    except Exception as error:
        # of what a server that works refuses there is no end to be waited for
        refused = getattr(error, "error_code", "INTERNAL_ERROR") != "INTERNAL_ERROR"
        raise (TrackingError if refused else TrackerDownError)(
            f"MLflow at {shown(uri)} cannot be used: {reason(error)}. Start the server, correct "
            f"tracking.uri, or train without MLflow: tracking.enabled=false"
        ) from error


def finish_run(run: TrackedRun, status: Literal["FINISHED", "FAILED", "KILLED"], warn: Warn) -> bool:
    """End the run with a status. Returns whether that was stored; where not, it costs a warning."""
    with warned(run, f"the status {status}", warn), request_limits(retries=1):
        import_client()(run.uri).set_terminated(run.run_id, status)
        return True
    return False


def _start_new(
    client: "MlflowClient",
    uri: str,
    experiment: str,
    *,
    name: str,
    params: Mapping[str, Scalar],
    tags: Mapping[str, str],
    config: str,
) -> TrackedRun:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking.context.registry import resolve_tags

    with _store_lock(uri):
        experiment_id = _experiment_id(client, uri, experiment)
    info = client.create_run(experiment_id, tags=resolve_tags(dict(tags)), run_name=name).info
    try:
        _log_params(client, info.run_id, params)
        _log_config(client, info, experiment, config)
    except (MlflowException, OSError, TrackingError):
        with suppress(MlflowException, OSError):  # or it would be RUNNING for ever
            client.set_terminated(info.run_id, "FAILED")
        raise
    return TrackedRun(uri, experiment, info.run_id, info.start_time)


def _go_on(client: "MlflowClient", uri: str, run_id: str, config: str) -> TrackedRun:
    run = client.get_run(run_id)
    if run.info.lifecycle_stage == "deleted":
        raise TrackingError(
            f"the MLflow run {run_id} in {shown(uri)} was deleted: restore it (mlflow runs restore "
            f"--run-id {run_id}), or start a new run"
        )
    experiment = client.get_experiment(run.info.experiment_id).name
    _log_config(client, run.info, experiment, config)
    client.update_run(run_id, status="RUNNING")
    return TrackedRun(uri, experiment, run_id, run.info.start_time)


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
            f"MLflow keeps the artifacts of experiment {experiment!r} in {shown(info.artifact_uri or '')}, "
            f"which cannot be written from here: {reason(error)}. Make it writable, take a new "
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
            f"the MLflow experiment {name!r} in {shown(uri)} was deleted: restore it (mlflow experiments "
            f"restore --experiment-id {found.experiment_id}), or take another name: tracking.experiment=NAME"
        )
    return found.experiment_id


def _within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread: name look-ups and object stores have no timeout to set."""
    outcome: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            outcome.set_exception(error)

    # Not an executor's: Python would wait for it at the exit.
    threading.Thread(target=run, name="tracking-start", daemon=True).start()
    if not futures.wait([outcome], seconds).done:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return outcome.result()


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


def _sqlite_file(uri: str) -> Path | None:
    match = re.match(r"sqlite(?:\+\w+)?:///([^?]+)", uri)
    return Path(match[1]) if match else None
