"""Parquet files of images: a binary column, or the struct of bytes and path that Hugging Face writes.

Row groups are read in slices, whatever their size, so that no file is too large for memory.
"""

import json
import posixpath
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from raytrain.data.origin import Origin, Sample, describe, fingerprint, split_files
from raytrain.data.storage import Storage
from raytrain.errors import DataError

SLICE_ROWS = 64
"""Rows in memory at once, unless they are large."""
SLICE_BYTES = 2**26
READ_BYTES = 2**20


class Columns(NamedTuple):
    """Which columns hold what."""

    image: str
    is_struct: bool
    label: str


class ParquetPiece(NamedTuple):
    """A row group."""

    storage: Storage
    file: str
    group: int
    first_row: int
    size: int
    columns: Columns
    class_names: tuple[str, ...] | None

    def samples(self) -> Iterator[Sample]:
        """Its rows."""
        index = {name: number for number, name in enumerate(self.class_names or ())}
        row = self.first_row
        with _open(self.storage, self.file) as file:
            rows = file.metadata.row_group(self.group).num_rows
            slice_rows = max(1, min(SLICE_ROWS, SLICE_BYTES * rows // max(1, self.size)))
            names = [self.columns.image, self.columns.label]
            for batch in file.iter_batches(slice_rows, row_groups=[self.group], columns=names, use_threads=False):
                images, labels = batch.column(0), batch.column(1)
                if batch.schema.names[0] != self.columns.image:
                    images, labels = labels, images
                for image, label in zip(images, labels.to_pylist(), strict=True):
                    number = index[label] if isinstance(label, str) else int(label)
                    yield Sample(self._image(image.as_py()), number, f"{self.file} row {row}")
                    row += 1

    def _image(self, value: Any) -> bytes:
        if not self.columns.is_struct:
            return value or b""
        if value is None or (value["bytes"] is None and not value.get("path")):
            return b""
        if value["bytes"] is not None:
            return value["bytes"]
        try:
            return self.storage.read(posixpath.join(posixpath.dirname(self.file), value["path"]))
        except DataError:
            return b""  # found bad, and named by its row, when it is decoded


def open_parquet(
    storage: Storage, split: str | None, image_column: str | None = None, label_column: str | None = None
) -> Origin:
    """The Parquet files of one set.

    Raises:
        DataError: no files, no such columns, or a wrong label.
    """
    files = split_files(storage, split, (".parquet",))
    with _open(storage, files[0].name) as file:
        schema = file.schema_arrow
    columns = _find_columns(schema, image_column, label_column, storage.where(files[0].name))
    groups: list[tuple[str, int, int, int]] = []
    labels: list[pa.ChunkedArray] = []
    for stored in files:
        with _open(storage, stored.name) as file:
            if missing := {columns.image, columns.label} - set(file.schema_arrow.names):
                raise DataError(f"{storage.where(stored.name)} has no column {', '.join(sorted(missing))}")
            labels.append(file.read([columns.label], use_threads=False)[columns.label])
            first = 0
            for group in range(file.metadata.num_row_groups):
                about = file.metadata.row_group(group)
                size = sum(about.column(number).total_compressed_size for number in range(about.num_columns))
                groups.append((stored.name, group, first, size))
                first += about.num_rows
    if not any(len(column) for column in labels):
        raise DataError(f"{describe(storage, split)} has no rows")
    names = _class_names(schema, columns, [storage.where(file.name) for file in files], labels, split)
    pieces = [ParquetPiece(storage, file, number, first, size, columns, names) for file, number, first, size in groups]
    return Origin(describe(storage, split), names, pieces, fingerprint("parquet", storage, files, columns))


class _open:  # noqa: N801 - used as a function
    """Opens a file for reading in slices: without pre-buffering, which would hold a whole row group."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._where = storage.where(name)
        self._source = storage.open(name)

    def __enter__(self) -> parquet.ParquetFile:
        return parquet.ParquetFile(self._source, pre_buffer=False, buffer_size=READ_BYTES)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._source.close()
        if isinstance(error, (OSError, pa.ArrowException)):
            raise DataError(f"cannot read {self._where}: {error}") from error


def _find_columns(schema: pa.Schema, image: str | None, label: str | None, where: str) -> Columns:
    """The columns that the config names, or the only ones of a fitting type, or of those the ones with usual names."""
    fitting = {
        "image": [field.name for field in schema if _is_image(field.type)],
        "label": [field.name for field in schema if _is_label(field.type)],
    }
    usual = {"image": ("image", "img", "jpg", "jpeg"), "label": ("label", "labels", "class", "cls", "target")}
    given = {"image": image, "label": label}
    chosen = {}
    for kind, names in fitting.items():
        known = [name for name in usual[kind] if name in names]
        if (name := given[kind]) is not None:
            if name not in names:
                raise DataError(f"data.{kind}_column: {where} has no {kind}s in a column {name}; {_list(schema)}")
            chosen[kind] = name
        elif len(names) == 1 or known:
            chosen[kind] = (known or names)[0]
        else:
            raise DataError(
                f"{where} has {'several columns that may hold' if names else 'no column of'} {kind}s; {_list(schema)}; "
                f"set data.{kind}_column"
            )
    is_struct = pa.types.is_struct(schema.field(chosen["image"]).type)
    return Columns(chosen["image"], is_struct, chosen["label"])


def _list(schema: pa.Schema) -> str:
    return "its columns are " + ", ".join(f"{field.name} ({field.type})" for field in schema)


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(kind.field(number).name == "bytes" for number in range(kind.num_fields))
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _is_label(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _class_names(
    schema: pa.Schema, columns: Columns, files: list[str], labels: list[pa.ChunkedArray], split: str | None
) -> tuple[str, ...]:
    """Checks every label, and tells what the classes are called.

    Raises:
        DataError: a label is null, negative or out of range; names file and row.
    """
    for where, column in zip(files, labels, strict=True):
        if column.null_count:
            row = pc.index(column.is_null(), True).as_py()
            raise DataError(f"{where} row {row}: the label is null; give it one or remove the row")
    kind = schema.field(columns.label).type
    if not pa.types.is_integer(kind):
        return tuple(sorted({name for column in labels for name in column.unique().to_pylist()}))
    names = _hugging_face_names(schema, columns.label)
    present = np.unique(np.concatenate([column.unique().to_numpy() for column in labels]).astype(np.int64))
    if names is not None:
        count = len(names)
    elif split == "val":
        count = int(present[-1]) + 1
    else:  # the classes are the numbers that occur, which leave none out
        count = len(present)
    wrong = present[(present < 0) | (present >= count)]
    for where, column in zip(files, labels, strict=True):
        rows = np.flatnonzero(np.isin(column.to_numpy(), wrong)).tolist()
        if rows:
            raise DataError(
                f"{where} row {rows[0]}: label {column[rows[0]].as_py()} is out of range: there are {count} "
                f"classes, numbered 0 to {count - 1}" + ("" if names else ", as many as there are different labels")
            )
    return names or tuple(str(number) for number in range(count))


def _hugging_face_names(schema: pa.Schema, column: str) -> tuple[str, ...] | None:
    """The names of a ClassLabel, which Hugging Face's datasets writes into the schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[column]["names"])
    except (KeyError, TypeError, ValueError):
        return None
