"""The run directory, which is the truth about a run, and the run in MLflow, which is a view of it.

runs/NAME/
    config.yaml      the resolved config
    checkpoints/     see `checkpoint`
    metrics.jsonl    every metric, a line each time some were logged
    events.jsonl     every start, stop and failure of its workers
    bad_images.jsonl what was left out, with data.on_bad_image=skip
    mlflow.json      which MLflow run this is
    attempt          how often its workers were started; those of an earlier start must not write any more
    result.json      what it came to, when it has ended well

It lies on a file system that all nodes share, or in an object store.
"""

import fcntl
import json
import platform
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

from raytrain import __version__, tracking
from raytrain.checkpoint import Warn
from raytrain.commandline import Request, build, changed_recipe, dump, flatten, parse_yaml
from raytrain.config import Config
from raytrain.describe import derived
from raytrain.errors import ConfigError, RunError, TrackerDownError, TrackingError
from raytrain.storage import Storage


@dataclass(frozen=True)
class Run:
    """A run, as its workers need to know it."""

    config: Config
    folder: Storage
    """Its directory."""
    tracked: tracking.TrackedRun | None
    attempt: int = 0
    """Which start of its workers this is, from 1."""

    @property
    def checkpoints(self) -> Storage:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"

    def check_attempt(self) -> None:
        """Compares the run directory with what this process was started for.

        Raises:
            RunError: it is not the driver's, or other workers have been started since.
        """
        try:
            found = int(self.folder.read("attempt"))
        except (RunError, ValueError) as error:
            raise RunError(
                f"run.storage_path is not the same on all nodes: {socket.gethostname()} does not see what the driver "
                f"wrote to {self.folder} ({error}); set it to a path that all nodes share, or to an object store"
            ) from error
        if found != self.attempt:
            raise RunError(
                f"run {self.folder.name} is trained by other workers now (start {found}, not {self.attempt})"
            )

    def check_writable(self) -> None:
        """Raises RunError where this process cannot write into the run directory."""
        self.folder.write("probe", b"")
        self.folder.delete("probe")


def resolve(request: Request) -> tuple[Config, Storage]:
    """The config and the directory of the run that a command line asks for; creates nothing.

    With --resume the run directory's config is what counts, with the command line's overrides laid over it.

    Raises:
        RunError: the run exists and was not to be resumed, or is to be resumed and does not exist.
        ConfigError: an override would change the recipe of a run that has begun.
    """
    config = _absolute(request.config)
    storage, name = Storage(config.run.storage_path, RunError), config.run.name
    if "--resume" not in request.flags:
        name = name or f"{request.config_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        _check_free(storage / name)
        return config, storage / name
    if name is None:
        named = re.compile(re.escape(request.config_name) + r"-\d{8}-\d{6}")
        times = {run: storage.mtime(f"{run}/config.yaml") for run in storage.folders() if named.fullmatch(run)}
        begun = {run: changed for run, changed in times.items() if changed is not None}
        if not begun:
            raise RunError(f"no run of {request.config_name} in {storage} to resume; name it with run.name=NAME")
        name = max(begun, key=begun.__getitem__)
    folder = storage / name
    if not folder.exists("config.yaml"):
        raise RunError(f"no run {name} in {storage} to resume; start it without --resume")
    old, new = load_config(folder), load_config(folder, request.overrides)
    if changed := changed_recipe(old, new):
        raise ConfigError(
            f"run {name} has begun with another recipe; leave these as they are or start a new run:\n  "
            + "\n  ".join(changed)
        )
    return _absolute(new), folder


def load_config(folder: Storage, overrides: Mapping[str, object] | None = None) -> Config:
    """The config of a run that has begun, with overrides laid over it.

    Raises:
        ConfigError: it is not one.
    """
    where = folder.where("config.yaml")
    return build(parse_yaml(folder.read("config.yaml").decode(), where), overrides or {}, where)


def _check_free(folder: Storage) -> None:
    if folder.exists("config.yaml"):
        raise RunError(
            f"run {folder.name} exists already in {str(folder).rpartition('/')[0]}; continue it with --resume, or take "
            "another run.name"
        )
    if not folder.is_remote and folder.path.exists() and {path.name for path in folder.path.iterdir()} - {".lock"}:
        raise RunError(f"{folder} exists and is no run; remove it, or choose another run.name")


def _absolute(config: Config) -> Config:
    """The config with paths that mean the same in a worker, which has another working directory."""
    try:
        run = config.run.model_copy(update={"storage_path": str(Storage(config.run.storage_path, RunError))})
        data: dict[str, object] = {"cache_path": config.data.cache_path.expanduser().absolute()}
        if config.data.path is not None and "://" not in config.data.path:
            data["path"] = str(Path(config.data.path).expanduser().absolute())
    except RuntimeError as error:  # of expanduser
        raise ConfigError(f"data.path, data.cache_path or run.storage_path: {error}") from error
    uri = config.tracking.uri and tracking.resolve_uri(config.tracking.uri, Path.cwd())
    update = {
        "run": run,
        "data": config.data.model_copy(update=data),
        "tracking": config.tracking.model_copy(update={"uri": uri}),
    }
    return config.model_copy(update=update)


def is_finished(folder: Storage) -> bool:
    """Whether a run has come to its end, in its directory and in MLflow."""
    return folder.exists("result.json") and json.loads(folder.read("result.json"))["stored"]


@contextmanager
def claim(folder: Storage, *, resume: bool) -> Iterator[None]:
    """Holds a run's directory, which it makes for a new run, so that no other process trains in it meanwhile.

    An object store has no locks: there the one who comes later takes the run over, and the workers of the earlier one
    end before they write another checkpoint.

    Raises:
        RunError: another process holds it, or it exists already, or it cannot be written.
    """
    if not resume:
        _check_free(folder)
    if folder.is_remote:
        yield
        return
    path = folder.path
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w")
    except OSError as error:
        raise RunError(f"cannot write the run directory {path}: {error}; set run.storage_path") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"run {path.name} in {path.parent} is being trained by another process") from None
        try:
            yield
        finally:
            (path / ".lock").unlink(missing_ok=True)
            if not (path / "config.yaml").exists():  # nothing has begun, and the name stays free
                shutil.rmtree(path, ignore_errors=True)


def start(config: Config, folder: Storage, num_images: int, tags: Mapping[str, str], warn: Warn) -> Run:
    """Brings a directory that was claimed, and the MLflow run, to where training can begin. One process calls.

    An MLflow that does not answer ends a new run here, and costs a warning where the run has begun before.

    Raises:
        RunError: the directory cannot be written.
        TrackingError: MLflow cannot be reached, or does not store.
    """
    tracked = start_tracking(config, folder, num_images, tags, warn) if config.tracking.enabled else None
    try:
        folder.write("config.yaml", dump(config).encode())
        folder.delete("result.json")
    except RunError as error:
        raise RunError(f"cannot write the run directory {folder}: {error}; set run.storage_path") from error
    return Run(config, folder, tracked)


def next_attempt(run: Run) -> Run:
    """The run for workers that are about to be started; those of the attempts before can write no more."""
    attempt = 1 + (int(run.folder.read("attempt")) if run.folder.exists("attempt") else 0)
    run.folder.write("attempt", str(attempt).encode())
    return replace(run, attempt=attempt)


def start_tracking(
    config: Config, folder: Storage, num_images: int, tags: Mapping[str, str], warn: Warn, *, anew: bool = False
) -> tracking.TrackedRun:
    """Starts the run in MLflow, or goes on with the one that the directory names. One process calls.

    Args:
        config: the run.
        folder: its directory.
        num_images: of the training set.
        tags: for a new run in MLflow.
        warn: told where MLflow does not answer and the run goes on without.
        anew: make a new run where the one that is named is not there, and do not go on without MLflow.

    Raises:
        TrackingError: MLflow cannot be reached, or does not store.
    """
    known = json.loads(folder.read("mlflow.json")) if folder.exists("mlflow.json") else {}
    uri = config.tracking.uri or known.get("uri") or tracking.resolve_uri(None, Path.cwd())
    start = partial(
        tracking.start_run,
        uri,
        config.tracking.experiment,
        name=folder.name,
        params={**flatten(config), **derived(config, num_images)},
        tags={**_versions(), **tags},
        config=dump(config),
    )
    try:
        tracked = start(run_id=known.get("run_id"))
    except TrackerDownError as error:
        if not known or anew:
            raise
        warn(f"{error}; the run goes on, and is stored there when it answers again")
        return tracking.TrackedRun(**{**known, "uri": uri})
    except TrackingError as error:
        if not known:
            raise
        if not anew:
            raise TrackingError(
                f"{error}. To make the run anew, there or in another server: python -m raytrain.rebuild {folder} "
                "tracking.uri=URI; to go on without MLflow: tracking.enabled=false"
            ) from error
        tracked = start()
    try:
        folder.write("mlflow.json", json.dumps(asdict(tracked)).encode())
    except RunError as error:
        tracking.finish_run(tracked, "FAILED", warn)
        raise RunError(f"cannot write the run directory {folder}: {error}; set run.storage_path") from error
    return tracked


def with_workers(config: Config, num_workers: int) -> Config:
    """The config for a number of workers that others have decided on.

    Raises:
        ConfigError: it cannot be that many.
    """
    return build(config.model_dump(), {"scaling.num_workers": num_workers}, "the config")


def place_tags(world_size: int, device_type: str) -> dict[str, str]:
    """Tags that tell where a run trains."""
    return {"world_size": str(world_size), "device": device_type, "host": socket.gethostname()}


def _versions() -> dict[str, str]:
    """Tags that tell which software a run was made with."""
    versions = {f"version.{name}": metadata.version(name) for name in ("torch", "torchvision", "ray", "mlflow")}
    return {"version.raytrain": __version__, "version.python": platform.python_version(), **versions}
