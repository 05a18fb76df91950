"""Folders of files, on this machine's file systems or in an object store, by one interface.

s3:// and gs:// go through pyarrow.fs, which takes credentials, region and endpoint from the environment
(AWS_ACCESS_KEY_ID, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL, ...) or from the location's own query
(s3://BUCKET/FOLDER?region=eu-west-1).
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import pyarrow as pa
from pyarrow import fs

from raytrain.errors import DataError

COPY_BYTES = 2**23


class StoredFile(NamedTuple):
    """A file as a listing has it."""

    name: str
    """Relative to the folder that was listed, with /."""
    size: int
    """Bytes."""
    mtime: int
    """Nanoseconds."""


class Storage:
    """A folder.

    Args:
        location: a path, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER, with a query where the store needs one.

    Raises:
        DataError: there is no such kind of store.
    """

    def __init__(self, location: str) -> None:
        self.is_remote = "://" in location
        if not self.is_remote:
            self._base, self._query = str(Path(location).expanduser().absolute()), ""
            self._fs, self._root = fs.LocalFileSystem(), self._base
            return
        base, mark, query = location.partition("?")
        self._base, self._query = base.rstrip("/"), mark + query
        with self._telling():
            self._fs, self._root = fs.FileSystem.from_uri(self._base + self._query)

    def __reduce__(self) -> tuple[type["Storage"], tuple[str]]:
        return Storage, (str(self),)

    def __str__(self) -> str:
        return self._base + self._query

    def __truediv__(self, name: str) -> "Storage":
        folder = copy(self)  # with the same connections
        folder._base, folder._root = f"{self._base}/{name}", f"{self._root}/{name}"
        return folder

    @property
    def path(self) -> Path:
        """Of a folder that is not remote."""
        assert not self.is_remote
        return Path(self._base)

    def where(self, name: str) -> str:
        """A file's full name, for messages."""
        return f"{self._base}/{name}"

    def list(self, *, recursive: bool = True) -> list[StoredFile]:
        """All files below, by name; hidden ones and what lies in hidden folders is left out.

        Raises:
            DataError: there is no such folder, or it cannot be listed.
        """
        with self._telling():
            infos = cast("list[fs.FileInfo]", self._fs.get_file_info(fs.FileSelector(self._root, recursive=recursive)))
        files = []
        for info in infos:
            name = info.path[len(self._root) :].lstrip("/")
            if info.type == fs.FileType.File and not any(part.startswith(".") for part in name.split("/")):
                files.append(StoredFile(name, info.size, info.mtime_ns or 0))
        return sorted(files)

    def is_folder(self) -> bool:
        """Whether there is such a folder."""
        with self._telling():
            return cast("fs.FileInfo", self._fs.get_file_info(self._root)).type == fs.FileType.Directory

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        with self._telling(name):
            return cast("fs.FileInfo", self._fs.get_file_info(self._path(name))).type == fs.FileType.File

    def open(self, name: str) -> pa.NativeFile:
        """Opens a file to be read at any place."""
        with self._telling(name):
            return self._fs.open_input_file(self._path(name))

    def stream(self, name: str) -> pa.NativeFile:
        """Opens a file to be read from its beginning."""
        with self._telling(name):
            return self._fs.open_input_stream(self._path(name), compression=None)

    def read(self, name: str) -> bytes:
        """A whole file.

        Raises:
            DataError: it cannot be read.
        """
        with self._telling(name), self._fs.open_input_stream(self._path(name), compression=None) as stream:
            return stream.read()

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file, which appears whole or not at all."""
        with self._telling(name):
            if self.is_remote:
                with self._fs.open_output_stream(self._path(name), compression=None) as stream:
                    stream.write(content)
                return
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            with temporary.open("wb") as file:
                file.write(content)
                flush(file)
            temporary.replace(path)

    def put(self, local: Path, name: str) -> None:
        """Moves a local file here, which appears whole or not at all.

        Raises:
            DataError: it cannot be written, or did not arrive whole.
        """
        with self._telling(name):
            if not self.is_remote:
                local.replace(self.path / name)
                return
            size = local.stat().st_size
            fs.copy_files(
                str(local), self._path(name), source_filesystem=fs.LocalFileSystem(), destination_filesystem=self._fs
            )
            arrived = cast("fs.FileInfo", self._fs.get_file_info(self._path(name))).size
            local.unlink()
        if arrived != size:
            raise DataError(f"{self.where(name)} has {arrived} of {size} bytes after its upload; try again")

    def fetch(self, name: str, local: Path, sha256: str) -> None:
        """Copies a file to this machine, which appears there whole or not at all.

        Raises:
            DataError: it cannot be read, or is not what its checksum says.
        """
        temporary = local.with_name(f".{local.name}.{os.getpid()}")
        digest = hashlib.sha256()
        with self._telling(name), self.stream(name) as stream, temporary.open("wb") as file:
            while block := stream.read(COPY_BYTES):
                digest.update(block)
                file.write(block)
            flush(file)
        if digest.hexdigest() != sha256:
            temporary.unlink()
            raise DataError(
                f"{self.where(name)} is not what its checksum says: it was cut short or changed; upload it again"
            )
        temporary.replace(local)

    def delete_folder(self, name: str) -> None:
        """Deletes a folder, if there is one."""
        with self._telling(name):
            if not self.is_remote:
                shutil.rmtree(self.path / name, ignore_errors=True)
            elif cast("fs.FileInfo", self._fs.get_file_info(self._path(name))).type == fs.FileType.Directory:
                self._fs.delete_dir(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _telling(self, name: str = "") -> Iterator[None]:
        where = self.where(name) if name else self._base
        try:
            yield
        except FileNotFoundError:
            raise DataError(f"there is no {where}") from None
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"cannot use {where}: {error}") from error


def flush(file: BinaryIO) -> None:
    """Brings a file to the disk, so that a name which is given to it later never stands for less."""
    file.flush()
    os.fsync(file.fileno())
