"""Makes a dataset into Arrow shards on all cores of this machine, or over a Ray cluster at RAY_ADDRESS.

Each part is a task of its own. What a task reads and writes all machines must see: a shared file system, or an object
store.
"""

import fcntl
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection, resource_tracker
from typing import NamedTuple

from raytrain.console import duration
from raytrain.data.convert import Part, Record, bytes_under_way, finish, plan, read_record, undone, write_part
from raytrain.data.folder import open_folder
from raytrain.data.origin import SPLITS, Origin, split_folder, split_of
from raytrain.data.parquet import open_parquet
from raytrain.data.shards import DATASET_FILE, Dataset, open_shards
from raytrain.data.transcode import Settings
from raytrain.data.webdataset import open_webdataset
from raytrain.distributed import available_cores
from raytrain.errors import DataError, WorkerError
from raytrain.storage import Storage

GIB = 2**30
PROGRESS_SECONDS = 5.0


class Request(NamedTuple):
    """What is to be prepared, and how."""

    source: str
    """Path or location of a dataset, with its train and val sets, or of one set."""
    destination: str
    settings: Settings
    shard_gib: float = 1.0
    """Most bytes in a shard; images that are made smaller give smaller shards."""
    num_workers: int | None = None
    """Processes. None: as many as there are cores. On a Ray cluster its CPUs count."""
    form: str | None = None
    """folder, parquet, webdataset or arrow. None: found from the files."""
    image_column: str | None = None
    label_column: str | None = None
    max_bad_fraction: float = 0.01
    """Share of the images that may be bad."""


def prepare(request: Request, say: Callable[[str], None]) -> dict[str, Dataset]:
    """Prepares each set of a dataset, and returns what was made by the set's name; "" for a single set.

    Raises:
        DataError: the source cannot be read or has a wrong label, too many images are bad, or the destination cannot be
            written or holds something else.
    """
    source, destination = Storage(request.source), Storage(request.destination)
    form = request.form or _find_form(source)
    made: dict[str, Dataset] = {}
    splits = _splits(source, form)
    if splits == [None]:
        say(f"{source} has no train and val: it is taken as one set, to stand as train or val in a dataset's folder")
    elif "val" not in splits or "train" not in splits:
        say(f"{source} has no {'val' if 'train' in splits else 'train'} set, which training needs")
    for split in splits:
        train = made.get("train")
        origin = _open(request, source, form, split, tuple(train.class_names) if train else None)
        folder = destination / split if split else destination
        read = source if form in ("parquet", "webdataset") or split is None else split_folder(source, split)
        if f"{folder}/".startswith(f"{read}/"):
            raise DataError(f"{folder} lies in {read}, which is read; give another folder")
        with _claimed(folder):
            made[split or ""] = _make(request, origin, folder, partial(_say, say, split))
    return made


def report(made: dict[str, Dataset]) -> str:
    """What was prepared, and what was left out."""
    lines = []
    for split, dataset in made.items():
        counts = list(zip(dataset.images_per_class, dataset.class_names, strict=True))
        (fewest, its_name), (most, other_name) = min(counts), max(counts)
        lines.append(
            f"{split or 'all'}: {dataset.images:,} images of {len(counts):,} classes, {fewest:,} ({its_name}) to "
            f"{most:,} ({other_name}) each"
        )
        size_in, size_out = _amount(dataset.bytes_in), _amount(dataset.bytes_out)
        lines.append(f"  {size_in} of images became {size_out} in {len(dataset.shards):,} shard(s)")
        lines.append(f"  {len(dataset.bad):,} bad images were left out" + (":" if dataset.bad else ""))
        lines += [f"    {image['reason']}" for image in dataset.bad]
    return "\n".join(lines)


def _amount(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _make(request: Request, origin: Origin, folder: Storage, say: Callable[[str], None]) -> Dataset:
    parts = plan(origin, folder, request.settings, max(1, int(request.shard_gib * GIB)))
    left = undone(parts, folder)
    if not folder.exists(DATASET_FILE):
        if origin.remark:
            say(origin.remark)
        before, done, started = len(parts) - len(left), 0, time.monotonic()
        say(f"{_amount(origin.size)} in {len(parts)} part(s), {before} of them done")
        for record in _write_all(left, request.num_workers):
            done += record is not None
            seconds = time.monotonic() - started
            ahead = f", about {duration(seconds / done * (len(left) - done))} left" if 0 < done < len(left) else ""
            written = f", {_amount(size)} being written" if (size := bytes_under_way(folder)) else ""
            say(f"{before + done} of {len(parts)} part(s) done{written}; {duration(seconds)}{ahead}")
        _check_bad([read_record(folder, part.number) for part in parts], origin.where, request.max_bad_fraction)
    return finish(origin, parts, folder)


def _check_bad(records: Sequence[Record], where: str, max_fraction: float) -> None:
    bad = [image["reason"] for record in records for image in record.bad]
    images = len(bad) + sum(sum(record.images_by_label.values()) for record in records)
    if images == 0:
        raise DataError(f"{where} has no images")
    if len(bad) > max_fraction * images or len(bad) == images:
        raise DataError(
            f"{len(bad)} of {images:,} images of {where} are bad, more than --max-bad-fraction {max_fraction:g}; "
            "repair them, or allow more (what is done is kept):\n  " + "\n  ".join(bad[:20])
        )


def _write_all(parts: Sequence[Part], num_workers: int | None) -> Iterator[Record | None]:
    """The records of parts, each as soon as it is done; None now and then while they are made."""
    if not parts:
        return
    if os.environ.get("RAY_ADDRESS"):
        yield from _write_over_ray(parts)
        return
    workers = num_workers or available_cores()
    processes = min(workers, len(parts))
    write = partial(write_part, num_threads=max(1, workers // processes))
    spawn = multiprocessing.get_context("spawn")  # a fork would lose the threads of libraries
    pool: Executor = ThreadPoolExecutor(1)
    if processes > 1:
        pool = ProcessPoolExecutor(processes, spawn, initializer=_end_with_parent)
    before = multiprocessing.active_children()
    try:
        with _without_ctrl_c():  # it is this process's to answer, afterwards; children inherit that they do not
            running = {pool.submit(write, part) for part in parts}
        while running:
            done, running = wait(running, PROGRESS_SECONDS, FIRST_COMPLETED)
            yield from [future.result() for future in done] or [None]
    except BrokenProcessPool as error:
        raise WorkerError(
            "a worker process died: it was killed, or the machine had no memory left; run it again"
        ) from error
    except BaseException:
        for child in set(multiprocessing.active_children()) - set(before):
            child.terminate()
        pool.shutdown(wait=processes > 1, cancel_futures=True)  # a thread cannot be ended
        raise
    pool.shutdown()


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    resource_tracker.ensure_running()  # which would let signals through as it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write_over_ray(parts: Sequence[Part]) -> Iterator[Record | None]:
    import ray
    from ray.exceptions import RayTaskError

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        write = ray.remote(num_cpus=1)(write_part)
        running = [write.remote(part, 1) for part in parts]
        while running:
            done, running = ray.wait(running, timeout=PROGRESS_SECONDS)
            try:
                yield from ray.get(done) or [None]
            except RayTaskError as error:
                raise (error.cause if isinstance(error.cause, DataError) else error) from None
    finally:
        ray.shutdown()


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _claimed(folder: Storage) -> Iterator[None]:
    """Holds a local destination, so that no other process writes there meanwhile."""
    if folder.is_remote:
        yield
        return
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = (folder.path / ".lock").open("w")
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another process is preparing {folder}") from None
        if (
            not (folder.path / ".lock").exists()
            or (folder.path / ".lock").stat().st_ino != os.fstat(lock.fileno()).st_ino
        ):
            raise DataError(f"another process has just prepared {folder}; try again")
        try:
            yield
        finally:
            (folder.path / ".lock").unlink(missing_ok=True)


def _find_form(source: Storage) -> str:
    """The form of a dataset, from the files in its uppermost folders."""
    if not source.is_folder():
        raise DataError(f"there is no folder {source}")
    folders = [folder for split in SPLITS if (folder := split_folder(source, split)).is_folder()]
    folders = folders or [source, source / "data"]  # what lies beside train/ and val/ is not read
    names = [file.name for folder in folders if folder.is_folder() for file in folder.list(recursive=False)]
    for form, suffixes in (
        ("arrow", (DATASET_FILE,)),
        ("parquet", (".parquet",)),
        ("webdataset", (".tar", ".tar.gz", ".tgz")),
    ):
        if any(name.endswith(suffixes) for name in names):
            return form
    return "folder"


def _splits(source: Storage, form: str) -> list[str | None]:
    """The sets that a dataset has; [None] where it is a single one."""
    if form in ("folder", "arrow"):
        found = [split for split in SPLITS if split_folder(source, split).is_folder()]
    else:
        have = {split_of(file.name) for file in source.list()}
        found = [split for split in SPLITS if split in have]
    return [*found] or [None]


def _open(request: Request, source: Storage, form: str, split: str | None, known: tuple[str, ...] | None) -> Origin:
    if form == "parquet":
        return open_parquet(source, split, request.image_column, request.label_column, known)
    if form == "webdataset":
        return open_webdataset(source, split, known)
    folder = split_folder(source, split) if split else source
    origin = open_folder(folder) if form == "folder" else open_shards(folder)
    if known is not None and (unknown := sorted(set(origin.class_names or ()) - set(known))):
        raise DataError(f"{folder} has classes that the training set lacks: {', '.join(unknown)}")
    return origin


def _say(say: Callable[[str], None], split: str | None, text: str) -> None:
    say(f"{split}: {text}" if split else text)
