"""What every use of MLflow shares: its import, how long a request may take, and what a failure reads like."""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import RunInfo

Warn = Callable[[str], None]

REQUEST_SECONDS = 5
"""How long one request may take; MLflow's own 120 s and 7 retries make a refused call last 4 minutes."""
UPLOAD_SECONDS = 120
"""The same where the server passes a file on to its store before it answers."""

_one_request, _limits_lock = threading.Lock(), threading.Lock()
_in_force: list[dict[str, str | None]] = []


@dataclass(frozen=True)
class TrackedRun:
    """The identity of an MLflow run: all that a process on another machine needs to add to it."""

    uri: str
    """Tracking URI, absolute."""
    experiment: str
    """The name of the experiment."""
    run_id: str
    start_time: int = 0
    """When the run began, milliseconds since 1970."""


def import_client() -> "type[MlflowClient]":
    """Imports MLflow, which takes a second or two, and has it and what it uses speak of problems only."""
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # else two lines at the end of each run
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return MlflowClient


def connect(run: TrackedRun) -> "tuple[MlflowClient, RunInfo]":
    """A short request before a long one, which a server that is gone would take minutes to fail."""
    with request_limits(retries=1):
        client = import_client()(run.uri)
        return client, client.get_run(run.run_id).info


@contextmanager
def request_limits(*, retries: int, upload: bool = False) -> Iterator[None]:
    """Limits the requests made inside, by one thread at a time."""
    with _one_request, ExitStack() as stack:
        stack.callback(_limit(UPLOAD_SECONDS if upload else REQUEST_SECONDS, retries))
        yield


def hold_request_limits() -> Callable[[], None]:
    """Limits all requests, without retries, until the function that it returns is called."""
    return _limit(REQUEST_SECONDS, 0)


def _limit(seconds: int, retries: int) -> Callable[[], None]:
    """Puts limits in force until the function that it returns is called; of several the last one counts."""
    limits: dict[str, str | None] = {  # MLflow reads them at each request; it can be told nowhere else
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(seconds),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(retries),
    }
    with _limits_lock:
        if not _in_force:
            _in_force.append({name: os.environ.get(name) for name in limits})  # what the user has set, if anything
        _in_force.append(limits)
        _set_environment(limits)

    def end() -> None:
        with _limits_lock:
            _in_force[:] = [one for one in _in_force if one is not limits]
            _set_environment(_in_force[-1])
            if len(_in_force) == 1:
                _in_force.clear()

    return end


def _set_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        elif value != os.environ.get(name):  # setenv is not safe beside another thread's getenv
            os.environ[name] = value


@contextmanager
def warned(run: TrackedRun, what: str, warn: Warn) -> Iterator[None]:
    """Turns an error into a warning; what follows the `with` is then reached without a return in it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - no failure of the tracker is one of the training
        warn(f"MLflow at {shown(run.uri)} did not take {what}: {reason(error)}")


def shown(uri: str) -> str:
    """A text without the passwords of the URIs in it."""
    return re.sub(r"//[^/@]+@", "//***@", uri)


def reason(error: Exception) -> str:
    """One line; of a connection error, which MLflow and urllib3 wrap many times, its innermost part."""
    text = " ".join(str(error).split()).rsplit("Caused by ", 1)[-1].rstrip(")'\"")
    return f"{type(error).__name__}: {shown(text)[:300]}" if text else type(error).__name__
