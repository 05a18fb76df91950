"""The node's own folder of datasets made ready to be read: made once, by one process, used by all.

CACHE/datasets/KEY/          a set of shards
CACHE/datasets/KEY.lock      shared by whoever reads it; its time is that of the last use
CACHE/datasets/KEY.making    held by the one process that makes it
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from raytrain.data.convert import finish, plan, undone, write_part
from raytrain.data.origin import Origin
from raytrain.data.shards import DATASET_FILE, ArrowSource, Dataset
from raytrain.data.transcode import Settings
from raytrain.errors import DataError
from raytrain.storage import Storage

GIB = 2**30
SHARD_BYTES = GIB
DOWNLOADS = 8
"""Shards under way at once."""
CONVERSIONS = 2
"""Parts under way at once; each holds some slices of a Parquet file."""
FORMAT = 1
"""Part of each key: another one where what is made has changed."""


class Cache:
    """Datasets under a folder of this machine.

    Args:
        folder: may not exist yet.
        limit_gib: most that they may take together.
        note: is told what takes time.
    """

    def __init__(self, folder: Path, limit_gib: float | None, note: Callable[[str], None]) -> None:
        self._folder, self._limit_gib, self._note = folder / "datasets", limit_gib, note

    def converted(self, origin: Origin, class_names: tuple[str, ...] | None = None) -> ArrowSource:
        """A dataset of another form as shards, the images as they are, byte for byte.

        Raises:
            DataError: it cannot be read, has a wrong label, or does not fit into the cache.
        """

        def make(folder: Path) -> None:
            destination = Storage(str(folder))
            parts = plan(origin, destination, Settings(check=False), SHARD_BYTES)
            left = undone(parts, destination)
            with ThreadPoolExecutor(CONVERSIONS) as executor:
                list(executor.map(lambda part: write_part(part, 1), left))
            finish(origin, parts, destination)

        key = f"{FORMAT}-{origin.fingerprint[:24]}"
        return self._open(key, origin.where, origin.size, make, class_names)

    def fetched(self, storage: Storage, class_names: tuple[str, ...] | None = None) -> ArrowSource:
        """A remote set of shards as a copy, each shard verified.

        Raises:
            DataError: it cannot be read, is not what its checksums say, or does not fit into the cache.
        """
        content = storage.read(DATASET_FILE)
        dataset = Dataset.from_json(content, storage.where(DATASET_FILE))

        def make(folder: Path) -> None:
            missing = [shard for shard in dataset.shards if not (folder / shard.name).exists()]
            with ThreadPoolExecutor(DOWNLOADS) as executor:
                list(executor.map(lambda shard: storage.fetch(shard.name, folder / shard.name, shard.sha256), missing))
            Storage(str(folder)).write(DATASET_FILE, content)

        key = f"{FORMAT}-{dataset.made_from[:12]}-{hashlib.sha256(content).hexdigest()[:12]}"
        return self._open(key, str(storage), sum(shard.size for shard in dataset.shards), make, class_names)

    def _open(
        self,
        key: str,
        where: str,
        size: int,
        make: Callable[[Path], None],
        class_names: tuple[str, ...] | None,
    ) -> ArrowSource:
        folder = self._folder / key
        in_use = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            in_use = _Lock(self._folder / f"{key}.lock", fcntl.LOCK_SH)
            if not (folder / DATASET_FILE).exists():
                making = _Lock(self._folder / f"{key}.making", fcntl.LOCK_EX)
                try:
                    if not (folder / DATASET_FILE).exists():  # another process may just have made it
                        self._make_room(key, where, size)
                        self._note(f"bringing {where} ({size / GIB:.2f} GiB) into {self._folder}")
                        folder.mkdir(exist_ok=True)
                        make(folder)
                finally:
                    making.release()
            os.utime(in_use.path)
            return ArrowSource(folder, class_names, keep=in_use)
        except BaseException as error:
            if in_use is not None:
                in_use.release()  # whoever keeps the error must not keep the lock
            if isinstance(error, OSError):
                raise DataError(
                    f"cannot write {folder}: {error}; set data.cache_path to a folder that can be written"
                ) from error
            raise

    def _make_room(self, key: str, where: str, size: int) -> None:
        """Removes what was used longest ago and is not in use, as far as needed."""
        limit = float("inf") if self._limit_gib is None else self._limit_gib * GIB
        others = {path.name: _size(path) for path in self._folder.iterdir() if path.is_dir() and path.name != key}
        own = _size(self._folder / key)
        if size > limit:
            raise DataError(
                f"{where} takes {size / GIB:.2f} GiB, more than data.cache_gib {self._limit_gib:g}; raise that, or "
                "put the data where all nodes see it as files"
            )

        def fits() -> bool:
            free = shutil.disk_usage(self._folder).free
            return size + sum(others.values()) <= limit and size - own <= free

        paths = [self._folder / f"{name}.lock" for name in others]
        for path in sorted(paths, key=lambda path: path.stat().st_mtime if path.exists() else 0):
            if fits():
                return
            with suppress(BlockingIOError):  # it is in use
                lock = _Lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self._folder / path.stem)
                lock.release()
                del others[path.stem]
        if not fits():
            raise DataError(
                f"{where} takes {size / GIB:.2f} GiB, and {self._folder} has no room for it: "
                f"{shutil.disk_usage(self._folder).free / GIB:.2f} GiB are free on its disk, and datasets in use take "
                f"{sum(others.values()) / GIB:.2f} GiB; set data.cache_path to a larger disk, or raise data.cache_gib"
            )


class _Lock:
    """A file that processes lock, until `release` or for as long as the object lives.

    Raises:
        BlockingIOError: another process holds it, and `how` says not to wait.
    """

    def __init__(self, path: Path, how: int) -> None:
        self.path = path
        self._descriptor: int | None = None  # what `__del__` finds where the next line fails
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, how)
        except OSError:
            self.release()
            raise

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _size(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # its maker has just moved it
            size += path.stat().st_size
    return size
