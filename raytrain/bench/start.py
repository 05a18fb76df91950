"""How soon training can start reading: listing a large folder, opening many rows, and the next epoch's order.

Each side does its work once a round in a process of its own, and tells how long it took and by how much the
process's own memory grew; pages of a memory map that others share do not count.
"""

import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torchvision.datasets import ImageFolder

from raytrain import config
from raytrain.bench.report import Report
from raytrain.data.loader import train_batches
from raytrain.data.order import epoch_order
from raytrain.data.shards import DATASET_FILE, Dataset, ShardWriter
from raytrain.data.source import Sources, open_sources
from raytrain.plan import make_plan

ROWS = 1_281_167
CLASSES = 1000
SHARDS = 140
SIDES = ("imagefolder", "folder_first", "folder_again", "arrow", "next_order")
RATIOS = {
    "folder_first_vs_imagefolder": ("imagefolder", "folder_first"),
    "folder_again_vs_imagefolder": ("imagefolder", "folder_again"),
}


def bench_start(rounds: int, files: int) -> Report:
    """Measures seconds and megabytes of each side.

    Args:
        rounds: measured ones, after one that warms up.
        files: in the folder that is listed.
    """
    rows: dict[str, list[float]] = {name: [] for side in SIDES for name in (side, f"{side}_memory")}
    with tempfile.TemporaryDirectory(prefix="raytrain-bench-") as folder:
        root = Path(folder)
        print("writing files and rows", file=sys.stderr)
        _write_files(root / "files", files)
        _write_rows(root / "rows")
        for number in range(rounds + 1):
            calls: dict[str, Callable[[], object]] = {
                "imagefolder": partial(ImageFolder, str(root / "files/train")),
                "folder_first": partial(_open_folder, root, number),
                "folder_again": partial(_open_folder, root, number),  # after the first, which leaves its listing
                "arrow": partial(_first_batch, root),
                "next_order": partial(epoch_order, 0, number, ROWS),
            }
            for side, call in calls.items():
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
                    seconds, grown = executor.submit(_measure, call).result()
                if number > 0:
                    rows[side].append(seconds)
                    rows[f"{side}_memory"].append(grown)
    units = {name: "MB" if name.endswith("_memory") else "seconds" for name in rows}
    lines = {side: (side, f"{side}_memory") for side in SIDES}
    notes = (
        f"imagefolder: torchvision's ImageFolder of {files:,} files; folder: raytrain's, the first time and later.",
        f"arrow: {ROWS:,} rows in {SHARDS} shards, opened and checked, and the first batch. next_order: their shuffle.",
        "MB: growth of the process's own memory. Files lie in the page cache.",
    )
    return Report("start", units, rows, RATIOS, notes, (lines,))


def _measure(call: Callable[[], object]) -> tuple[float, float]:
    before, start = _own_bytes(), time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    grown = (_own_bytes() - before) / 1e6
    del result
    return seconds, grown


def _own_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    found = re.search(r"Anonymous:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


def _open_folder(root: Path, number: int) -> Sources:
    return open_sources(config.Data(path=str(root / "files"), cache_path=root / f"cache{number}"))


def _first_batch(root: Path) -> object:
    data = config.Data(source="arrow", path=str(root / "rows"), image_size=8, train_crop="resize")
    sources = open_sources(data)
    plan = make_plan(config.Train(global_batch_size=256, micro_batch_size=64), len(sources.train.labels))
    batches = train_batches(sources.train, data, plan, 0, 0, 1, 0, 2, torch.device("cpu"))
    return next(batches), batches, sources


def _write_files(root: Path, files: int) -> None:
    for split, count in (("train", files), ("val", CLASSES)):
        for number in range(count):
            folder = root / split / f"class{number % (CLASSES // 5):04d}"
            if number < CLASSES // 5:
                folder.mkdir(parents=True)
            (folder / f"{number:07d}.JPEG").touch()
    time.sleep(3)  # a folder that has just changed is listed again, whatever the cache has


def _write_rows(root: Path) -> None:
    """Rows with next to nothing in them: an 8-bit grey image of one pixel, as PNM."""
    names = tuple(f"class{number:04d}" for number in range(CLASSES))
    for split, count in (("train", ROWS), ("val", CLASSES)):
        folder = root / split
        folder.mkdir(parents=True)
        shards = []
        for shard in range(SHARDS):
            path = folder / f"shard-{shard:05d}-00.arrow"
            writer = ShardWriter(path, names, pixels=False)
            for row in range(count * shard // SHARDS, count * (shard + 1) // SHARDS):
                writer.add((b"P5 1 1 255 \x80", row % CLASSES, f"{names[row % CLASSES]}/{row:07d}.JPEG"))
            shards.append(writer.close(path.name))
        counts = [len(range(label, count, CLASSES)) for label in range(CLASSES)]
        (folder / DATASET_FILE).write_bytes(Dataset(list(names), count, counts, pixels=False, shards=shards).to_json())
