"""The same images in any form train to the same losses; and every epoch is every image once, whatever happens."""

from collections import Counter

import numpy as np
import pytest
import torch

from raytrain.commandline import build
from raytrain.config import Data, Train
from raytrain.data.loader import train_batches
from raytrain.data.order import epoch_order
from raytrain.data.source import open_sources
from raytrain.distributed import Runtime
from raytrain.loop import train
from raytrain.plan import make_plan
from raytrain.prepare import main as prepare
from raytrain.recorder import Recorder, read_metrics
from tests.datasets import photo_samples, sample_tar, write_folder, write_parquet
from tests.places import at

CLASSES = ("bird", "cat", "dog")


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """{name: (source, path)} of one dataset."""
    root = tmp_path_factory.mktemp("forms")
    for split, count in (("train", 7), ("val", 3)):
        samples = photo_samples(count, CLASSES, seed=len(split))
        write_folder(root / "folder" / split, samples)
        half = len(samples) // 2
        for number, part in enumerate((samples[:half], samples[half:])):
            images, numbers = [s.encoded for s in part], [CLASSES.index(s.label) for s in part]
            name = f"{split}-{number:05d}-of-00002"
            write_parquet(root / "plain" / f"{name}.parquet", images, [s.label for s in part], row_group_size=3)
            paths = [f"{s.label}/{s.file}" for s in part]
            write_parquet(root / "struct" / f"data/{name}.parquet", images, numbers, CLASSES, struct_paths=paths)
            sample_tar(root / "tar" / f"images-{name}.tar", part, CLASSES)
    (root / "tar" / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    assert prepare([str(root / "folder"), str(root / "arrow"), "--shard-gib", "0.00001"]) == 0
    assert len(list((root / "arrow/train").glob("*.arrow"))) > 1
    sources = {"folder": "folder", "arrow": "arrow", "plain": "parquet", "struct": "parquet", "tar": "webdataset"}
    return {name: (source, str(root / name)) for name, source in sources.items()}


def losses(source, path, folder):
    sections = {
        "data": {
            "source": source,
            "path": path,
            "cache_path": folder / "cache",
            "image_size": 32,
            "flip": 0.5,
            "color_jitter": [0.2, 0.2, 0.2],
        },
        "model": {"name": "resnet18"},
        "schedule": {"lr_scaling": "none", "warmup_epochs": 0},
        "train": {"epochs": 2, "global_batch_size": 8, "micro_batch_size": 4, "precision": "fp32", "log_every": 1},
    }
    config = build(sections, {}, "test")
    sources = open_sources(config.data)
    assert sources.train.class_names == sources.val.class_names == CLASSES
    recorder = Recorder(at(folder))
    train(config, Runtime(), sources, at(folder / "checkpoints"), recorder)
    recorder.close()
    keys = ("train/loss", "val/loss", "val/top1", "val/samples")
    return [(row["step"], key, row[key]) for row in read_metrics(at(folder)) for key in keys if key in row]


def test_all_forms_train_to_the_same_losses_step_by_step(forms, tmp_path):
    found = {}
    for name, (source, path) in forms.items():
        (tmp_path / name).mkdir()
        found[name] = losses(source, path, tmp_path / name)
    assert len(found["folder"]) == 6 + 2 * 3
    assert all(value == found["folder"] for value in found.values())


@pytest.mark.parametrize("name", ["folder", "arrow", "struct"])
def test_each_epoch_is_every_sample_once_on_any_workers_through_stops(forms, tmp_path, name):
    """Three epochs; 1 worker, 2, 3, and 2 that stop inside the second epoch with 3 and then 1 that go on."""
    source, path = forms[name]
    data = Data(source=source, path=path, cache_path=tmp_path, image_size=8, train_crop="resize")
    opened = open_sources(data).train
    count = len(opened.labels)
    plan = make_plan(Train(global_batch_size=8, micro_batch_size=2, epochs=3), count)
    marked = Marked(opened)

    def samples(world_size, start, stop):
        """Those of each step, in order of its micro-batches."""
        ranks = [
            train_batches(marked, data, plan, 5, rank, world_size, start, 2, torch.device("cpu"))
            for rank in range(world_size)
        ]
        steps = []
        for _ in range(start, stop):
            parts = sorted((next(rank) for rank in ranks), key=lambda part: part.first)
            steps.append([int(label) for part in parts for batch in part.batches for label in batch.labels])
        for rank in ranks:
            rank.close()
        return steps

    steps = plan.total_steps
    assert steps == 3 * plan.steps_per_epoch == 9
    alone = samples(1, 0, steps)
    assert samples(2, 0, steps) == alone
    assert samples(3, 0, steps) == alone
    assert samples(2, 0, 4) + samples(3, 4, 5) + samples(1, 5, steps) == alone
    orders = []
    for epoch in range(3):
        seen = [sample for step in alone[epoch * 3 : epoch * 3 + 3] for sample in step]
        assert Counter(seen) == Counter(range(count))
        assert seen == epoch_order(5, epoch, count).tolist()
        orders.append(tuple(seen))
    assert len(set(orders)) == 3


class Marked:
    """A source whose labels are its samples' numbers."""

    def __init__(self, source):
        self.labels = np.arange(len(source.labels))
        self.class_names = tuple(str(number) for number in self.labels)
        self.read, self.name, self.prefetch = source.read, source.name, source.prefetch
