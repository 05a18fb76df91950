"""Checkpoints: complete or absent, verified when read, the last few and the best kept.

    step_00000045/
        model.safetensors   weights and buffers, keys as torchvision has them
        ema.safetensors     the same of the moving average, where there is one
        training.pt         optimizer, scaler, reduction: tensors and plain values (`weights_only`)
        state.json          step, best score, class names, metrics, config
        manifest.json       size in bytes and SHA-256 of each file above

They lie in a folder of this machine or of an object store. On a file system a checkpoint is written under a temporary
name, and renamed when all of it is on the disk; in an object store its manifest comes last, and makes it one.
"""

import hashlib
import io
import json
import math
import mmap
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from raytrain.errors import CheckpointError, NonFiniteError, RunError
from raytrain.storage import Storage

FORMAT_VERSION = 1
PIECE_BYTES = 1 << 18
BETTER = {"val/top1": 1, "val/loss": -1}
"""Whether a metric is better when it is greater, 1, or less, -1."""
_MANIFEST = "manifest.json"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DAMAGED = "damaged_step_"

Warn = Callable[[str], None]


def save(
    folder: Storage,
    step: int,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    training: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Storage:
    """Writes a checkpoint; one process calls.

    Args:
        folder: of all checkpoints of the run.
        step: optimizer steps taken.
        weights: `state_dict`s by file name, "model" and perhaps "ema".
        training: what else is needed to go on; tensors, numbers, strings and their lists and dicts.
        state: plain JSON values.

    Returns:
        The checkpoint's folder.

    Raises:
        NonFiniteError: a weight is not finite; nothing is written.
        RunError: it cannot be written; checkpoints that exist are untouched.
    """
    for name, tensors in weights.items():
        for key, tensor in tensors.items():
            if not _is_finite(tensor):
                raise NonFiniteError(f"{name} {key} is not finite after step {step}; no checkpoint of it is written")
    final = folder / f"step_{step:08d}"
    try:
        with folder.new_folder(final.name, last=_MANIFEST) as temporary:
            manifest = {}
            for name, tensors in weights.items():
                with _HashingFile(temporary, f"{name}.safetensors", manifest) as file:
                    _write_safetensors(tensors, file)
            with _HashingFile(temporary, "training.pt", manifest) as file:
                torch.save(dict(training), file)
            with _HashingFile(temporary, "state.json", manifest) as file:
                file.write(_json({"format_version": FORMAT_VERSION, "step": step, **state}))
            (temporary / _MANIFEST).write_bytes(_json(manifest))
    except (RunError, OSError, RuntimeError) as error:
        needed = sum(tensor.nbytes for tensors in weights.values() for tensor in tensors.values())
        raise RunError(
            f"cannot write checkpoint {final}: {error}; its weights alone are {needed:,} bytes{_free(folder)}; "
            "earlier checkpoints are untouched"
        ) from error
    return final


def newest_valid(folder: Storage, warn: Warn) -> Storage | None:
    """The newest checkpoint that verifies, or None; one process calls.

    All that do not verify are named in a warning and set aside as `damaged_step_...`, so that none of them counts
    among those to keep. What a killed process left unfinished is removed.

    Raises:
        CheckpointError: there are some, and none verifies; a run is never begun anew over the remains of one.
        RunError: one cannot be read now, which says nothing of what it holds.
    """
    _delete_unfinished(folder)
    for path in saved(folder):
        fault = verify(path)
        if fault is not None:
            folder.rename_folder(path.name, f"damaged_{path.name}")
            warn(f"checkpoint {path} does not verify ({fault}); it is set aside as damaged_{path.name}")
    valid = saved(folder)
    if not valid and (damaged := [name for name in folder.folders() if name.startswith(_DAMAGED)]):
        raise CheckpointError(
            f"no checkpoint in {folder} verifies: {', '.join(damaged)}; take another run.name, or remove them to begin "
            "this run anew"
        )
    return valid[-1] if valid else None


def verify(path: Storage) -> str | None:
    """What is wrong with a checkpoint, or None.

    Raises:
        RunError: it cannot be read now.
    """
    try:
        manifest = json.loads(path.read(_MANIFEST))
        if not {"model.safetensors", "training.pt", "state.json"} <= manifest.keys():
            return "its manifest does not name all files"
        for name, expected in manifest.items():
            found = _fingerprint(path.path / name) if not path.is_remote else _fingerprint_of(path.read(name))
            if found != expected:
                return f"{name} is not what was written: {found['bytes']} of {expected['bytes']} bytes, or other ones"
    except RunError as error:
        if error.__cause__ is not None:  # more than a file that is not there
            raise
        return str(error)
    except FileNotFoundError as error:
        return str(error)
    except OSError as error:
        raise RunError(f"cannot read checkpoint {path}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return str(error)
    return None


def load_state(path: Storage) -> dict[str, Any]:
    """The checkpoint's state.json.

    Raises:
        CheckpointError: it was written by a later version of raytrain.
    """
    state = json.loads(path.read("state.json"))
    if state["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format {state['format_version']}; this raytrain reads {FORMAT_VERSION}"
        )
    return state


def load_weights(path: Storage, name: str = "model") -> dict[str, torch.Tensor]:
    """Weights and buffers by torchvision's keys, on the CPU; `name` is "model" or "ema"."""
    return safetensors.torch.load(path.read(f"{name}.safetensors"))


def load_training(path: Storage) -> dict[str, Any]:
    """What `save` was given as `training`, tensors on the CPU."""
    return torch.load(io.BytesIO(path.read("training.pt")), map_location="cpu", weights_only=True)


def saved(folder: Storage) -> list[Storage]:
    """All checkpoints of a run, oldest first, verified or not."""
    names = [name for name in folder.folders() if name.startswith("step_")]
    if folder.is_remote:  # one without a manifest is still being uploaded, or was when its process was killed
        names = [name for name in names if (folder / name).exists(_MANIFEST)]
    return [folder / name for name in names]


def best(folder: Storage, by: str = "val/top1") -> Storage | None:
    """The checkpoint with the best value of a metric, the newest of equals, or None where none was evaluated."""
    ranked = _by_score(folder, by)
    return ranked[-1] if ranked else None


def prune(folder: Storage, keep_last: int, keep_best: int, by: str = "val/top1") -> None:
    """Removes all but the newest `keep_last` and the best `keep_best`, those set aside, and what a kill has left.

    To be called where all that there are verify, as after `newest_valid` and after `save`. Called before and after each
    `save`, there are never more than `keep_last + keep_best + 1`.
    """
    paths = saved(folder)
    keep = {*paths[-keep_last:], *_by_score(folder, by)[::-1][:keep_best]}
    for path in paths:
        if path not in keep:
            folder.delete_folder(path.name, first=_MANIFEST)
    for name in folder.folders() if paths else []:
        if name.startswith(_DAMAGED):
            folder.delete_folder(name)
    _delete_unfinished(folder)


def _delete_unfinished(folder: Storage) -> None:
    folder.delete_unfinished()
    if folder.is_remote:
        whole = {path.name for path in saved(folder)}
        for name in folder.folders():
            if name.startswith("step_") and name not in whole:
                folder.delete_folder(name)


def _by_score(folder: Storage, by: str) -> list[Storage]:
    scores = {path: score for path in saved(folder) if (score := _score(path, by)) is not None}
    return sorted(scores, key=lambda path: (scores[path], path.name))


def _score(path: Storage, by: str) -> float | None:
    try:
        score = json.loads(path.read("state.json"))["metrics"][by]
        return score * BETTER[by] if math.isfinite(score) else None
    except (RunError, ValueError, KeyError, TypeError):  # not evaluated, or damaged
        return None


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    values = tensor.detach().cpu().float()
    # One pass over memory, by this thread alone: torch's own would have others spin until it is done. Only of very
    # large numbers is the sum infinite where none of them is.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(values.numpy().sum())) or bool(values.isfinite().all())


def _fingerprint(path: Path) -> dict[str, int | str]:
    size = path.stat().st_size
    if size == 0:  # which cannot be mapped
        return _fingerprint_of(b"")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {"bytes": size, "sha256": hashlib.sha256(content).hexdigest()}


def _fingerprint_of(content: bytes) -> dict[str, int | str]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _free(folder: Storage) -> str:
    if folder.is_remote:
        return ""
    existing = next(path for path in (folder.path, *folder.path.parents) if path.exists())
    return f", and {shutil.disk_usage(existing).free:,} are free"


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=True) + "\n").encode()


def _write_safetensors(tensors: Mapping[str, torch.Tensor], file: "_HashingFile") -> None:
    """As github.com/huggingface/safetensors has the format. Its own writer wants a path or all of it in memory.

    First the size of the header in 8 bytes, the header in JSON with the place of each tensor in what follows, padded
    for alignment, then the tensors, those with wider numbers first.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header, end = {}, 0
    for key, tensor in ordered.items():
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in ordered.values():
        file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


class _HashingFile(io.BufferedWriter):
    """A new file whose size and hash go into a manifest when it is closed.

    What is written goes to the kernel in small pieces: a thread that computes a step and wakes up on the core that
    writes has to wait until the kernel is done with one.
    """

    def __init__(self, folder: Path, name: str, manifest: dict[str, dict[str, int | str]]) -> None:
        super().__init__(io.FileIO(folder / name, "x"))
        self._hash, self._bytes = hashlib.sha256(), 0
        self._name, self._manifest = name, manifest

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for first in range(0, len(view), PIECE_BYTES):
            piece = view[first : first + PIECE_BYTES]
            super().write(piece)
            self._hash.update(piece)
        self._bytes += len(view)
        return len(view)

    def close(self) -> None:
        super().close()
        self._manifest[self._name] = {"bytes": self._bytes, "sha256": self._hash.hexdigest()}
