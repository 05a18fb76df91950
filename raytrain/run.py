"""The run directory, which is the truth about a run, and the run in MLflow, which is a view of it.

runs/NAME/
    config.yaml      the resolved config
    checkpoints/     see `checkpoint`
    metrics.jsonl    every metric, a line each time some were logged
    bad_images.jsonl what was left out, with data.on_bad_image=skip
    mlflow.json      which MLflow run this is
    ray/             what Ray keeps of its own
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
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import numpy as np

from raytrain import __version__, tracking
from raytrain.checkpoint import Warn, best, load_state, load_weights, saved
from raytrain.commandline import Request, build, changed_recipe, dump, flatten, read_yaml
from raytrain.config import Config
from raytrain.console import Console, duration
from raytrain.describe import derived
from raytrain.errors import ConfigError, RunError, StoppedError
from raytrain.model import build_model
from raytrain.recorder import read_metrics

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class Run:
    """A run, as its workers need to know it."""

    config: Config
    path: Path
    tracked: tracking.TrackedRun | None

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"


def resolve(request: Request) -> tuple[Config, Path]:
    """The config and the directory of the run that a command line asks for; creates nothing.

    With --resume the run directory's config is what counts, with the command line's overrides laid over it.

    Raises:
        RunError: the run exists and was not to be resumed, or is to be resumed and does not exist.
        ConfigError: an override would change the recipe of a run that has begun.
    """
    config = _absolute(request.config)
    storage, name = config.run.storage_path, config.run.name
    if "--resume" not in request.flags:
        name = name or f"{request.config_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        _check_free(storage / name)
        return config, storage / name
    if name is None:
        named = re.compile(re.escape(request.config_name) + r"-\d{8}-\d{6}")
        runs = [path for path in storage.glob("*/config.yaml") if named.fullmatch(path.parent.name)]
        runs.sort(key=lambda path: path.stat().st_mtime)
        if not runs:
            raise RunError(f"no run of {request.config_name} in {storage} to resume; name it with run.name=NAME")
        name = runs[-1].parent.name
    path = storage / name
    if not (path / "config.yaml").exists():
        raise RunError(f"no run {name} in {storage} to resume; start it without --resume")
    values = read_yaml(path / "config.yaml")
    old, new = (build(values, overrides, path / "config.yaml") for overrides in ({}, request.overrides))
    if changed := changed_recipe(old, new):
        raise ConfigError(
            f"run {name} has begun with another recipe; leave these as they are or start a new run:\n  "
            + "\n  ".join(changed)
        )
    return _absolute(new), path


def _check_free(path: Path) -> None:
    try:
        if (path / "config.yaml").exists():
            raise RunError(
                f"run {path.name} exists already in {path.parent}; continue it with --resume, or take another run.name"
            )
        if path.exists():
            raise RunError(f"{path} exists and is no run; remove it, or choose another run.name")
    except OSError as error:
        raise RunError(f"cannot use the run directory {path}: {error}; set run.storage_path") from error


def _absolute(config: Config) -> Config:
    """The config with paths that mean the same in a worker, which has another working directory."""
    try:
        run = config.run.model_copy(update={"storage_path": config.run.storage_path.expanduser().absolute()})
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


def is_finished(path: Path) -> bool:
    """Whether a run has come to its end, in its directory and in MLflow."""
    result = path / "result.json"
    return result.exists() and json.loads(result.read_text(encoding="utf-8"))["stored"]


@contextmanager
def claim(path: Path, *, resume: bool) -> Iterator[None]:
    """Holds a run's directory, which it makes for a new run, so that no other process trains in it meanwhile.

    Raises:
        RunError: another process holds it, or it exists already, or it cannot be written.
    """
    try:
        if not resume:
            _check_free(path)
        path.mkdir(parents=True, exist_ok=resume)
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


def start(config: Config, path: Path, num_images: int, tags: Mapping[str, str]) -> Run:
    """Brings a directory that was claimed, and the MLflow run, to where training can begin. One process calls.

    Raises:
        RunError: the directory cannot be written.
        TrackingError: MLflow cannot be reached, or does not store.
    """
    tracked = _start_tracking(config, path, num_images, tags) if config.tracking.enabled else None
    try:
        _replace(path / "config.yaml", dump(config))
        for name in ("stop", "result.json"):
            (path / name).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot write the run directory {path}: {error}; set run.storage_path") from error
    return Run(config, path, tracked)


def _start_tracking(config: Config, path: Path, num_images: int, tags: Mapping[str, str]) -> tracking.TrackedRun:
    known = json.loads((path / "mlflow.json").read_text(encoding="utf-8")) if (path / "mlflow.json").exists() else {}
    tracked = tracking.start_run(
        config.tracking.uri or known.get("uri") or tracking.resolve_uri(None, Path.cwd()),
        config.tracking.experiment,
        name=path.name,
        params={**flatten(config), **derived(config, num_images)},
        tags={**_versions(), **tags},
        config=dump(config),
        run_id=known.get("run_id"),
    )
    _replace(path / "mlflow.json", json.dumps(asdict(tracked)))
    return tracked


def finish(run: Run, status: Status, warn: Warn) -> bool:
    """Brings into MLflow what the run directory has, and ends the run there. One process calls.

    Tracking that fails costs a warning, and what is left is not tried.

    Returns:
        Whether MLflow has all of it, or none was asked for.
    """
    tracked = run.tracked
    if tracked is None:
        return True
    metrics = read_metrics(run.path / "metrics.jsonl")
    kept = {path for path in (best(run.checkpoints), *saved(run.checkpoints)[-1:]) if path is not None}
    files = {
        run.path / "metrics.jsonl": "",
        run.path / "bad_images.jsonl": "",
        **{path: f"checkpoints/{path.name}" for path in kept},
    }
    files = {path: place for path, place in files.items() if path.exists()}
    if status != "FINISHED":  # whoever waits for the end of this process may not wait for uploads
        return (
            tracking.finish_run(tracked, status, warn)
            and tracking.log_missing(tracked, metrics, warn)
            and tracking.log_files(tracked, files, warn)
        )
    return (
        tracking.log_missing(tracked, metrics, warn)
        and tracking.log_curves(tracked, metrics, warn)
        and tracking.log_files(tracked, files, warn)
        and (not run.config.tracking.log_model or _log_model(run, saved(run.checkpoints)[-1], warn))
        and tracking.finish_run(tracked, status, warn)
    )


@contextmanager
def finishing(run: Run, console: Console) -> Iterator[None]:
    """Ends the run as its body ends, and tells how it went. One process calls.

    Raises:
        BaseException: what its body raised.
    """
    started = time.monotonic()
    try:
        yield
    except StoppedError:
        finish(run, "KILLED", console.warn)
        raise
    except BaseException:
        finish(run, "FAILED", console.warn)
        raise
    if run.tracked is not None:
        console.show("storing the run in MLflow")
    stored = finish(run, "FINISHED", console.warn)
    if not stored:
        console.warn(f"MLflow does not have all of this run; bring it there with --resume run.name={run.path.name}")
    state = load_state(saved(run.checkpoints)[-1])
    result = {"stored": stored, "step": state["step"], "seconds": time.monotonic() - started, **state["metrics"]}
    _replace(run.path / "result.json", json.dumps(result, indent=2) + "\n")
    console.line(summary(run.path))


def with_workers(config: Config, num_workers: int) -> Config:
    """The config for a number of workers that others have decided on.

    Raises:
        ConfigError: it cannot be that many.
    """
    return build(config.model_dump(), {"scaling.num_workers": num_workers}, "the config")


def place_tags(world_size: int, device_type: str) -> dict[str, str]:
    """Tags that tell where a run trains."""
    return {"world_size": str(world_size), "device": device_type, "host": socket.gethostname()}


def summary(path: Path) -> str:
    """What a finished run came to."""
    result = json.loads((path / "result.json").read_text(encoding="utf-8"))
    newest = saved(path / "checkpoints")[-1]
    state = load_state(newest)
    progress = state["progress"]
    top5 = f", top-5 {result['val/top5']:.4f}" if "val/top5" in result else ""
    lines = {
        "top-1": f"{result['val/top1']:.4f}{top5} on {result['val/samples']:.0f} images",
        "best": f"{progress['best_top1']:.4f} after step {progress['best_step']}",
        "time": f"{duration(result['seconds'])}, of that {duration(progress['train_seconds'])} in steps",
        "images/s": f"{state['images_seen'] / max(progress['train_seconds'], 1e-9):,.0f} over the whole run",
        "checkpoint": str(newest),
    }
    if (path / "mlflow.json").exists():
        uri = json.loads((path / "mlflow.json").read_text(encoding="utf-8"))["uri"]
        lines["MLflow"] = tracking.how_to_open(uri)
    return "\n".join(f"{name:<11}{text}" for name, text in lines.items())


def _replace(path: Path, text: str) -> None:
    """Writes a file that is whole or as it was."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _log_model(run: Run, path: Path, warn: Warn) -> bool:
    assert run.tracked is not None
    state = load_state(path)
    network = build_model(run.config.model, run.config.data, len(state["class_names"]), seed=0)
    network.body.load_state_dict(load_weights(path, "model" if run.config.train.ema_decay is None else "ema"))
    size = run.config.data.image_size
    example = np.zeros((2, size, size, 3), np.uint8)
    return bool(
        tracking.log_model(run.tracked, network.eval(), example, state["class_names"], warn, step=state["step"])
    )


def _versions() -> dict[str, str]:
    """Tags that tell which software a run was made with."""
    versions = {f"version.{name}": metadata.version(name) for name in ("torch", "torchvision", "ray", "mlflow")}
    return {"version.raytrain": __version__, "version.python": platform.python_version(), **versions}
