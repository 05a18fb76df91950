"""Folders of files, on this machine's file systems or in an object store, by one interface.

s3:// and gs:// go through pyarrow.fs, which takes credentials, region and endpoint from the environment
(AWS_ACCESS_KEY_ID, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL, ...) or from the location's own query
(s3://BUCKET/FOLDER?region=eu-west-1).
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import pyarrow as pa
from pyarrow import fs

from raytrain.errors import DataError, UserError

COPY_BYTES = 2**23
TEMPORARY = ".writing-"
"""How the name of what is not finished begins; `delete_unfinished` deletes such folders."""


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
        error: the kind that is raised where something cannot be read or written.

    Raises:
        DataError, or the other kind given: there is no such kind of store.
    """

    def __init__(self, location: str | Path, error: type[UserError] = DataError) -> None:
        location = str(location)
        self.is_remote, self._error = "://" in location, error
        if not self.is_remote:
            self._base, self._query = str(Path(location).expanduser().absolute()), ""
            self._fs, self._root = fs.LocalFileSystem(), self._base
            return
        base, mark, query = location.partition("?")
        self._base, self._query = base.rstrip("/"), mark + query
        with self._telling():
            self._fs, self._root = fs.FileSystem.from_uri(self._base + self._query)

    def __reduce__(self) -> tuple[type["Storage"], tuple[str, type[UserError]]]:
        return Storage, (str(self), self._error)

    def __str__(self) -> str:
        return self._base + self._query

    def __fspath__(self) -> str:
        return str(self.path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> "Storage":
        folder = copy(self)  # with the same connections
        folder._base, folder._root = f"{self._base}/{name}", f"{self._root}/{name}"
        return folder

    @property
    def name(self) -> str:
        """Its own, without what it lies in."""
        return self._base.rsplit("/", 1)[-1]

    @property
    def path(self) -> Path:
        """Of a folder that is not remote."""
        assert not self.is_remote
        return Path(self._base)

    def where(self, name: str) -> str:
        """A file's full name, for messages."""
        return f"{self._base}/{name}"

    def folders(self) -> list[str]:
        """Names of the folders right below, hidden ones too; none where there is no such folder."""
        with self._telling():
            selector = fs.FileSelector(self._root, allow_not_found=True)
            infos = cast("list[fs.FileInfo]", self._fs.get_file_info(selector))
        return sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)

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

    def mtime(self, name: str) -> int | None:
        """When a file was last changed, nanoseconds since 1970; None where there is none."""
        with self._telling(name):
            info = cast("fs.FileInfo", self._fs.get_file_info(self._path(name)))
            return info.mtime_ns if info.type == fs.FileType.File else None

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
            self._upload(local, name)
            local.unlink()

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
            raise self._error(
                f"{self.where(name)} is not what its checksum says: it was cut short or changed; upload it again"
            )
        temporary.replace(local)

    def fetch_folder(self, local: Path) -> Path:
        """Copies the whole folder into one of this machine, under its name. Returns that."""
        copy = local / self.name
        for file in self.list():
            (copy / file.name).parent.mkdir(parents=True, exist_ok=True)
            (copy / file.name).write_bytes(self.read(file.name))
        return copy

    def delete(self, name: str) -> None:
        """Deletes a file, if there is one."""
        if self.exists(name):
            with self._telling(name):
                self._fs.delete_file(self._path(name))

    @contextmanager
    def new_folder(self, name: str, last: str) -> Iterator[Path]:
        """A directory on this machine to write into, which becomes the folder `name` at the end of the block.

        On this machine's file systems that is one renaming, of what is all on the disk. In an object store files
        appear one by one, `last` as the last of them: without it a folder is none. What was there before under that
        name is deleted. Where the block or the writing fails nothing is left.

        Raises:
            RunError or another of this storage's kind: it cannot be written.
        """
        if self.is_remote:
            with self._telling(name), tempfile.TemporaryDirectory(prefix="raytrain-") as temporary:
                yield Path(temporary)
                self.delete_folder(name)
                names = sorted(path.name for path in Path(temporary).iterdir())
                for file in sorted(names, key=last.__eq__):
                    self._upload(Path(temporary) / file, f"{name}/{file}")
            return
        temporary = self.path / f"{TEMPORARY}{name}"
        try:
            with self._telling(name):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                yield temporary
                for path in (*temporary.iterdir(), temporary):
                    flush_path(path)
                self.delete_folder(name)
                temporary.rename(self.path / name)
                flush_path(self.path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def rename_folder(self, name: str, new_name: str) -> None:
        """Gives a folder another name, in place of what bears that one."""
        self.delete_folder(new_name)
        with self._telling(name):
            if not self.is_remote:
                (self.path / name).rename(self.path / new_name)
                return
            for file in (self / name).list():
                self._fs.move(self._path(f"{name}/{file.name}"), self._path(f"{new_name}/{file.name}"))

    def delete_folder(self, name: str, first: str | None = None) -> None:
        """Deletes a folder, if there is one; `first` is the file without which it is none."""
        with self._telling(name):
            if not self.is_remote:
                # hidden first, so that one that is half removed is never taken for whole
                folder = self.path / name
                doomed = folder.with_name(f"{TEMPORARY}removed-{folder.name}")
                shutil.rmtree(doomed, ignore_errors=True)
                if folder.exists():
                    folder.rename(doomed)
                    shutil.rmtree(doomed, ignore_errors=True)
            elif cast("fs.FileInfo", self._fs.get_file_info(self._path(name))).type == fs.FileType.Directory:
                if first is not None and (self / name).exists(first):
                    self._fs.delete_file(self._path(f"{name}/{first}"))
                self._fs.delete_dir(self._path(name))

    def delete_unfinished(self) -> None:
        """Deletes what a process that was killed in `new_folder` or `delete_folder` has left on this machine."""
        if not self.is_remote:
            for leftover in self.path.glob(f"{TEMPORARY}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def _upload(self, local: Path, name: str) -> None:
        size = local.stat().st_size
        fs.copy_files(
            str(local), self._path(name), source_filesystem=fs.LocalFileSystem(), destination_filesystem=self._fs
        )
        arrived = cast("fs.FileInfo", self._fs.get_file_info(self._path(name))).size
        if arrived != size:
            raise self._error(f"{self.where(name)} has {arrived} of {size} bytes after its upload; try again")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _telling(self, name: str = "") -> Iterator[None]:
        where = self.where(name) if name else self._base
        try:
            yield
        except FileNotFoundError:
            raise self._error(f"there is no {where}") from None
        except (OSError, pa.ArrowException) as error:
            raise self._error(f"cannot use {where}: {error}") from error


def flush(file: BinaryIO) -> None:
    """Brings a file to the disk, so that a name which is given to it later never stands for less."""
    file.flush()
    os.fsync(file.fileno())


def flush_path(path: Path) -> None:
    """Brings a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
