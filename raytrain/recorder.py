"""Where the loop's metrics go: first to the run directory, then to whoever else listens."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from raytrain.errors import RunError

Listener = Callable[[dict[str, Any]], None]
"""Takes {"kind": "metrics", "step": int, "metrics": {...}} or {"kind": "warning" | "note", "text": str}."""


class Recorder:
    """Takes a run's metrics on rank 0. Without a file it only tells its listeners; other ranks have neither.

    Args:
        path: metrics.jsonl, one object a line: {"step": 45, "time": seconds, "train/loss": 0.7, ...}.
        listeners: must not raise, and must not wait.
    """

    def __init__(self, path: Path | None = None, *listeners: Listener) -> None:
        self._path, self._listeners = path, listeners
        self._file: TextIO | None = None

    def start(self, step: int) -> None:
        """Opens the file, without what a process recorded after `step` that died before it saved."""
        if self._path is None:
            return
        kept = [row for row in read_metrics(self._path) if row["step"] <= step]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        temporary.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Records metrics after so many steps.

        Raises:
            RunError: the file cannot be written.
        """
        if self._file is not None:
            try:
                self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **metrics}) + "\n")
            except OSError as error:
                raise RunError(f"cannot write {self._path}: {error}") from error
        self._tell({"kind": "metrics", "step": step, "metrics": metrics})

    def bad_images(self, split: str, images: Sequence[tuple[int, str, str]]) -> None:
        """Lists images that were left out, (number, name, reason), in bad_images.jsonl, each once in a run's life."""
        if self._path is None or not images:
            return
        path = self._path.with_name("bad_images.jsonl")
        known = {(row["split"], row["sample"]) for row in read_rows(path)}
        rows = [{"split": split, "sample": sample, "image": name, "reason": why} for sample, name, why in images]
        rows = [row for row in rows if (split, row["sample"]) not in known]
        try:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error}") from error
        if rows:
            more = f"; {len(rows) - 1} more in {path}" if len(rows) > 1 else f"; listed in {path}"
            self.warn(f"left out of the {split} images: {rows[0]['reason']}{more}")

    def warn(self, text: str) -> None:
        """Shows a warning to the user."""
        self._tell({"kind": "warning", "text": text})

    def note(self, text: str) -> None:
        """Shows what is being done to the user."""
        self._tell({"kind": "note", "text": text})

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _tell(self, event: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(event)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl."""
    return read_rows(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line, if there is one; a last line that was cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
