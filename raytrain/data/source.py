"""Which samples exist: what the config's source comes to.

Class names and their order come from the training set; the validation set is read in their terms. A folder on this
machine's file systems and Arrow shards there are read where they lie; everything else is brought into the node's cache
as Arrow shards first, once a node.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from raytrain import config
from raytrain.data.cache import Cache
from raytrain.data.digits import open_digits
from raytrain.data.folder import FolderSource, open_folder
from raytrain.data.origin import split_folder
from raytrain.data.parquet import open_parquet
from raytrain.data.shards import ArrowSource
from raytrain.data.webdataset import open_webdataset
from raytrain.errors import DataError
from raytrain.storage import Storage

Note = Callable[[str], None]


class Source(Protocol):
    """Samples by number. Safe to read from several threads at once; can be pickled, and used after a fork."""

    class_names: tuple[str, ...]
    labels: np.ndarray
    """int64 [N], each from 0 to len(class_names) - 1."""

    def prefetch(self, indices: np.ndarray) -> None:
        """Says which samples are read soon. Does not wait."""
        ...

    def read(self, index: int) -> memoryview | bytes | torch.Tensor:
        """The encoded image, or its pixels, uint8 [H, W, 3], where the source has them.

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


def open_sources(data: config.Data, note: Note = lambda _: None) -> Sources:
    """Opens what the config names, and checks all labels.

    Args:
        data: the config.
        note: is told what takes time.

    Raises:
        DataError: a path or a class is missing, a class is empty, a label is wrong, the sets do not agree, or the
            cache has no room.
    """
    cache = Cache(data.cache_path.expanduser(), data.cache_gib, note)
    if data.source == "digits":
        return Sources(cache.converted(open_digits("train")), cache.converted(open_digits("val")))
    if data.path is None:
        raise DataError(
            "data.path is not set; give the folder, or the s3:// or gs:// location, that holds train/ and val/"
        )
    storage = Storage(data.path)
    train = _open(storage, "train", data, cache, note, None)
    return Sources(train, _open(storage, "val", data, cache, note, train.class_names))


def is_read_in_place(data: config.Data) -> bool:
    """Whether opening the data brings next to nothing into the cache."""
    is_remote = data.path is not None and Storage(data.path).is_remote
    return data.source in ("digits", "folder", "arrow") and not is_remote


def _open(
    storage: Storage, split: str, data: config.Data, cache: Cache, note: Note, class_names: tuple[str, ...] | None
) -> Source:
    source = _open_form(storage, split, data, cache, note, class_names)
    if len(source.labels) == 0:
        raise DataError(f"{data.path} has no image in its {split} set")
    return source


def _open_form(
    storage: Storage, split: str, data: config.Data, cache: Cache, note: Note, class_names: tuple[str, ...] | None
) -> Source:
    if data.source == "parquet":
        return cache.converted(
            open_parquet(storage, split, data.image_column, data.label_column, class_names), class_names
        )
    if data.source == "webdataset":
        return cache.converted(open_webdataset(storage, split, class_names), class_names)
    folder = split_folder(storage, split)
    if data.source == "folder":
        if storage.is_remote:
            return cache.converted(open_folder(folder), class_names)
        return FolderSource(folder.path, data.cache_path.expanduser(), note, class_names)
    return cache.fetched(folder, class_names) if storage.is_remote else ArrowSource(folder.path, class_names)
