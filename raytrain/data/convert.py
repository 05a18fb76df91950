"""Makes shards of a dataset in any form, part by part, so that it can be done in parallel, and again after any end.

What a part holds follows from the dataset and the settings alone. A part is done when its record is there, which names
its shards; until then they have temporary names. A process that was interrupted, by whatever, leaves the records of the
parts that are done, and the next one makes the others: the shards are the same as if nothing had happened.
"""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from raytrain.data.origin import Origin, Piece, Sample
from raytrain.data.shards import DATASET_FILE, Dataset, Shard, ShardWriter
from raytrain.data.transcode import Settings, Stored, transcode
from raytrain.errors import DataError
from raytrain.storage import TEMPORARY, Storage

PARTS = "parts"
"""The folder of records, which goes when the dataset is whole."""
SMALL_PART_BYTES = 2**26
MANY_PARTS = 64
_PLAN = f"{PARTS}/plan"


@dataclass(frozen=True)
class Part:
    """Some pieces of a set, and where their shards go."""

    number: int
    pieces: Sequence[Piece]
    destination: Storage
    class_names: tuple[str, ...] | None
    settings: Settings
    shard_bytes: int


@dataclass(frozen=True)
class Record:
    """What came of a part."""

    shards: list[Shard]
    images_by_label: dict[str, int]
    first_by_label: dict[str, str]
    """Name of the first sample with a label, for messages; only where there are no class names yet."""
    bad: list[dict[str, str]]
    bytes_in: int
    bytes_out: int


def plan(origin: Origin, destination: Storage, settings: Settings, shard_bytes: int) -> list[Part]:
    """The parts that a set is made in: as many pieces as come to a shard, before they are transcoded.

    Those of a small set are smaller, so that it too is made by all cores and shows progress.

    Raises:
        DataError: the destination holds something else.
    """
    made_from = _made_from(origin, settings, shard_bytes)
    if destination.exists(DATASET_FILE):
        before = Dataset.from_json(destination.read(DATASET_FILE), destination.where(DATASET_FILE)).made_from
    elif destination.exists(_PLAN):
        before = destination.read(_PLAN).decode()
    else:
        destination.write(_PLAN, made_from.encode())
        before = made_from
    if before != made_from:
        raise DataError(
            f"{destination} holds what was made from other files or with other settings; remove it, or give another "
            "folder"
        )
    part_bytes = min(shard_bytes, max(SMALL_PART_BYTES, origin.size // MANY_PARTS))
    parts: list[list[Piece]] = []
    size = 0
    for piece in origin.pieces:
        if not parts or size + piece.size > part_bytes:
            parts.append([])
            size = 0
        parts[-1].append(piece)
        size += piece.size
    return [
        Part(number, pieces, destination, origin.class_names, settings, shard_bytes)
        for number, pieces in enumerate(parts)
    ]


def undone(parts: Sequence[Part], destination: Storage) -> list[Part]:
    """The parts that have no record yet; none where the dataset is whole."""
    if destination.exists(DATASET_FILE):
        return []
    names = {file.name for file in destination.list()}
    return [part for part in parts if _record_name(part.number) not in names]


def write_part(part: Part, num_threads: int) -> Record:
    """Makes a part's shards and, when they are in place, its record.

    Raises:
        DataError: something cannot be read or written, or a label is wrong.
    """
    shards: list[Shard] = []
    bad: list[dict[str, str]] = []
    labels: Counter[str] = Counter()
    first_by_label: dict[str, str] = {}
    bytes_in = bytes_out = 0
    writer: ShardWriter | None = None
    with TemporaryDirectory(prefix=TEMPORARY, dir=_scratch(part.destination)) as folder:
        temporary = Path(folder) / "shard.arrow"

        def close(writer: ShardWriter) -> None:
            shard = writer.close(f"shard-{part.number:05d}-{len(shards):02d}.arrow")
            part.destination.put(temporary, shard.name)
            shards.append(shard)

        try:
            for sample, stored in _transcoded(part, num_threads):
                bytes_in += len(sample.image)
                if isinstance(stored, DataError):
                    bad.append({"name": sample.name, "reason": str(stored)})
                    continue
                if writer is not None and writer.size + len(stored.image) > part.shard_bytes:
                    close(writer)
                    writer = None
                pixels = part.settings.raw is not None
                writer = writer or ShardWriter(temporary, part.class_names, pixels=pixels)
                row = (stored.image, sample.label, sample.name)
                writer.add((*row, stored.height, stored.width) if pixels else row)
                labels[str(sample.label)] += 1
                if part.class_names is None:
                    first_by_label.setdefault(str(sample.label), sample.name)
                bytes_out += len(stored.image)
            if writer is not None:
                close(writer)
        except OSError as error:
            raise DataError(f"cannot write shards of {part.destination}: {error}") from error
    record = Record(shards, dict(sorted(labels.items())), first_by_label, bad, bytes_in, bytes_out)
    part.destination.write(_record_name(part.number), json.dumps(asdict(record)).encode())
    return record


def finish(origin: Origin, parts: Sequence[Part], destination: Storage) -> Dataset:
    """Makes the dataset whole, when all parts are done, and removes what a killed process has left beside it.

    Raises:
        DataError: labels leave out a number, where there are no class names.
    """
    if destination.exists(DATASET_FILE):
        dataset = Dataset.from_json(destination.read(DATASET_FILE), destination.where(DATASET_FILE))
    else:
        dataset = _joined(origin, parts, destination)
        destination.write(DATASET_FILE, dataset.to_json())
    destination.delete_folder(PARTS)
    destination.delete_unfinished()
    return dataset


def _joined(origin: Origin, parts: Sequence[Part], destination: Storage) -> Dataset:
    records = [read_record(destination, part.number) for part in parts]
    labels: Counter[int] = Counter()
    for record in records:
        labels.update({int(label): count for label, count in record.images_by_label.items()})
    names = origin.class_names or tuple(str(number) for number in range(max(labels, default=-1) + 1))
    if origin.class_names is None and origin.leaves_none_out and len(labels) < len(names):
        sample = next(record.first_by_label[names[-1]] for record in records if names[-1] in record.first_by_label)
        raise DataError(
            f"{origin.where}: {sample}: label {names[-1]} is out of range: there are {len(labels)} different labels, "
            f"so they are 0 to {len(labels) - 1}, unless class names are given"
        )
    return Dataset(
        class_names=list(names),
        images=sum(labels.values()),
        images_per_class=[labels[number] for number in range(len(names))],
        pixels=parts[0].settings.raw is not None,
        shards=[shard for record in records for shard in record.shards],
        bad=[image for record in records for image in record.bad],
        bytes_in=sum(record.bytes_in for record in records),
        bytes_out=sum(record.bytes_out for record in records),
        made_from=_made_from(origin, parts[0].settings, parts[0].shard_bytes),
    )


def read_record(destination: Storage, number: int) -> Record:
    """The record of a part that is done."""
    values = json.loads(destination.read(_record_name(number)))
    return Record(**{**values, "shards": [Shard(**shard) for shard in values["shards"]]})


def bytes_under_way(destination: Storage) -> int:
    """Size of the shards that are being written, where they can be seen."""
    folders = () if destination.is_remote else destination.path.glob(f"{TEMPORARY}*/*")
    size = 0
    for path in folders:
        with suppress(FileNotFoundError):  # it has just been finished
            size += path.stat().st_size
    return size


def _record_name(number: int) -> str:
    return f"{PARTS}/{number:05d}.json"


def _made_from(origin: Origin, settings: Settings, shard_bytes: int) -> str:
    about = [origin.fingerprint, origin.class_names, asdict(settings), shard_bytes]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _scratch(destination: Storage) -> Path | None:
    """Where a shard is written before it is moved or uploaded: beside its place, or in the system's folder for that."""
    return None if destination.is_remote else destination.path


def _transcoded(part: Part, num_threads: int) -> Iterator[tuple[Sample, Stored | DataError]]:
    """Each sample with what is to be stored of it or what is wrong with it, in order, made on threads."""

    def make(sample: Sample) -> tuple[Sample, Stored | DataError]:
        try:
            return sample, transcode(sample.image, part.settings, sample.name)
        except DataError as error:
            return sample, error

    waiting: deque[Future[tuple[Sample, Stored | DataError]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="transcode") as executor:
        for piece in part.pieces:
            for sample in piece.samples():
                waiting.append(executor.submit(make, sample))
                if len(waiting) > 2 * num_threads:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
