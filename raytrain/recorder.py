"""Where the loop's metrics go: first to the run directory, then to whoever else listens."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from raytrain.errors import RunError
from raytrain.storage import Storage, flush_path

METRICS = "metrics.jsonl"
BAD_IMAGES = "bad_images.jsonl"
EVENTS = "events.jsonl"

Listener = Callable[[dict[str, Any]], None]
"""Takes {"kind": "metrics", "step": int, "metrics": {...}, "row": {...}} or {"kind": "warning" | "note", "text": str}.
The row is what metrics.jsonl has of these metrics: those that it did not have before, and when they were recorded."""


class Lines:
    """A file of JSON objects, one a line, that grows. For one process.

    On a file system a row is there when `add` returns; in an object store, where nothing grows, when `flush` does.
    What cannot be written is kept and tried again with the next row.

    Args:
        folder: where it lies.
        name: of the file.
    """

    def __init__(self, folder: Storage, name: str) -> None:
        self._folder, self._name = folder, name
        self.rows = read_rows(folder, name)
        """All of them, those of earlier processes included."""
        self._lock, self._waiting = threading.Lock(), ""
        self._file: BinaryIO | None = None
        if not folder.is_remote and (path := folder.path / name).exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # without a line that a killed process did not finish

    def add(self, *rows: dict[str, Any]) -> str | None:
        """Adds rows. Returns what kept them from being written, or None."""
        with self._lock:
            self.rows += rows
            self._waiting += _text(rows)
            return self._write()

    def flush(self) -> None:
        """Brings all rows to the disk or to the store. Any thread may call.

        Raises:
            RunError: that cannot be done.
        """
        with self._lock:
            if self._folder.is_remote:
                if self._waiting:
                    self._folder.write(self._name, _text(self.rows).encode())
                    self._waiting = ""
            elif (fault := self._write()) is not None:
                raise RunError(fault)
            elif self._file is not None:
                os.fsync(self._file.fileno())
                flush_path(self._folder.path)

    def close(self) -> None:
        """Flushes, and takes no more.

        Raises:
            RunError: that cannot be done.
        """
        try:
            self.flush()
        finally:
            if self._file is not None:
                self._file.close()

    def _write(self) -> str | None:
        if self._folder.is_remote or not self._waiting:
            return None
        try:
            if self._file is None:
                self._file = (self._folder.path / self._name).open("ab", buffering=0)
            size, text = os.fstat(self._file.fileno()).st_size, self._waiting.encode()
            written = self._file.write(text)
            if written < len(text):
                self._file.truncate(size)  # half a line would be in the way of the next
                return f"cannot write {self._folder.where(self._name)}: {os.strerror(errno.ENOSPC)}"
        except OSError as error:
            return f"cannot write {self._folder.where(self._name)}: {error}"
        self._waiting = ""
        return None


class Recorder:
    """Takes a run's metrics on rank 0. Without a folder it only tells its listeners; other ranks have neither.

    A metric of a step is recorded once in a run's life. What is computed again, because a process died before it
    saved, is shown and not recorded: so this file and MLflow, where nothing can be taken back, have the same.

    Args:
        folder: the run directory. Its metrics.jsonl has one object a line: {"step": 45, "time": seconds, ...}.
        listeners: must not raise, and must not wait.
        guard: called before each `flush`; raises RunError where this process may write no more.
    """

    def __init__(
        self, folder: Storage | None = None, *listeners: Listener, guard: Callable[[], None] = lambda: None
    ) -> None:
        self._listeners, self._guard = listeners, guard
        self._metrics = Lines(folder, METRICS) if folder is not None else None
        self._bad_images = Lines(folder, BAD_IMAGES) if folder is not None else None
        rows = self._metrics.rows if self._metrics is not None else []
        self._recorded = {(key, row["step"]) for row in rows for key in row}
        self._failing = False

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Records metrics after so many steps. A file that cannot be written costs a warning."""
        new = {key: value for key, value in metrics.items() if (key, step) not in self._recorded}
        row = {"step": step, "time": round(time.time(), 3), **new}
        self._recorded.update((key, step) for key in new)
        if new and self._metrics is not None:
            fault = self._metrics.add(row)
            if fault is not None and not self._failing:
                self.warn(f"{fault}; training goes on, and it is tried again")
            self._failing = fault is not None
        self._tell({"kind": "metrics", "step": step, "metrics": metrics, "row": row})

    def bad_images(self, split: str, images: Sequence[tuple[int, str, str]]) -> None:
        """Lists images that were left out, (number, name, reason), in bad_images.jsonl, each once in a run's life."""
        if self._bad_images is None or not images:
            return
        known = {(row["split"], row["sample"]) for row in self._bad_images.rows}
        rows = [{"split": split, "sample": sample, "image": name, "reason": why} for sample, name, why in images]
        rows = [row for row in rows if (split, row["sample"]) not in known]
        if rows:
            fault = self._bad_images.add(*rows)
            listed = f"listed in {BAD_IMAGES} of the run directory" if fault is None else fault
            more = f"; {len(rows) - 1} more" if len(rows) > 1 else ""
            self.warn(f"left out of the {split} images: {rows[0]['reason']}{more}; {listed}")

    def warn(self, text: str) -> None:
        """Shows a warning to the user."""
        self._tell({"kind": "warning", "text": text})

    def note(self, text: str) -> None:
        """Shows what is being done to the user."""
        self._tell({"kind": "note", "text": text})

    def flush(self) -> None:
        """Brings to the disk or the store what was recorded. Another thread may call.

        Raises:
            RunError: that cannot be done.
        """
        self._guard()
        for lines in (self._metrics, self._bad_images):
            if lines is not None:
                lines.flush()

    def close(self) -> None:
        """Flushes, and takes no more.

        Raises:
            RunError: that cannot be done.
        """
        for lines in (self._metrics, self._bad_images):
            if lines is not None:
                lines.close()

    def _tell(self, event: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(event)


def read_metrics(folder: Storage) -> list[dict[str, float]]:
    """The rows of a run directory's metrics.jsonl."""
    return read_rows(folder, METRICS)


def read_rows(folder: Storage, name: str) -> list[dict[str, Any]]:
    """The objects of a file with one a line, if there is one; what is none, as a line that was cut, is left out."""
    rows = []
    text = folder.read(name).decode(errors="replace") if folder.exists(name) else ""
    for line in text.split("\n")[:-1]:  # what no line's end follows is none
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _text(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
