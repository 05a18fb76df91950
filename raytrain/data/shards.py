"""The form in which images are read fastest: Arrow IPC shards, mapped into memory, and a dataset.json beside them.

FOLDER/
    dataset.json             class names, counts, and each shard's rows, bytes and SHA-256; written last
    shard-00000-00.arrow     columns image (binary), label (int64), name (string); with pixels also height, width

A row's bytes are read in place: no row is copied, no index of rows is kept. Each record batch has the number of its
rows and the SHA-256 of its image bytes in its metadata, so that a damaged place can be found.
"""

import errno
import hashlib
import json
import mmap
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from raytrain.data.origin import Origin, Sample, renumbered
from raytrain.errors import DataError
from raytrain.storage import COPY_BYTES, Storage, flush

FORMAT = 1
BATCH_BYTES = 2**26
BATCH_ROWS = 2**14
DATASET_FILE = "dataset.json"


@dataclass(frozen=True)
class Shard:
    """A file of rows."""

    name: str
    rows: int
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Dataset:
    """What dataset.json says of one set."""

    class_names: list[str]
    images: int
    images_per_class: list[int]
    pixels: bool
    """Whether rows hold pixels, uint8 [height, width, 3], and not encoded images."""
    shards: list[Shard]
    bad: list[dict[str, str]] = field(default_factory=list)
    """Images left out: {"name", "reason"}."""
    bytes_in: int = 0
    """Of the images as they came."""
    bytes_out: int = 0
    """Of the images as they are stored."""
    made_from: str = ""
    """Fingerprint of files and settings."""

    def to_json(self) -> bytes:
        """The content of dataset.json; the same for the same dataset."""
        return (json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n").encode()

    @staticmethod
    def from_json(content: bytes, where: str) -> "Dataset":
        """Reads dataset.json.

        Raises:
            DataError: it is none.
        """
        try:
            values = json.loads(content)
            if values.pop("format") != FORMAT:
                raise DataError(f"{where} is of another version; prepare the data anew")
            return Dataset(**{**values, "shards": [Shard(**shard) for shard in values["shards"]]})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"cannot read {where}: {error!r}; prepare the data anew") from error


class ArrowSource:
    """The samples of a set of shards on this machine's file systems. Holds a view of each, and reads in place.

    Args:
        folder: holds dataset.json.
        class_names: the classes that labels refer to; None: the dataset's own.
        keep: is kept as long as this is.

    Raises:
        DataError: not a whole dataset, or a label that is none of its classes.
    """

    def __init__(self, folder: Path, class_names: tuple[str, ...] | None = None, keep: object = None) -> None:
        self._folder, self._keep = folder, keep
        about = read_dataset(folder)
        self.class_names = class_names or tuple(about.class_names)
        self._pixels = about.pixels
        self._batches: list[pa.RecordBatch] = []
        self._offsets: list[np.ndarray] = []
        self._images: list[memoryview] = []
        self._mapped: list[tuple[mmap.mmap, int]] = []  # a batch's file, and where in it the images begin
        self._starts: list[int] = []
        self._places: list[tuple[str, int]] = []  # shard, and the first row in it
        labels: list[np.ndarray] = []
        rows = 0
        for shard in about.shards:
            path = folder / shard.name
            try:
                if path.stat().st_size != shard.size:
                    raise DataError(
                        f"{path} has {path.stat().st_size} bytes, and {DATASET_FILE} says {shard.size}: it was cut "
                        "short or replaced; copy it again or prepare the data anew"
                    )
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                buffer = pa.py_buffer(mapped)
                reader = pa.ipc.open_file(pa.BufferReader(buffer))
                first = rows
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    self._places.append((shard.name, rows - first))
                    self._starts.append(rows)
                    _, offsets, data = batch.column("image").buffers()
                    self._batches.append(batch)
                    self._offsets.append(np.frombuffer(offsets, np.int32))
                    self._images.append(memoryview(data).cast("B"))  # as it comes its bytes are signed
                    self._mapped.append((mapped, data.address - buffer.address))
                    labels.append(_labels(batch, len(about.class_names), f"{path} row", rows - first))
                    rows += batch.num_rows
            except (OSError, ValueError, KeyError, TypeError) as error:
                if isinstance(error, OSError) and error.errno == errno.EMFILE:
                    raise DataError(f"cannot open {path}: more files are open than `ulimit -n` allows") from error
                raise DataError(f"cannot read {path}: {error}; copy it again or prepare the data anew") from error
            if rows - first != shard.rows:
                raise DataError(f"{path} has {rows - first} rows, and {DATASET_FILE} says {shard.rows}")
        own = np.concatenate([np.empty(0, np.int64), *labels])
        self.labels = renumbered(own, tuple(about.class_names), self.class_names, str(folder))

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrowSource, (self._folder, self.class_names)

    def prefetch(self, indices: np.ndarray) -> None:
        """Has the rows brought into memory, and does not wait.

        Whoever reads a page that is not there stops all of Python's threads until it comes.
        """
        for index in indices.tolist():
            number = bisect_right(self._starts, index) - 1
            row = index - self._starts[number]
            start, stop = self._offsets[number][row : row + 2].tolist()
            mapped, at = self._mapped[number]
            page = (at + start) // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start:
                mapped.madvise(mmap.MADV_WILLNEED, page, at + stop - page)

    def read(self, index: int) -> memoryview | torch.Tensor:
        """The row's bytes in place: an encoded image, or pixels, uint8 [H, W, 3]."""
        number = bisect_right(self._starts, index) - 1
        row = index - self._starts[number]
        start, stop = self._offsets[number][row : row + 2].tolist()
        if not self._pixels:
            return self._images[number][start:stop]
        batch = self._batches[number]
        data = batch.column("image").buffers()[2].slice(start, stop - start)
        values = pa.UInt8Array.from_buffers(pa.uint8(), stop - start, [None, data])  # numpy's way would warn: read-only
        return torch.from_dlpack(values).view(batch.column("height")[row].as_py(), -1, 3)

    def name(self, index: int) -> str:
        """Shard and row, and what the row was made from."""
        number = bisect_right(self._starts, index) - 1
        row = index - self._starts[number]
        shard, first = self._places[number]
        return f"{self._folder / shard} row {first + row} (from {self._batches[number].column('name')[row].as_py()})"


def read_dataset(folder: Path) -> Dataset:
    """What a folder of shards holds.

    Raises:
        DataError: nothing, or not all of it yet.
    """
    path = folder / DATASET_FILE
    if not path.is_file():
        raise DataError(
            f"no {path}, which `python -m raytrain.prepare` writes when all shards of a set are whole: run it to its "
            "end, or set data.source to what lies there: folder, parquet or webdataset"
        )
    return Dataset.from_json(path.read_bytes(), str(path))


def _labels(batch: pa.RecordBatch, num_classes: int, where: str, first: int) -> np.ndarray:
    column = batch.column("label")
    labels = column.fill_null(-1).to_numpy().astype(np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise DataError(
            f"{where} {first + wrong[0]}: label {column[int(wrong[0])].as_py()} is out of range: there are "
            f"{num_classes} classes, numbered 0 to {num_classes - 1}"
        )
    return labels


class ArrowPiece(NamedTuple):
    """A shard, to be made into others."""

    storage: Storage
    file: str
    size: int

    def samples(self) -> Iterator[Sample]:
        """Its rows."""
        where = self.storage.where(self.file)
        try:
            with self.storage.open(self.file) as file:
                reader = pa.ipc.open_file(file)
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    for row in zip(*(batch.column(name) for name in ("image", "label", "name")), strict=True):
                        yield Sample(*(value.as_py() for value in row))
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise DataError(f"cannot read {where}: {error}; it was cut short or is damaged") from error


def open_shards(storage: Storage) -> Origin:
    """A set of shards that hold encoded images, local or remote, to be made into others.

    Raises:
        DataError: not such a dataset.
    """
    content = storage.read(DATASET_FILE)
    dataset = Dataset.from_json(content, storage.where(DATASET_FILE))
    if dataset.pixels:
        raise DataError(f"{storage} holds pixels; prepare from the images that it was made from")
    pieces = [ArrowPiece(storage, shard.name, shard.size) for shard in dataset.shards]
    return Origin(str(storage), tuple(dataset.class_names), pieces, hashlib.sha256(content).hexdigest())


class ShardWriter:
    """Writes one shard under a temporary name. The same rows give the same bytes.

    Args:
        path: of the temporary file.
        class_names: for the schema's metadata; None where they are not known yet.
        pixels: whether rows hold pixels.
    """

    def __init__(self, path: Path, class_names: tuple[str, ...] | None, *, pixels: bool) -> None:
        fields = [("image", pa.binary()), ("label", pa.int64()), ("name", pa.string())]
        fields += [("height", pa.int32()), ("width", pa.int32())] if pixels else []
        about = {"format": FORMAT, "class_names": class_names, "pixels": pixels}
        self._schema = pa.schema(fields, {"raytrain": json.dumps(about)})
        self._columns: list[list[Any]] = [[] for _ in fields]
        self.rows = self.size = self._waiting = 0
        self._path = path
        self._writer = pa.ipc.new_file(str(path), self._schema)

    def add(self, row: tuple[Any, ...]) -> None:
        """Takes a row: image, label, name, and with pixels height and width."""
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)
        self.rows += 1
        self.size += len(row[0])
        self._waiting += len(row[0])
        if self._waiting >= BATCH_BYTES or len(self._columns[0]) >= BATCH_ROWS:
            self._write_batch()

    def close(self, name: str) -> Shard:
        """Brings all to the disk, and tells what the file is."""
        self._write_batch()
        self._writer.close()
        digest = hashlib.sha256()
        with self._path.open("r+b") as file:
            flush(file)
            while block := file.read(COPY_BYTES):
                digest.update(block)
        return Shard(name, self.rows, self._path.stat().st_size, digest.hexdigest())

    def _write_batch(self) -> None:
        if not self._columns[0]:
            return
        batch = pa.record_batch(self._columns, schema=self._schema)
        digest = hashlib.sha256(batch.column("image").buffers()[2]).hexdigest()
        self._writer.write_batch(batch, {"rows": str(batch.num_rows), "sha256": digest})
        self._columns = [[] for _ in self._columns]
        self._waiting = 0
