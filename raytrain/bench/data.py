"""What the loader costs: images from files and from Arrow shards, against torchvision's ImageFolder and DataLoader.

The figure is CPU time, child processes included: it says how many images the cores of a machine can feed to its
GPUs, and hardly depends on what else the machine does meanwhile. A pass reads each image once, through the
transform of training or of evaluation. The passes of all sides take turns, in two processes, so that neither side
finds the other's threads or memory in its own.
"""

import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms

from raytrain import config
from raytrain.bench.photographs import write_photographs
from raytrain.bench.report import Report
from raytrain.data.loader import eval_batches, train_batches
from raytrain.data.source import open_sources
from raytrain.distributed import available_cores
from raytrain.errors import RaytrainError
from raytrain.plan import make_plan

BATCH_SIZE = 64
FORMS = {"arrow": (), "arrow400": ("--max-side", "400"), "raw": ("--raw", "400")}
REFERENCES = ("reference_float32", "reference_uint8")
LIBRARIES = ("torch", "torchvision", "pillow", "simplejpeg")
SIDES = (*REFERENCES, "folder", *FORMS)
PARTS = {"train": "", "eval": "eval_"}  # and what the names of their rows and ratios begin with
SPLITS = {"train": "train", "eval": "val"}
COMPARED = (
    ("folder", "reference_float32"),
    ("folder", "reference_uint8"),
    ("arrow", "reference_float32"),
    ("arrow400", "reference_float32"),
    ("raw", "reference_float32"),
)


Pass = tuple[str, str]
"""Side and part."""


class Cost(NamedTuple):
    """What one pass over the images took."""

    cpu_seconds: float
    """Of all threads, and of child processes that have ended."""
    seconds: float


def bench_data(path: Path | None, rounds: int, images: int, threads: int | None) -> Report:
    """Measures CPU-milliseconds an image and images/s of training's and of evaluation's passes.

    Args:
        path: a folder with train/CLASS/* and val/CLASS/*; None: photographs made for the occasion.
        rounds: measured ones, after one that warms up.
        images: in a pass, or as many as there are.
        threads: of raytrain's loader, and worker processes of the DataLoader; None: one a core.

    Raises:
        DataError: no such images.
        RaytrainError: preparing them failed, or a side did not deliver each image once.
    """
    threads = threads or available_cores()
    with tempfile.TemporaryDirectory(prefix="raytrain-bench-") as folder:
        paths = {side: Path(folder) / side for side in SIDES[2:]} | dict.fromkeys(REFERENCES, Path(folder) / "folder")
        _say("gathering images")
        if path is None:
            write_photographs(paths["folder"], images)
        else:
            link_images(path, paths["folder"], images)
        for form, options in FORMS.items():
            _say(f"preparing {form}")
            _prepare(paths["folder"], paths[form], *options, "--workers", str(threads))
        counts = {part: len(list(paths["folder"].glob(f"{split}/*/*"))) for part, split in SPLITS.items()}
        costs = _alternate(paths, rounds, threads)
        notes = _notes(paths, counts, threads, photographs=path is None)
    return _report(costs, counts, notes)


def link_images(path: Path, root: Path, images: int) -> None:
    """Links `images` training and as many validation images of a dataset, spread evenly over it, to a new folder.

    Raises:
        DataError: there are none, see `open_sources`.
    """
    data = config.Data(source="folder", path=str(path.expanduser().resolve()), cache_path=root.with_name("cache"))
    sources = open_sources(data)
    taken = np.arange(len(sources.train.class_names))
    for part, source in zip(SPLITS.values(), sources, strict=True):
        # a few images need not have every class, but validation may have none that training lacks
        samples = np.flatnonzero(np.isin(source.labels, taken))
        chosen = samples[np.unique(np.linspace(0, len(samples) - 1, images).round().astype(int))]
        for sample in chosen.tolist():
            file = Path(source.name(sample))
            link = root / part / source.class_names[source.labels[sample]] / f"{sample:08d}{file.suffix}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
        taken = np.unique(source.labels[chosen])


def reference_pass(root: Path, part: str, threads: int, number: int, *, to_float: bool) -> Cost:
    """The DataLoader of torchvision's reference scripts, and their transforms.

    Starting worker processes costs what hundreds of images do, which counts in a short pass only: what a pass of
    no images takes is taken off.
    """
    data, steps = config.Data(), [transforms.PILToTensor()]
    if to_float:
        steps += [transforms.ConvertImageDtype(torch.float), transforms.Normalize(data.mean, data.std)]
    if part == "train":
        steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *steps]
    else:
        steps = [transforms.Resize(256), transforms.CenterCrop(224), *steps]
    dataset = datasets.ImageFolder(str(root / SPLITS[part]), transforms.Compose(steps))
    shape = (3, 224, 224)

    def batches(images: Subset | datasets.ImageFolder) -> Iterator[torch.Tensor]:
        shuffle = part == "train" and len(images) > 0
        generator = torch.Generator().manual_seed(number)
        loader = DataLoader(
            images, BATCH_SIZE, shuffle, num_workers=threads, generator=generator, multiprocessing_context="fork"
        )
        return (batch for batch, _ in loader)

    start = _measure(lambda: batches(Subset(dataset, range(0))), 0, shape)
    whole = _measure(lambda: batches(dataset), len(dataset), shape)
    return Cost(whole.cpu_seconds - start.cpu_seconds, whole.seconds - start.seconds)


def raytrain_pass(data: config.Data, part: str, threads: int, number: int) -> Cost:
    """The batches that training and evaluation on a CPU take from the loader."""
    torch.set_num_threads(threads)
    sources, device = open_sources(data), torch.device("cpu")
    shape = (data.image_size, data.image_size, 3)

    def train_images() -> Iterator[torch.Tensor]:
        train = config.Train(global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE, epochs=1)
        plan = make_plan(train, len(sources.train.labels))
        for step in train_batches(sources.train, data, plan, number, 0, 1, 0, threads, device):
            yield from (batch.images for batch in step.batches)

    def eval_images() -> Iterator[torch.Tensor]:
        return (batch.images for batch in eval_batches(sources.val, data, BATCH_SIZE, 0, 1, threads, device))

    if part == "train":
        return _measure(train_images, len(sources.train.labels), shape)
    return _measure(eval_images, len(sources.val.labels), shape)


def _measure(batches: Callable[[], Iterator[torch.Tensor]], count: int, shape: tuple[int, ...]) -> Cost:
    """Consumes a pass that must deliver `count` images of that shape."""
    cpu_start, start, seen = _cpu_seconds(), time.perf_counter(), 0
    for images in batches():
        seen += len(images)
        if images.shape[1:] != shape:
            raise RaytrainError(f"a batch has images of shape {list(images.shape[1:])} instead of {list(shape)}")
    cost = Cost(_cpu_seconds() - cpu_start, time.perf_counter() - start)
    if seen != count or multiprocessing.active_children():  # a child counts once it has ended
        raise RaytrainError(f"a pass delivered {seen} images instead of {count}, or left a process behind")
    return cost


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _alternate(paths: dict[str, Path], rounds: int, threads: int) -> dict[Pass, list[Cost]]:
    """Lets all passes have their turn in each round, in an order that is reversed from round to round."""
    calls = {(side, part): _call_of(side, part, paths[side], threads) for side in SIDES for part in PARTS}
    costs: dict[Pass, list[Cost]] = {key: [] for key in calls}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as theirs, ProcessPoolExecutor(1, spawn) as ours:
        for number in range(rounds + 1):
            _say(f"round {number} of {rounds}" if number else "warming up")
            for key in list(calls)[:: 1 if number % 2 else -1]:
                cost = (theirs if key[0] in REFERENCES else ours).submit(calls[key], number).result()
                if number > 0:
                    costs[key].append(cost)
    return costs


def _call_of(side: str, part: str, path: Path, threads: int) -> Callable[[int], Cost]:
    if side in REFERENCES:
        return partial(reference_pass, path, part, threads, to_float=side == "reference_float32")
    data = config.Data(
        source="arrow" if side in FORMS else "folder",
        path=str(path),
        cache_path=path.with_name("cache"),
        image_size=224,
        train_crop="random_resized",
        flip=0.5,
        eval_resize=256,
    )
    return partial(raytrain_pass, data, part, threads)


def _prepare(source: Path, target: Path, *options: str) -> None:
    """Runs the command that a user would, on this machine alone."""
    words = [sys.executable, "-m", "raytrain.prepare", str(source), str(target), *options]
    here = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(words, env=here, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise RaytrainError(f"could not prepare the images with {' '.join(words[1:])}:\n{done.stderr.strip()}")


def _report(costs: dict[Pass, list[Cost]], counts: dict[str, int], notes: tuple[str, ...]) -> Report:
    rows: dict[str, list[float]] = {}
    units: dict[str, str] = {}
    for (side, part), rounds in costs.items():
        name, count = PARTS[part] + side, counts[part]
        rows[name] = [cost.cpu_seconds * 1000 / count for cost in rounds]
        rows[f"{name}_speed"] = [count / cost.seconds for cost in rounds]
        units |= {name: f"{part} CPU-ms", f"{name}_speed": f"{part} images/s"}
    ratios = {
        f"{start}{one}_vs_{other}": (start + other, start + one) for start in PARTS.values() for one, other in COMPARED
    }
    lines = {side: (side, f"eval_{side}", f"{side}_speed", f"eval_{side}_speed") for side in SIDES}
    return Report("data", units, rows, ratios, notes, (lines,), LIBRARIES)


def _notes(paths: dict[str, Path], counts: dict[str, int], threads: int, *, photographs: bool) -> tuple[str, ...]:
    files = list(paths["folder"].glob("*/*/*"))
    sizes = []
    for file in files:
        with Image.open(file) as image:
            sizes.append(image.size)
    width, height = np.mean(sizes, axis=0)
    origin = ", made by raytrain.bench.photographs" if photographs else ""
    stored = ", ".join(f"{side} {_bytes(paths[side]) / len(files) / 1000:.0f}" for side in SIDES[2:])
    return (
        f"A pass: {counts['train']} training or {counts['eval']} validation images; {threads} threads or processes.",
        f"Images: {width:.0f}x{height:.0f} pixels on average{origin}.",
        f"Stored, kB an image: {stored}. arrow400 and raw hold images of at most 400 pixels a side.",
        "CPU-ms: CPU time an image, of all processes, from file to batch of 64. Ratios: images per CPU-second.",
        "reference_float32: torchvision's ImageFolder, the transforms of its reference scripts, DataLoader.",
        "reference_uint8: the same without conversion to float and normalisation, which raytrain leaves to the device.",
    )


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
