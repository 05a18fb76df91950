"""Parquet files of images: a binary column, or the struct of bytes and path that Hugging Face writes.

Row groups are read in slices, whatever their size, so that no file is too large for memory.
"""

import json
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from raytrain.data.origin import Origin, Sample, describe, fingerprint, split_files
from raytrain.errors import DataError
from raytrain.storage import Storage

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
        return self.storage.read(posixpath.join(posixpath.dirname(self.file), value["path"]))


def open_parquet(
    storage: Storage,
    split: str | None,
    image_column: str | None = None,
    label_column: str | None = None,
    known: tuple[str, ...] | None = None,
) -> Origin:
    """The Parquet files of one set.

    Args:
        storage: the dataset.
        split: "train" or "val"; None: all files.
        image_column: None: found from the schema.
        label_column: None: found from the schema.
        known: the classes that labels may have; None: any.

    Raises:
        DataError: no files, a file that is none, no such columns, files that do not agree, or a wrong label.
    """
    files = split_files(storage, split, (".parquet",))
    described: list[_File] = []
    groups: list[tuple[str, int, int, int]] = []
    for stored in files:
        with _open(storage, stored.name) as file:
            where = storage.where(stored.name)
            columns = _find_columns(file.schema_arrow, image_column, label_column, where)
            labels = file.read([columns.label], use_threads=False)[columns.label]
            described.append(_File(where, columns, _hugging_face_names(file.schema_arrow, columns.label), labels))
            first = 0
            for group in range(file.metadata.num_row_groups):
                about = file.metadata.row_group(group)
                size = sum(about.column(number).total_compressed_size for number in range(about.num_columns))
                groups.append((stored.name, group, first, size))
                first += about.num_rows
    if not any(len(file.labels) for file in described):
        raise DataError(f"{describe(storage, split)} has no rows")
    names = _class_names(described, known, leaves_none_out=split != "val")
    columns_of = {stored.name: file.columns for stored, file in zip(files, described, strict=True)}
    pieces = [
        ParquetPiece(storage, name, group, first, size, columns_of[name], names) for name, group, first, size in groups
    ]
    made_of = fingerprint("parquet", storage, files, names, *columns_of.values())
    return Origin(describe(storage, split), names, pieces, made_of)


class _File(NamedTuple):
    """What is known of a file before its images are read."""

    where: str
    columns: Columns
    names: tuple[str, ...] | None
    """Of the classes, where the file has them."""
    labels: pa.ChunkedArray


@contextmanager
def _open(storage: Storage, name: str) -> Iterator[parquet.ParquetFile]:
    """Opens a file for reading in slices: without pre-buffering, which would hold a whole row group."""
    try:
        with storage.open(name) as source:
            yield parquet.ParquetFile(source, pre_buffer=False, buffer_size=READ_BYTES)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {storage.where(name)} as Parquet: {error}") from error


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


def _class_names(files: list[_File], known: tuple[str, ...] | None, *, leaves_none_out: bool) -> tuple[str, ...]:
    """Checks every label, and tells what the classes are called.

    Raises:
        DataError: a label is null or none of the classes, or files differ; names file and row.
    """
    first = files[0]
    is_number = pa.types.is_integer(first.labels.type)
    for file in files:
        if pa.types.is_integer(file.labels.type) != is_number or file.names != first.names:
            raise DataError(
                f"{file.where} has other labels than {first.where}: {file.labels.type} named {file.names}, and "
                f"{first.labels.type} named {first.names}"
            )
        if file.labels.null_count:
            row = pc.index(file.labels.is_null(), True).as_py()
            raise DataError(f"{file.where} row {row}: the label is null; give it one or remove the row")
    present = sorted({label for file in files for label in file.labels.unique().to_pylist()})
    if not is_number:
        _check_labels(files, set(present) - set(known or present), f"classes: {known}")
        return tuple(present)
    if first.names is not None:
        names = first.names
    elif known is not None:
        names = known
    elif leaves_none_out:  # the classes are the numbers that occur
        names = tuple(str(number) for number in range(len(present)))
    else:
        names = tuple(str(number) for number in range(present[-1] + 1))
    wrong = {label for label in present if not 0 <= label < len(names) or (known and names[label] not in known)}
    _check_labels(files, wrong, f"{len(names)} classes, numbered 0 to {len(names) - 1}")
    return names


def _check_labels(files: list[_File], wrong: set[Any], classes: str) -> None:
    for file in files if wrong else ():
        for row, label in enumerate(file.labels.to_pylist()):
            if label in wrong:
                raise DataError(f"{file.where} row {row}: label {label!r} is out of range: there are {classes}")


def _hugging_face_names(schema: pa.Schema, column: str) -> tuple[str, ...] | None:
    """The names of a ClassLabel, which Hugging Face's datasets writes into the schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[column]["names"])
    except (KeyError, TypeError, ValueError):
        return None
