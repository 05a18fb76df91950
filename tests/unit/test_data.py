import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data as photographs
from sklearn.datasets import load_digits, load_sample_image

from raytrain.config import Data, Train
from raytrain.data.decode import decode
from raytrain.data.loader import eval_batches, train_batches
from raytrain.data.order import COLOUR, ORDER, Streams, epoch_order
from raytrain.data.source import open_sources
from raytrain.errors import DataError
from raytrain.plan import make_plan

CPU = torch.device("cpu")


def photograph(name="astronaut"):
    pixels = load_sample_image(f"{name}.jpg") if name in ("china", "flower") else getattr(photographs, name)()
    return Image.fromarray(pixels)


def encoded(image, kind="jpeg", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def make_folder(root, counts):
    """{"train/a": 2, ...}: class folders with so many small images each."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (9, 9), (index, 10, 20)).save(root / name / f"{index}.png")
    return root


def open_folder(root, **keys):
    return open_sources(
        Data(source="folder", path=str(root), image_size=8, train_crop="resize", cache_path=root / ".cache", **keys)
    )


class Numbered:
    """Sample i is an image of one colour with the label i, so that a batch says which samples it holds."""

    def __init__(self, count, side=8):
        self.class_names = tuple(str(number) for number in range(count))
        self.labels = np.arange(count)
        self._side = side

    def prefetch(self, indices):
        pass

    def read(self, index):
        return encoded(Image.new("L", (self._side, self._side), index % 256), "png")

    def name(self, index):
        return f"sample {index}"


# which samples exist


def test_a_validation_set_without_a_class_keeps_the_training_sets_numbers(tmp_path):
    """A01, first variant."""
    sources = open_folder(make_folder(tmp_path, {"train/a": 1, "train/b": 2, "train/c": 1, "val/a": 1, "val/c": 2}))
    assert sources.train.class_names == sources.val.class_names == ("a", "b", "c")
    assert sources.train.labels.tolist() == [0, 1, 1, 2]
    assert sources.val.labels.tolist() == [0, 2, 2]
    assert sources.val.labels.dtype == np.int64


def test_a_validation_set_with_an_unknown_class_is_refused_by_name(tmp_path):
    """A01, second variant."""
    counts = {f"train/{name}": 1 for name in "abc"} | {f"val/{name}": 1 for name in "bcd"}
    with pytest.raises(DataError, match=r"val.*: d$"):
        open_folder(make_folder(tmp_path, counts))


def test_hidden_and_stray_files_are_passed_over(tmp_path):
    """B37."""
    make_folder(tmp_path, {"train/a": 1, "train/b": 2, "train/.ipynb_checkpoints": 3, "val/a": 1, "val/.b": 1})
    (tmp_path / "train/stray.png").write_bytes(b"stray")
    (tmp_path / "train/README").write_text("stray")
    (tmp_path / "train/a/.hidden.png").write_bytes(b"stray")
    (tmp_path / "train/a/Thumbs.db").write_bytes(b"stray")
    (tmp_path / "train/a/notes.txt").write_bytes(b"stray")
    sources = open_folder(tmp_path)
    assert sources.train.class_names == ("a", "b")
    assert sources.train.labels.tolist() == [0, 1, 1]
    assert sources.val.labels.tolist() == [0]


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_empty_class_is_refused_by_name(tmp_path, split):
    make_folder(tmp_path, {"train/a": 1, "train/b": 1, "val/a": 1, f"{split}/empty": 0})
    if split == "val":
        make_folder(tmp_path, {"train/empty": 1})
    with pytest.raises(DataError, match=f"{split}/empty"):
        open_folder(tmp_path)


def test_classes_are_numbered_by_sorted_name_and_files_too(tmp_path):
    make_folder(tmp_path, {f"train/{name}": 1 for name in ("b", "a10", "a2", "B", "ä")} | {"val/a2": 1})
    sources = open_folder(tmp_path)
    assert sources.train.class_names == ("B", "a10", "a2", "b", "ä")
    assert sources.val.labels.tolist() == [2]
    for name in ("z.JPG", "y.jpeg", "x.Bmp", "w.webp"):
        (tmp_path / "val/a2" / name).write_bytes(b"?")
    names = [sources.val.name(0), *(open_folder(tmp_path).val.name(i) for i in range(1, 5))]
    assert [name.rsplit("/", 1)[1] for name in names] == ["0.png", "w.webp", "x.Bmp", "y.jpeg", "z.JPG"]


def test_missing_folders_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"data\.path"):
        open_sources(Data(source="folder"))
    with pytest.raises(DataError, match="nowhere/train"):
        open_folder(tmp_path / "nowhere")
    make_folder(tmp_path, {"train/a": 1})
    with pytest.raises(DataError, match=f"{tmp_path}/val"):
        open_folder(tmp_path)
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match=r"val has no class folders"):
        open_folder(tmp_path)


def test_an_image_that_vanished_is_named(tmp_path):
    sources = open_folder(make_folder(tmp_path, {"train/a": 1, "val/a": 1}))
    (tmp_path / "train/a/0.png").unlink()
    with pytest.raises(DataError, match=r"train/a/0\.png.*No such file"):
        sources.train.read(0)


def test_the_digits_are_scikit_learns(tmp_path):
    sources = open_sources(Data(source="digits", cache_path=tmp_path))
    scans, labels = load_digits(return_X_y=True)
    held_out = np.arange(1797) % 5 == 4
    assert (len(sources.train.labels), len(sources.val.labels)) == (1438, 359)
    for source, rows in ((sources.train, ~held_out), (sources.val, held_out)):
        assert source.class_names == tuple("0123456789")
        assert source.labels.tolist() == labels[rows].tolist()
        read = [decode(source.read(i), str)[:, :, 0] for i in range(len(source.labels))]
        # 17 levels of ink became as many greys, and come back
        assert (np.stack(read) * (16 / 255)).round().reshape(-1, 64).tolist() == scans[rows].tolist()
    again = open_sources(Data(source="digits", cache_path=tmp_path))
    assert again.train.read(7) == sources.train.read(7)
    assert len(list(tmp_path.glob("datasets/*/*.arrow"))) == 2


def test_digits_that_cannot_be_stored_or_read_are_refused_by_path(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file/.*data\.cache_path"):
        open_sources(Data(source="digits", cache_path=tmp_path / "file"))
    open_sources(Data(source="digits", cache_path=tmp_path))
    shard = next(tmp_path.glob("datasets/*digits-train*/*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"{shard.name} has .* cut short"):
        open_sources(Data(source="digits", cache_path=tmp_path))


# order and randomness


@pytest.mark.parametrize("count", [2, 3, 1797])
def test_an_epochs_order_is_a_permutation_and_a_function_of_seed_and_epoch(count):
    order = epoch_order(5, 3, count)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == epoch_order(5, 3, count).tolist()


def test_orders_differ_between_epochs_and_seeds():
    orders = {tuple(epoch_order(seed, epoch, 100)) for seed in (0, 1, 2**32 - 1) for epoch in range(50)}
    assert len(orders) == 150
    # as draws without any relation: each position holds a given sample in 1 of 100 orders
    first = np.array([epoch_order(0, epoch, 100) for epoch in range(2000)])
    assert abs((first == np.arange(100)).mean() - 0.01) < 0.001


def test_each_sample_has_its_own_stream_in_each_epoch():
    draws = {
        tuple(Streams(seed, epoch).of(sample).random(3))
        for seed in (0, 1)
        for epoch in range(20)
        for sample in (*range(20), 1_281_166)
    }
    assert len(draws) == 2 * 20 * 21
    assert Streams(1, 2).of(3).random(9).tolist() == Streams(1, 2).of(3).random(9).tolist()
    every = np.stack([Streams(0, 0).of(sample).random(100) for sample in range(200)])
    assert abs(np.corrcoef(every[:, 0], every[:, 1])[0, 1]) < 0.3
    assert abs(every.mean() - 0.5) < 0.01


def test_no_stream_of_one_use_is_that_of_another():
    order = set(Streams(0, 0, ORDER).of(0).integers(2**32, size=64).tolist())
    for sample in range(100):
        shape, colour = (set(Streams(0, 0, use).of(sample).integers(2**32, size=64).tolist()) for use in (0, COLOUR))
        assert not shape & order
        assert not colour & order
        assert not colour & shape


def test_a_stream_begins_anew_whatever_was_drawn_before():
    streams = Streams(3, 4)
    streams.of(8).random(dtype=np.float32)  # leaves half of a word behind
    assert streams.of(9).integers(2**31, size=5, dtype=np.int32).tolist() == [
        *np.random.Generator(np.random.Philox(key=[3, 4], counter=[0, 0, 0, 9])).integers(2**31, size=5, dtype=np.int32)
    ]


# batches

RECIPES = [(40, 16, 4), (41, 16, 4), (50, 16, 4), (35, 16, 4), (33, 8, 2)]


def samples_by_step(count, recipe, world_size, start_step, seed=3):
    """The samples of each step: the ranks' micro-batches in order of their number."""
    plan = make_plan(Train(global_batch_size=recipe[0], micro_batch_size=recipe[1], epochs=2), count)
    data = Data(image_size=8, train_crop="resize")
    ranks = [
        list(train_batches(Numbered(count), data, plan, seed, rank, world_size, start_step, 2, CPU))
        for rank in range(world_size)
    ]
    steps = []
    for number, parts in enumerate(zip(*ranks, strict=True), start_step):
        micro_batches = {}
        for part in parts:
            for index, batch in enumerate(part.batches, part.first):
                assert index not in micro_batches
                micro_batches[index] = batch.labels.tolist()
                assert batch.images[:, 0, 0, 0].tolist() == [sample % 256 for sample in batch.labels.tolist()]
        in_order = [micro_batches[index] for index in range(len(micro_batches))]
        assert [len(part) for part in in_order] == [len(part) for part in plan.micro_batches(number)]
        steps.append([sample for part in in_order for sample in part])
    return plan, steps


@pytest.mark.parametrize(("count", "batch", "micro"), RECIPES)
def test_the_order_is_the_same_for_any_number_of_workers(count, batch, micro):
    plan, alone = samples_by_step(count, (batch, micro), 1, 0)
    for epoch in range(2):
        steps = alone[epoch * plan.steps_per_epoch : (epoch + 1) * plan.steps_per_epoch]
        assert [sample for step in steps for sample in step] == epoch_order(3, epoch, count).tolist()
    for world_size in (2, 3, 4):
        assert samples_by_step(count, (batch, micro), world_size, 0)[1] == alone


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (2, 2), (3, 2)])
def test_resuming_in_the_middle_of_an_epoch_on_other_workers_misses_and_repeats_nothing(before, after):
    """A20."""
    plan, whole = samples_by_step(64, (4, 2), 1, 0)
    assert plan.steps_per_epoch == 16
    for stop in (5, 16, 17):
        seen = samples_by_step(64, (4, 2), min(before, 2), 0)[1][:stop]
        seen += samples_by_step(64, (4, 2), min(after, 2), stop)[1]
        assert seen == whole


def test_a_runs_augmentation_repeats_for_any_workers_and_threads_and_differs_by_epoch():
    """B49: the pixels themselves."""
    data = Data(image_size=16, flip=0.5, color_jitter=(0.3, 0.3, 0.3), crop_scale=(0.3, 1.0))
    photo = encoded(photograph().resize((64, 48)))

    class Same(Numbered):
        def read(self, index):  # noqa: ARG002
            return photo

    plan = make_plan(Train(global_batch_size=8, micro_batch_size=2, epochs=2), 16)

    def pixels(world_size, threads, seed=0):
        found = {}
        for rank in range(world_size):
            steps = train_batches(Same(16), data, plan, seed, rank, world_size, 0, threads, CPU)
            for step, own in enumerate(steps):
                for batch in own.batches:
                    for image, label in zip(batch.images, batch.labels, strict=True):
                        found[step // 2, int(label)] = image.numpy().tobytes()
        return found

    alone = pixels(1, 1)
    assert len(alone) == 32
    assert len(set(alone.values())) == 32  # another crop for each sample and each epoch
    assert pixels(3, 4) == alone
    assert pixels(1, 1, seed=1) != alone


def test_batches_are_uint8_nhwc_with_int64_labels():
    plan = make_plan(Train(global_batch_size=4, micro_batch_size=2, epochs=1), 4)
    own = next(train_batches(Numbered(4, 12), Data(image_size=10), plan, 0, 0, 1, 0, 1, CPU))
    assert len(own.batches) == 2
    assert own.first == 0
    for batch in own.batches:
        assert batch.images.shape == (2, 10, 10, 3)
        assert batch.images.dtype == torch.uint8
        assert batch.labels.dtype == torch.int64
    assert own.batches[0].images[0].unique().tolist() == [int(own.batches[0].labels[0])]


@pytest.mark.parametrize("count", [1, 2, 9, 10])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_evaluation_takes_each_image_once_in_whole_batches(count, world_size):
    data = Data(image_size=8)
    batches = [
        [batch.labels.tolist() for batch in eval_batches(Numbered(count), data, 3, rank, world_size, 2, CPU)]
        for rank in range(world_size)
    ]
    alone = [list(range(low, min(low + 3, count))) for low in range(0, count, 3)]
    assert [batch for rank in batches for batch in rank] == alone


def test_loader_threads_end_with_their_iterator():
    plan = make_plan(Train(global_batch_size=4, micro_batch_size=2, epochs=9), 40)
    batches = train_batches(Numbered(40), Data(image_size=8), plan, 0, 0, 1, 0, 3, CPU)
    next(batches)
    assert any(thread.name.startswith("loader") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_loader_threads_compute_on_one_thread_each_and_leave_the_others_theirs():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    in_loader = []

    class Watching(Numbered):
        def read(self, index):
            in_loader.append(torch.get_num_threads())
            return super().read(index)

    try:
        plan = make_plan(Train(global_batch_size=4, micro_batch_size=2, epochs=9), 40)
        batches = train_batches(Watching(40), Data(image_size=8), plan, 0, 0, 1, 0, 3, CPU)
        for _ in range(12):  # the others have begun before, and then their number was set
            next(batches)
        assert set(in_loader) == {1}
        seen = [torch.get_num_threads()]
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        batches.close()
        assert seen == [2, 2]
    finally:
        torch.set_num_threads(before)


def test_an_unreadable_image_ends_the_batches_at_its_step_by_name(tmp_path):
    make_folder(tmp_path, {"train/a": 8, "val/a": 1})
    source = open_folder(tmp_path).train
    bad = epoch_order(0, 0, 8)[5]
    (tmp_path / f"train/a/{bad}.png").write_bytes(b"no image")
    plan = make_plan(Train(global_batch_size=2, micro_batch_size=2, epochs=1), 8)
    batches = train_batches(source, Data(image_size=8), plan, 0, 0, 1, 0, 2, CPU)
    next(batches)
    next(batches)
    with pytest.raises(DataError, match=rf"train/a/{bad}\.png"):
        next(batches)
