"""What a run came to: in its directory, in MLflow, and for a person."""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from raytrain import tracking
from raytrain.checkpoint import Warn, best, load_state, load_weights, newest_valid, saved, verify
from raytrain.commandline import dump
from raytrain.console import Console, duration
from raytrain.errors import RunError, StoppedError
from raytrain.model import build_model
from raytrain.recorder import BAD_IMAGES, EVENTS, METRICS, read_metrics
from raytrain.run import Run, claim, load_config, start_tracking
from raytrain.signals import ending_at_once
from raytrain.storage import Storage

Status = Literal["FINISHED", "FAILED", "KILLED"]


def finish(run: Run, status: Status, warn: Warn) -> bool:
    """Brings into MLflow what the run directory has, and ends the run there. One process calls.

    Tracking that fails costs a warning, and what is left is not tried.

    Returns:
        Whether MLflow has all of it, or none was asked for.
    """
    if run.tracked is None:
        return True
    try:
        return _finish(run, run.tracked, status, warn)
    except RunError as error:  # of a store that does not answer; how the run itself ended is what counts
        warn(str(error))
        return False


def _finish(run: Run, tracked: tracking.TrackedRun, status: Status, warn: Warn) -> bool:
    metrics = read_metrics(run.folder)
    if status == "FINISHED" and (fault := verify(saved(run.checkpoints)[-1])) is not None:
        raise RunError(f"checkpoint {saved(run.checkpoints)[-1]} does not verify: {fault}")
    if status != "FINISHED":  # whoever waits for the end of this process may not wait for uploads
        return (
            tracking.finish_run(tracked, status, warn)
            and tracking.log_missing(tracked, metrics, warn)
            and _log_files(run, tracked, warn)
        )
    return (
        tracking.log_missing(tracked, metrics, warn)
        and tracking.log_curves(tracked, metrics, warn)
        and _log_files(run, tracked, warn)
        and (not run.config.tracking.log_model or _log_model(run, tracked, saved(run.checkpoints)[-1], warn))
        and tracking.finish_run(tracked, status, warn)
    )


def _log_files(run: Run, tracked: tracking.TrackedRun, warn: Warn) -> bool:
    """The files of the run directory, and where they are wanted the best and the newest checkpoint."""
    ends = (best(run.checkpoints, run.config.checkpoint.best_by), *saved(run.checkpoints)[-1:])
    kept = {path for path in ends if path is not None and run.config.tracking.log_checkpoints}
    names = [name for name in (METRICS, EVENTS, BAD_IMAGES) if run.folder.exists(name)]
    if not run.folder.is_remote:
        folder = run.folder.path
        files = {folder / name: "" for name in names}
        return tracking.log_files(tracked, {**files, **{path.path: f"checkpoints/{path.name}" for path in kept}}, warn)
    with tempfile.TemporaryDirectory(prefix="raytrain-") as temporary:
        for name in names:
            (Path(temporary) / name).write_bytes(run.folder.read(name))
        files = {Path(temporary) / name: "" for name in names}
        files |= {path.fetch_folder(Path(temporary)): f"checkpoints/{path.name}" for path in kept}
        return tracking.log_files(tracked, files, warn)


def rebuild(location: str, overrides: Mapping[str, object], warn: Warn) -> tracking.TrackedRun | None:
    """Brings a run into MLflow from its directory alone. One process calls, while nobody trains the run.

    Args:
        location: of the run directory.
        overrides: tracking.uri and tracking.experiment, where they are to be others.
        warn: told of what MLflow did not take.

    Returns:
        The run in MLflow, or None where that does not have all of it.

    Raises:
        RunError: there is no such run, it has no checkpoint yet, or it is being trained.
        TrackingError: MLflow cannot be reached, or does not store.
    """
    folder = Storage(location, RunError)
    if not folder.exists("config.yaml"):
        raise RunError(f"{folder} is no run directory: it has no config.yaml")
    config = load_config(folder, overrides)
    uri = config.tracking.uri and tracking.resolve_uri(config.tracking.uri, Path.cwd())
    section = config.tracking.model_copy(update={"enabled": True, "uri": uri})
    config = config.model_copy(update={"tracking": section})
    with claim(folder, resume=True):
        if (newest := newest_valid(folder / "checkpoints", warn)) is None:
            raise RunError(f"{folder} has no checkpoint yet")
        tracked = start_tracking(config, folder, load_state(newest)["train_images"], {}, warn, anew=True)
        folder.write("config.yaml", dump(config).encode())  # names the server that mlflow.json does
        run = Run(config, folder, tracked)
        has_ended = folder.exists("result.json")
        stored = finish(run, "FINISHED" if has_ended else "KILLED", warn)
        if stored and has_ended:
            _write_result(folder, {**json.loads(folder.read("result.json")), "stored": True})
        return tracked if stored else None


@contextmanager
def finishing(run: Run, console: Console) -> Iterator[None]:
    """Ends the run as its body ends, and tells how it went. One process calls.

    Raises:
        BaseException: what its body raised.
    """
    started = time.monotonic()
    try:
        yield
    except BaseException as error:
        with ending_at_once():
            finish(run, "KILLED" if isinstance(error, StoppedError) else "FAILED", console.warn)
        raise
    if run.tracked is not None:
        console.show("storing the run in MLflow")
    with ending_at_once():
        stored = finish(run, "FINISHED", console.warn)
    if not stored:
        console.warn(
            f"MLflow does not have all of this run; bring it there with `python -m raytrain.rebuild {run.folder}`"
        )
    state = load_state(saved(run.checkpoints)[-1])
    result = {"stored": stored, "step": state["step"], "seconds": time.monotonic() - started, **state["metrics"]}
    _write_result(run.folder, result)
    console.line(summary(run.folder))


def _write_result(folder: Storage, result: dict[str, object]) -> None:
    folder.write("result.json", (json.dumps(result, indent=2) + "\n").encode())


def summary(folder: Storage) -> str:
    """What a finished run came to."""
    result = json.loads(folder.read("result.json"))
    newest = next(iter(saved(folder / "checkpoints")[::-1]), None)
    if newest is None:
        return f"its checkpoints are no longer in {folder}"
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
    if folder.exists("mlflow.json"):
        uri = json.loads(folder.read("mlflow.json"))["uri"]
        lines["MLflow"] = tracking.how_to_open(uri)
    return "\n".join(f"{name:<11}{text}" for name, text in lines.items())


def _log_model(run: Run, tracked: tracking.TrackedRun, path: Storage, warn: Warn) -> bool:
    state = load_state(path)
    network = build_model(run.config.model, run.config.data, len(state["class_names"]), seed=0)
    network.body.load_state_dict(load_weights(path, "model" if run.config.train.ema_decay is None else "ema"))
    size = run.config.data.image_size
    example = np.zeros((2, size, size, 3), np.uint8)
    return bool(tracking.log_model(tracked, network.eval(), example, state["class_names"], warn, step=state["step"]))
