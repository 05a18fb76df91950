"""WebDataset's tar shards: files that share a name up to its first dot are one sample, KEY.jpg and KEY.cls.

KEY.cls holds the class's number, from 0; or, unless it is a number, its name in the dataset's classnames.txt, which has
a name a line.
"""

import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple, cast

from raytrain.data.origin import IMAGE_SUFFIXES, Origin, Sample, describe, fingerprint, split_files
from raytrain.errors import DataError
from raytrain.storage import Storage

CLASS_NAMES_FILE = "classnames.txt"


class TarPiece(NamedTuple):
    """A tar file."""

    storage: Storage
    file: str
    size: int
    class_names: tuple[str, ...] | None

    def samples(self) -> Iterator[Sample]:
        """Its samples; members of one sample follow each other."""
        where = self.storage.where(self.file)
        self._check_end(where)
        key, parts = "", dict[str, bytes]()
        with self.storage.stream(self.file) as stream:
            try:
                with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|*") as tar:
                    for member in tar:
                        folder, _, base = member.name.rpartition("/")
                        stem, _, suffix = base.partition(".")
                        is_part = f".{suffix.rpartition('.')[2].lower()}" in (*IMAGE_SUFFIXES, ".cls")
                        if is_part and ("." in suffix or member.islnk() or member.issym()):
                            raise DataError(
                                f"{where}: {member.name} is a link, or has more than one dot in its name; a sample is "
                                "KEY.jpg and KEY.cls, and KEY has no dot"
                            )
                        if not member.isfile() or base.startswith("."):
                            continue
                        if f"{folder}/{stem}" != key and parts:
                            yield from self._sample(key, parts)
                            parts = {}
                        key = f"{folder}/{stem}"
                        content = cast("IO[bytes]", tar.extractfile(member)).read()
                        if suffix.lower() in parts:
                            raise DataError(f"{where} has {member.name} twice")
                        parts[suffix.lower()] = content
                    if parts:
                        yield from self._sample(key, parts)
            except (tarfile.TarError, OSError, EOFError) as error:
                raise DataError(f"cannot read {where}: {error}; it was cut short or is damaged") from error

    def _check_end(self, where: str) -> None:
        """A tar that was cut between two members reads like a whole one, but for the zeros at its end."""
        if not self.file.endswith(".tar"):
            return
        with self.storage.open(self.file) as file:
            file.seek(max(0, file.size() - tarfile.BLOCKSIZE))
            if file.read().strip(b"\0") or file.size() == 0:
                raise DataError(f"{where} does not end as a tar file does: it was cut short; copy it again")

    def _sample(self, key: str, parts: dict[str, bytes]) -> Iterator[Sample]:
        name = f"{self.storage.where(self.file)} {key.lstrip('/')}"
        images = [suffix for suffix in parts if f".{suffix}" in IMAGE_SUFFIXES]
        if "cls" not in parts and not images:
            return  # what a tar may hold beside its samples
        if "cls" not in parts:
            raise DataError(f"{name} has no label: a sample is KEY.jpg (or .png, ...) and KEY.cls")
        if len(images) != 1:
            raise DataError(f"{name} has {'several images' if images else 'no image'}: {', '.join(sorted(parts))}")
        text = parts["cls"].decode("utf-8", "replace").strip()
        if text.isdecimal():
            label = int(text)
        elif self.class_names is not None and text in self.class_names:
            label = self.class_names.index(text)
        else:
            raise DataError(
                f"{name}: label {text!r} is no class's number"
                + (f", nor a name in {CLASS_NAMES_FILE}" if self.class_names else f"; list names in {CLASS_NAMES_FILE}")
            )
        if self.class_names is not None and label >= len(self.class_names):
            raise DataError(f"{name}: label {label} is out of range: there are {len(self.class_names)} classes")
        yield Sample(parts[images[0]], label, f"{self.file} {key.lstrip('/')}")


def open_webdataset(storage: Storage, split: str | None, known: tuple[str, ...] | None = None) -> Origin:
    """The tar files of one set. Labels are checked as they are read.

    Args:
        storage: the dataset.
        split: "train" or "val"; None: all files.
        known: the classes, where the dataset does not name them; None: any.

    Raises:
        DataError: no files.
    """
    files = split_files(storage, split, (".tar", ".tar.gz", ".tgz"))
    names = known
    if storage.exists(CLASS_NAMES_FILE):
        try:
            names = tuple(
                name.strip() for name in storage.read(CLASS_NAMES_FILE).decode("utf-8-sig").strip().split("\n")
            )
        except UnicodeDecodeError as error:
            raise DataError(f"cannot read {storage.where(CLASS_NAMES_FILE)}: {error}; save it as UTF-8") from error
    pieces = [TarPiece(storage, file.name, file.size, names) for file in files]
    made_of = fingerprint("webdataset", storage, files, names)
    return Origin(describe(storage, split), names, pieces, made_of, leaves_none_out=split != "val")
