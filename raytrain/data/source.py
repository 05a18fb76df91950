"""Which samples exist: a folder of images, or an Arrow file.

Class names and their order come from the training set; the validation set is read in their terms.
"""

import errno
import io
import os
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from raytrain import config
from raytrain.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class Source(Protocol):
    """Samples by number. Safe to read from several threads at once."""

    class_names: tuple[str, ...]
    labels: np.ndarray
    """int64 [N], each from 0 to len(class_names) - 1."""

    def read(self, index: int) -> memoryview | bytes:
        """The encoded image.

        Raises:
            DataError: it cannot be read; names the file.
        """
        ...

    def name(self, index: int) -> str:
        """Where a sample comes from, for messages."""
        ...


class Sources(NamedTuple):
    """The two sets of a run, with one list of class names."""

    train: Source
    val: Source


def open_sources(data: config.Data) -> Sources:
    """Opens what the config names, and checks all labels.

    Raises:
        DataError: a path or a class is missing, a class is empty, or the sets do not agree.
    """
    if data.source == "digits":
        train, val = (_open_digits(data.cache_path.expanduser(), split) for split in ("train", "val"))
    else:
        if data.path is None:
            raise DataError("data.path is not set; give the folder that holds train/ and val/")
        root = data.path.expanduser()
        train = FolderSource(root / "train")
        val = FolderSource(root / "val", train.class_names)
    return Sources(train, val)


class FolderSource:
    """`root/CLASS/*` with any of JPEG, PNG, BMP, WebP. Hidden files and folders are passed over.

    Args:
        root: the folder of class folders.
        class_names: the classes that labels refer to; None: the folders found, sorted by name.

    Raises:
        DataError: no such folder, a class without images, or a class that class_names lacks.
    """

    def __init__(self, root: Path, class_names: tuple[str, ...] | None = None) -> None:
        if not root.is_dir():
            raise DataError(f"no folder {root}; a dataset is train/CLASS/* and val/CLASS/* under data.path")
        folders = sorted(entry.name for entry in _list(root) if entry.is_dir())
        if not folders:
            raise DataError(f"{root} has no class folders; images lie in {root}/CLASS/")
        if class_names is not None and (unknown := sorted(set(folders) - set(class_names))):
            raise DataError(f"{root} has classes that the training set lacks: {', '.join(unknown)}")
        self.class_names = class_names or tuple(folders)
        index_of = {name: index for index, name in enumerate(self.class_names)}
        self._root = root
        self._files: list[str] = []
        labels: list[int] = []
        for folder in folders:
            files = sorted(
                f"{folder}/{entry.name}"
                for entry in _list(root / folder)
                if entry.name.lower().endswith(IMAGE_SUFFIXES) and entry.is_file()
            )
            if not files:
                raise DataError(
                    f"class folder {root / folder} has no images ({', '.join(IMAGE_SUFFIXES)}); fill it or remove it"
                )
            self._files += files
            labels += [index_of[folder]] * len(files)
        self.labels = np.array(labels, dtype=np.int64)

    def read(self, index: int) -> bytes:
        """The file's bytes."""
        path = self._root / self._files[index]
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read image {path}: {os.strerror(error.errno or errno.EIO)}") from error

    def name(self, index: int) -> str:
        """The file's path."""
        return str(self._root / self._files[index])


class ArrowSource:
    """An Arrow IPC file of encoded images, memory-mapped: columns `image` (binary) and `label` (int64).

    Raises:
        DataError: not readable, or not such a file.
    """

    def __init__(self, path: Path) -> None:
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all().combine_chunks()
            self._images = table["image"].chunk(0)
            self.labels = table["label"].to_numpy().astype(np.int64)
            self.class_names = tuple(table.schema.metadata[b"class_names"].decode().split("\n"))
        except (OSError, KeyError, TypeError, pa.ArrowInvalid) as error:
            raise DataError(f"cannot read {path} as an Arrow file of images: {error}") from error
        self._path = path

    def read(self, index: int) -> memoryview:
        """The row's bytes, in place."""
        return memoryview(self._images[index].as_buffer())

    def name(self, index: int) -> str:
        """File and row."""
        return f"{self._path} row {index}"


def _list(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"cannot list {folder}: {os.strerror(error.errno or errno.EIO)}") from error


def _open_digits(cache: Path, split: str) -> ArrowSource:
    """scikit-learn's scans of handwritten digits, as 8x8 grey PNG. Every fifth of them is for validation."""
    path = cache / f"digits-1-{split}.arrow"
    if not path.exists():
        try:
            _write_digits(path, split)
        except OSError as error:
            raise DataError(
                f"cannot write {path}: {error}; set data.cache_path to a folder that can be written"
            ) from error
    return ArrowSource(path)


def _write_digits(path: Path, split: str) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    held_out = np.arange(len(labels)) % 5 == 4
    rows = np.flatnonzero(held_out if split == "val" else ~held_out)
    images = []
    for scan in scans[rows]:
        png = io.BytesIO()
        Image.fromarray((scan.reshape(8, 8) * (255 / 16)).round().astype(np.uint8)).save(png, "png")
        images.append(png.getvalue())
    table = pa.table({"image": pa.array(images, pa.binary()), "label": pa.array(labels[rows], pa.int64())})
    table = table.replace_schema_metadata({"class_names": "\n".join(str(digit) for digit in range(10))})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")  # several workers may come first; each replaces by the same
    with pa.ipc.new_file(str(temporary), table.schema) as writer:
        writer.write_table(table)
    temporary.replace(path)
