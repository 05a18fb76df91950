"""Checkpoints: complete or absent, verified when read, the last few and the best kept.

    step_00000045/
        model.safetensors   weights and buffers, keys as torchvision has them
        ema.safetensors     the same of the moving average, where there is one
        training.pt         optimizer, scaler, reduction: tensors and plain values (`weights_only`)
        state.json          step, best score, class names, metrics, config
        manifest.json       size in bytes and SHA-256 of each file above

A checkpoint is written under a temporary name and renamed when all of it is on the disk.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from raytrain.errors import CheckpointError, NonFiniteError, RunError

FORMAT_VERSION = 1
_TEMPORARY = ".writing-"

Warn = Callable[[str], None]


def save(
    folder: Path,
    step: int,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    training: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Path:
    """Writes a checkpoint; one process calls.

    Args:
        folder: of all checkpoints of the run.
        step: optimizer steps taken.
        weights: `state_dict`s by file name, "model" and perhaps "ema".
        training: what else is needed to go on; tensors, numbers, strings and their lists and dicts.
        state: plain JSON values.

    Returns:
        The checkpoint's directory.

    Raises:
        NonFiniteError: a weight is not finite; nothing is written.
        RunError: it cannot be written; checkpoints that exist are untouched.
    """
    for name, tensors in weights.items():
        for key, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise NonFiniteError(f"{name} {key} is not finite after step {step}; no checkpoint of it is written")
    final, temporary = folder / f"step_{step:08d}", folder / f"{_TEMPORARY}{step:08d}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, tensors in weights.items():
            contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            (temporary / f"{name}.safetensors").write_bytes(safetensors.torch.save(contiguous))
        torch.save(dict(training), temporary / "training.pt")
        _write_json(temporary / "state.json", {"format_version": FORMAT_VERSION, "step": step, **state})
        _write_json(
            temporary / "manifest.json",
            {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())},
        )
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        shutil.rmtree(final, ignore_errors=True)  # only one that did not verify can bear the name
        temporary.rename(final)
        _flush(folder)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(f"cannot write checkpoint {final}: {error}; earlier checkpoints are untouched") from error
    return final


def newest_valid(folder: Path, warn: Warn) -> Path | None:
    """The newest checkpoint that verifies, or None; one process calls.

    All that do not verify are named in a warning and set aside as `damaged_step_...`, so that none of them counts
    among those to keep.
    """
    for path in saved(folder):
        fault = verify(path)
        if fault is not None:
            aside = path.with_name(f"damaged_{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            warn(f"checkpoint {path} does not verify ({fault}); it is set aside as {aside.name}")
    return saved(folder)[-1] if saved(folder) else None


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if not {"model.safetensors", "training.pt", "state.json"} <= manifest.keys():
            return "its manifest does not name all files"
        for name, expected in manifest.items():
            found = _fingerprint(path / name)
            if found != expected:
                return f"{name} is not what was written: {found['bytes']} of {expected['bytes']} bytes, or other ones"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return str(error)
    return None


def load_state(path: Path) -> dict[str, Any]:
    """The checkpoint's state.json.

    Raises:
        CheckpointError: it was written by a later version of raytrain.
    """
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if state["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format {state['format_version']}; this raytrain reads {FORMAT_VERSION}"
        )
    return state


def load_weights(path: Path, name: str = "model") -> dict[str, torch.Tensor]:
    """Weights and buffers by torchvision's keys, on the CPU; `name` is "model" or "ema"."""
    return safetensors.torch.load_file(path / f"{name}.safetensors")


def load_training(path: Path) -> dict[str, Any]:
    """What `save` was given as `training`, tensors on the CPU."""
    return torch.load(path / "training.pt", map_location="cpu", weights_only=True)


def saved(folder: Path) -> list[Path]:
    """All checkpoints of a run, oldest first, verified or not."""
    return sorted(folder.glob("step_*"))


def best(folder: Path) -> Path | None:
    """The checkpoint with the greatest val/top1, the newest of equals, or None where none was evaluated."""
    ranked = _by_score(folder)
    return ranked[-1] if ranked else None


def prune(folder: Path, keep_last: int, keep_best: int) -> None:
    """Removes all but the newest `keep_last` and the best `keep_best`, and what a killed process left unfinished.

    To be called after a checkpoint was saved, which is the newest and whole: a valid one is always left.
    """
    paths = saved(folder)
    keep = {*paths[-keep_last:], *_by_score(folder)[::-1][:keep_best]}
    for path in paths:
        if path not in keep:
            # hidden first, so that a half-removed checkpoint is never taken for one that was damaged
            doomed = path.rename(folder / f"{_TEMPORARY}removed-{path.name}")
            shutil.rmtree(doomed, ignore_errors=True)
    for leftover in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _by_score(folder: Path) -> list[Path]:
    scores = {path: score for path in saved(folder) if (score := _score(path)) is not None}
    return sorted(scores, key=lambda path: (scores[path], path))


def _score(path: Path) -> float | None:
    try:
        score = json.loads((path / "state.json").read_text(encoding="utf-8"))["metrics"]["val/top1"]
        return score if math.isfinite(score) else None
    except (OSError, ValueError, KeyError, TypeError):  # not evaluated, or damaged
        return None


def _fingerprint(path: Path) -> dict[str, int | str]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=True) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
