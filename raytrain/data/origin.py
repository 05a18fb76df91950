"""What is made into shards: pieces of a dataset in the order of its samples, in whatever form it comes."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from raytrain.errors import DataError
from raytrain.storage import Storage, StoredFile

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation")}
"""Words in a file's or a folder's name that tell which set it belongs to."""


class Sample(NamedTuple):
    """One image, as it was found."""

    image: bytes
    """Encoded; empty where there is none."""
    label: int
    """The class's number; of a set without class names any number."""
    name: str
    """File, or file and row, relative to the dataset."""


class Piece(Protocol):
    """A part of a dataset that is read in one go; can be pickled."""

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        ...

    def samples(self) -> Iterator[Sample]:
        """Its samples, in order, never many in memory at once.

        Raises:
            DataError: it cannot be read, or a label is wrong; names file and row.
        """
        ...


class Origin(NamedTuple):
    """One set, to be read piece by piece."""

    where: str
    """For messages."""
    class_names: tuple[str, ...] | None
    """None: labels are numbers, and the classes are those that occur."""
    pieces: Sequence[Piece]
    fingerprint: str
    """Another one where files have changed."""
    remark: str = ""
    """What a user should know of it."""
    leaves_none_out: bool = False
    """Without class names: whether the labels that occur must be 0, 1, 2, ... without a gap, as a training set's."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(piece.size for piece in self.pieces)


def fingerprint(form: str, where: object, files: Sequence[StoredFile], *details: object) -> str:
    """A name for the content of files, as far as names, sizes and times tell."""
    text = json.dumps([form, str(where), [list(file) for file in files], [str(detail) for detail in details]])
    return hashlib.sha256(text.encode()).hexdigest()


def describe(storage: Storage, split: str | None) -> str:
    """A set's name, for messages."""
    return f"the {split} set of {storage}" if split else str(storage)


def split_files(storage: Storage, split: str | None, suffixes: tuple[str, ...]) -> list[StoredFile]:
    """The files of one set: path/train/*, path/data/train-00000.parquet, path/imagenet-train-0000.tar and the like.

    Args:
        storage: the dataset.
        split: "train" or "val"; None: all files.
        suffixes: of the files' names.

    Raises:
        DataError: there are none.
    """
    files = [file for file in storage.list() if file.name.lower().endswith(suffixes)]
    if split is not None and (others := [file.name for file in files if split_of(file.name) is None]):
        raise DataError(
            f"{storage.where(others[0])} belongs to no set ({len(others)} such file(s)); have train or val as a word "
            "in its name or its folder's, or take it away"
        )
    found = [file for file in files if split is None or split_of(file.name) == split]
    if not found:
        words = " or ".join(SPLITS[split]) if split else ""
        raise DataError(
            f"{storage} has no {' or '.join(suffixes)} files"
            + (f" of the set {split}: they lie in a folder {words}, or have that word in their names" if split else "")
        )
    return found


def split_of(name: str) -> str | None:
    """The set that a file belongs to: "train", "val", "test" or None.

    A folder that is called so decides; then a word in the file's name, then one in a folder's.
    """
    *folders, file = name.lower().split("/")
    words = [{folder} for folder in folders]
    words += [set(re.split(r"[^a-z]+", part)) for part in (file, *reversed(folders))]
    for some in words:
        for split, known in {**SPLITS, "test": ("test", "testing")}.items():
            if some.intersection(known):
                return split
    return None


def renumbered(labels: np.ndarray, own: tuple[str, ...], wanted: tuple[str, ...], where: str) -> np.ndarray:
    """Labels that number one list of classes as numbers of another.

    Raises:
        DataError: a class that has images is missing in the other list.
    """
    if own == wanted:
        return labels
    for names in (own, wanted):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{where}: two classes are called {twice}, and the sets list their classes differently")
    present = np.unique(labels)
    if unknown := sorted({own[label] for label in present} - set(wanted)):
        raise DataError(f"{where} has classes that the training set lacks: {', '.join(unknown)}")
    index = {name: number for number, name in enumerate(wanted)}
    return np.array([index.get(name, -1) for name in own], np.int64)[labels]


def split_folder(storage: Storage, split: str) -> Storage:
    """The folder of one set where each has its own: path/train, or path/val or path/validation."""
    folders = [storage / name for name in SPLITS[split]]
    return next((folder for folder in folders if folder.is_folder()), folders[0])
