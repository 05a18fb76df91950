"""A folder of class folders: `ROOT/CLASS/**`, with any of the image formats in any mixture.

Hidden files and folders are passed over, as is what does not have an image's suffix. A listing is kept in the node's
cache, with the times of all folders in it: a folder's time changes when a file in it comes or goes.
"""

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raytrain.data.origin import IMAGE_SUFFIXES, Origin, Sample, fingerprint, renumbered
from raytrain.errors import DataError
from raytrain.storage import Storage, StoredFile

PIECE_BYTES = 2**24
SETTLED_SECONDS = 2.0
"""A folder that has changed so shortly before it was listed may change again with the same time."""


class Listing(NamedTuple):
    """What a folder of class folders holds."""

    class_names: tuple[str, ...]
    files: pa.StringArray
    """Relative to the root, sorted, class by class."""
    labels: np.ndarray
    """int64 [N]."""
    remark: str
    """On files that are none of the known formats."""


class FolderSource:
    """The images of a folder of class folders on this machine's file systems.

    Args:
        root: the folder of class folders.
        cache: where listings are kept.
        note: is told of files that are passed over.
        class_names: the classes that labels refer to; None: the folders found, sorted by name.

    Raises:
        DataError: no such folder, a class without images, a class that class_names lacks, or a cache that cannot be
            written.
    """

    def __init__(
        self, root: Path, cache: Path, note: Callable[[str], None], class_names: tuple[str, ...] | None = None
    ) -> None:
        listing = _listed(root, cache)
        if listing.remark:
            note(listing.remark)
        self.class_names = class_names or listing.class_names
        self.labels = renumbered(listing.labels, listing.class_names, self.class_names, str(root))
        self._root, self._files = root, listing.files

    def prefetch(self, indices: np.ndarray) -> None:
        """Nothing: threads that wait for a file do not keep the others from their work."""

    def read(self, index: int) -> bytes:
        """The file's bytes."""
        path = f"{self._root}/{self._files[index].as_py()}"
        try:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a Path costs as much again
                return file.read()
        except OSError as error:
            raise DataError(f"cannot read image {path}: {os.strerror(error.errno or errno.EIO)}") from error

    def name(self, index: int) -> str:
        """The file's path."""
        return str(self._root / self._files[index].as_py())


class FolderPiece(NamedTuple):
    """Some files of a folder, local or remote."""

    storage: Storage
    files: list[str]
    labels: list[int]
    size: int

    def samples(self) -> Iterator[Sample]:
        """The files in order."""
        for file, label in zip(self.files, self.labels, strict=True):
            yield Sample(self.storage.read(file), label, file)


def open_folder(storage: Storage) -> Origin:
    """A folder of class folders, local or remote, to be made into shards.

    Raises:
        DataError: no class folders, or one without images.
    """
    remark = ""
    if storage.is_remote:
        files = [file for file in storage.list() if _is_image(file.name) and "/" in file.name]
        class_names = tuple(sorted({file.name.split("/", 1)[0] for file in files}))
        _check_classes(str(storage), list(class_names), set(class_names))
    else:
        listing = _list_folder(storage.path, {})
        class_names, remark = listing.class_names, listing.remark
        about = [(name, os.stat(storage.path / name)) for name in listing.files.to_pylist()]  # noqa: PTH116
        files = [StoredFile(name, stat.st_size, stat.st_mtime_ns) for name, stat in about]
    index = {name: number for number, name in enumerate(class_names)}
    files.sort(key=lambda file: (index[file.name.split("/", 1)[0]], file.name))
    pieces, start, size = [], 0, 0
    for number, file in enumerate(files, 1):
        size += file.size
        if size >= PIECE_BYTES or number == len(files):
            names = [file.name for file in files[start:number]]
            pieces.append(FolderPiece(storage, names, [index[name.split("/", 1)[0]] for name in names], size))
            start, size = number, 0
    return Origin(str(storage), class_names, pieces, fingerprint("folder", storage, files), remark)


def _listed(root: Path, cache: Path) -> Listing:
    """The listing of a folder, from the cache if nothing has changed since."""
    path = cache / "listings" / f"{hashlib.sha256(str(root).encode()).hexdigest()[:16]}.arrow"
    if (listing := _read_listing(path, root)) is not None:
        return listing
    folders: dict[str, list[int]] = {}
    started = time.time_ns()
    listing = _list_folder(root, folders)
    table = pa.table({"file": listing.files, "label": pa.array(listing.labels, pa.int64())})
    about = {"class_names": listing.class_names, "remark": listing.remark, "folders": folders, "started": started}
    _write_listing(path, table.replace_schema_metadata({"listing": json.dumps(about)}))
    return listing


def _list_folder(root: Path, folders: dict[str, list[int]]) -> Listing:
    """Lists a folder. Notes in `folders` what shows whether one of them has changed, before it is read."""
    if not root.is_dir():
        raise DataError(f"no folder {root}; a dataset is train/CLASS/* and val/CLASS/* under data.path")
    folders[""] = _state(root)
    names = sorted(entry.name for entry in _scan(root) if _is_dir(entry))
    files: list[str] = []
    others: list[str] = []
    counts = []
    for name in names:
        own = sorted(_walk(root, name, folders, others))
        files += own
        counts.append(len(own))
    _check_classes(str(root), names, {name for name, count in zip(names, counts, strict=True) if count})
    try:
        column = pa.array(files, pa.string())
    except UnicodeEncodeError as error:
        raise DataError(f"the name of {root}/{error.object!r} is not UTF-8; rename it") from None
    remark = f"{len(others):,} file(s) in {root} are no images by their names, such as {others[0]}" if others else ""
    return Listing(tuple(names), column, np.repeat(np.arange(len(names)), counts), remark)


def _read_listing(path: Path, root: Path) -> Listing | None:
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all().combine_chunks()
        about = json.loads(table.schema.metadata[b"listing"])
        settled = about["started"] - SETTLED_SECONDS * 1e9
        fresh = all(
            _state(f"{root}/{folder}") == state and state[0] < settled for folder, state in about["folders"].items()
        )
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowInvalid):  # none, or one of another version
        return None
    if not fresh:
        return None
    return Listing(tuple(about["class_names"]), table["file"].chunk(0), table["label"].to_numpy(), about["remark"])


def _write_listing(path: Path, table: pa.Table) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")  # several workers may come first; each replaces by the same
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.ipc.new_file(str(temporary), table.schema) as writer:
            writer.write_table(table)
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error}; set data.cache_path to a folder that can be written") from error


def _walk(root: Path, folder: str, folders: dict[str, list[int]], others: list[str]) -> Iterator[str]:
    """The images below a folder, relative to the root; other files go to `others`."""
    folders[folder] = _state(root / folder)
    for entry in _scan(root / folder):
        name = f"{folder}/{entry.name}"
        if _is_dir(entry):
            if folder.count("/") > 32:
                raise DataError(f"{root / name} lies too deep; does a link lead back to where it comes from?")
            yield from _walk(root, name, folders, others)
        elif _is_image(name):
            yield name
        else:
            others.append(name)


def _state(folder: Path | str) -> list[int]:
    """Times of the last changes, and which folder it is."""
    stat = os.stat(folder)  # noqa: PTH116 - a Path costs as much again
    return [stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _is_dir(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir():
        return True
    if entry.is_symlink() and not entry.is_file():
        raise DataError(f"{entry.path} is a link to nothing; mend it or remove it")
    return False


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"cannot list {folder}: {os.strerror(error.errno or errno.EIO)}") from error


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _check_classes(where: str, folders: list[str], filled: set[str]) -> None:
    if not folders:
        if Path(where, "dataset.json").exists():
            raise DataError(f"{where} holds prepared shards; set data.source=arrow")
        raise DataError(f"{where} has no class folders; images lie in {where}/CLASS/")
    if empty := sorted(set(folders) - filled):
        raise DataError(
            f"class folder {where}/{empty[0]} has no images ({', '.join(IMAGE_SUFFIXES)}); fill it or remove it"
        )
