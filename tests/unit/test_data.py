import io
import struct
import threading
import zlib
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data as photographs
from sklearn.datasets import load_digits, load_sample_image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import v2 as transforms

from raytrain.config import Data, Train
from raytrain.data.augment import _random_box, eval_transform, train_transform
from raytrain.data.decode import decode
from raytrain.data.loader import eval_batches, train_batches
from raytrain.data.order import epoch_order, sample_rng
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
    return open_sources(Data(source="folder", path=root, image_size=8, train_crop="resize", **keys))


class Numbered:
    """Sample i is an image of one colour with the label i, so that a batch says which samples it holds."""

    def __init__(self, count, side=8):
        self.class_names = tuple(str(number) for number in range(count))
        self.labels = np.arange(count)
        self._side = side

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
        read = [np.asarray(decode(source.read(i), source.name(i))) for i in range(len(source.labels))]
        # 17 levels of ink became as many greys, and come back
        assert (np.stack(read) * (16 / 255)).round().reshape(-1, 64).tolist() == scans[rows].tolist()
    again = open_sources(Data(source="digits", cache_path=tmp_path))
    assert again.train.read(7) == sources.train.read(7)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".arrow", ".arrow"]


def test_digits_that_cannot_be_stored_or_read_are_refused_by_path(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file/.*data\.cache_path"):
        open_sources(Data(source="digits", cache_path=tmp_path / "file"))
    (tmp_path / "digits-1-train.arrow").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"digits-1-train\.arrow"):
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
        tuple(sample_rng(seed, epoch, sample).random(3))
        for seed in (0, 1)
        for epoch in range(20)
        for sample in (*range(20), 1_281_166)
    }
    assert len(draws) == 2 * 20 * 21
    assert sample_rng(1, 2, 3).random(9).tolist() == sample_rng(1, 2, 3).random(9).tolist()
    every = np.stack([sample_rng(0, 0, sample).random(100) for sample in range(200)])
    assert abs(np.corrcoef(every[:, 0], every[:, 1])[0, 1]) < 0.3
    assert abs(every.mean() - 0.5) < 0.01


def test_no_samples_stream_is_that_of_the_order():
    order = np.random.Generator(np.random.Philox(key=[0, 0], counter=[0, 0, 1, 0])).integers(2**32, size=64)
    for sample in range(100):
        assert not set(sample_rng(0, 0, sample).integers(2**32, size=64)) & set(order)


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


# from bytes to pixels


def size_bomb():
    """A PNG of 13500 x 13500 black pixels in 22 kB."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 13500, 13500, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(13500 * (1 + 1688)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@cache
def broken_images():
    whole = encoded(photograph())
    return {
        "empty.jpg": b"",
        "half.jpg": whole[: len(whole) // 2],
        "head.jpg": whole[:300],
        "text.jpg": b"this is not an image\n",
        "bomb.png": size_bomb(),
        "half.png": encoded(photograph("chelsea"), "png")[:50_000],
        "half.webp": encoded(photograph("chelsea"), "webp")[:5_000],
    }


@pytest.mark.parametrize("name", broken_images())
def test_a_broken_image_is_refused_by_name_and_reason(name):
    """A12."""
    with pytest.raises(DataError, match=f"cannot decode image some/{name}: .+; repair or remove it"):
        decode(broken_images()[name], f"some/{name}")


@cache
def modes():
    photo = photograph("chelsea").resize((40, 30))
    transparent = photo.convert("RGBA")
    transparent.putalpha(photo.convert("L"))
    palette = photo.quantize(32)
    return {
        "grey": encoded(photo.convert("L"), "png"),
        "grey JPEG": encoded(photo.convert("L")),
        "grey with alpha": encoded(transparent.convert("LA"), "png"),
        "two levels": encoded(photo.convert("1"), "png"),
        "RGBA": encoded(transparent, "png"),
        "palette": encoded(palette, "png"),
        "palette, one transparent": encoded(palette, "png", transparency=3),
        "palette, each transparent": encoded(palette, "png", transparency=bytes(range(32))),
        "CMYK": encoded(photo.convert("CMYK")),
        "progressive": encoded(photo, progressive=True),
        "BMP": encoded(photo, "bmp"),
        "WebP": encoded(photo, "webp"),
        "animated": encoded(photo, "webp", save_all=True, append_images=[photo.rotate(90)]),
    }


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")  # Pillow's advice
@pytest.mark.parametrize("kind", modes())
def test_every_kind_of_image_becomes_what_pil_converts_it_to(kind):
    class One(Numbered):
        def read(self, index):  # noqa: ARG002
            return modes()[kind]

    expected = np.asarray(Image.open(io.BytesIO(modes()[kind])).convert("RGB"))
    plan = make_plan(Train(global_batch_size=2, micro_batch_size=2, epochs=1), 2)
    data = Data(image_size=30, train_crop="resize")
    got = next(train_batches(One(2), data, plan, 0, 0, 1, 0, 1, CPU)).batches[0].images.numpy()
    assert got.shape == (2, 30, 30, 3)
    assert got.dtype == np.uint8
    assert (got == expected[:, 5:35]).all()  # the middle 30 x 30 of 40 x 30


# what is done to them


@pytest.mark.parametrize("size", [224, 96, 32])
def test_a_square_image_is_evaluated_as_by_torchvision_exactly(size):
    photo = photograph()
    reference = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size)])
    got = eval_transform(photo, Data(image_size=size))
    assert (np.asarray(got) == np.asarray(reference(photo))).all()


@pytest.mark.parametrize("name", ["astronaut", "coffee", "chelsea", "china", "flower"])
@pytest.mark.parametrize(("resize", "size"), [(256, 224), (224, 224), (72, 64), (40, 32)])
def test_evaluation_is_torchvisions_resize_and_centre_crop(name, resize, size):
    reference = transforms.Compose([transforms.Resize(resize), transforms.CenterCrop(size)])
    data = Data(image_size=size, eval_resize=resize)
    wide = photograph(name).crop((0, 0, 450, 300))  # 3 to 2, so that torchvision rounds no size and no place
    for image in (wide, wide.transpose(Image.Transpose.ROTATE_90)):
        got, expected = (np.asarray(by).astype(int) for by in (eval_transform(image, data), reference(image)))
        assert got.shape == (size, size, 3)
        assert abs(got - expected).mean() < 1


@pytest.mark.parametrize("name", ["chelsea", "china"])
def test_evaluation_takes_the_very_middle_of_an_image_of_any_shape(name):
    data = Data(image_size=32, eval_resize=37)
    photo = photograph(name)
    plain = np.asarray(eval_transform(photo, data)).astype(int)
    for turn in (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.ROTATE_180):
        turned = eval_transform(photo.transpose(turn), data).transpose(turn)
        assert abs(np.asarray(turned).astype(int) - plain).max() <= 1


def test_resize_for_training_is_evaluation():
    data = Data(image_size=64, eval_resize=72, train_crop="resize")
    photo = photograph("coffee")
    got = np.asarray(train_transform(photo, data, sample_rng(0, 0, 0)))
    assert (got == np.asarray(eval_transform(photo, data))).all()


def boxes(image, data, count=2000):
    return np.array([_random_box(image, data, sample_rng(0, 0, sample)) for sample in range(count)])


@pytest.mark.parametrize("shape", [(500, 375), (375, 500), (8, 8), (64, 64), (1, 1), (3, 2)])
def test_a_random_box_lies_in_the_image_and_has_a_size(shape):
    image = Image.new("L", shape)
    left, top, right, bottom = boxes(image, Data()).T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (right <= image.width).all()
    assert (bottom <= image.height).all()
    assert (right > left).all()
    assert (bottom > top).all()


def test_area_and_shape_of_random_boxes_keep_to_their_ranges_and_fill_them():
    data = Data(crop_scale=(0.2, 0.6), crop_ratio=(0.5, 2.0))
    left, top, right, bottom = boxes(Image.new("L", (1000, 1000)), data).T
    area, ratio = (right - left) * (bottom - top) / 1e6, (right - left) / (bottom - top)
    assert 0.199 < area.min() < 0.21
    assert 0.58 < area.max() < 0.601
    assert 0.497 < ratio.min() < 0.52
    assert 1.9 < ratio.max() < 2.01
    assert abs(np.log(ratio).mean()) < 0.03  # as many wide as tall
    assert abs(left.mean() - (1000 - right).mean()) < 15  # no side preferred
    assert abs(top.mean() - (1000 - bottom).mean()) < 15


def test_random_boxes_are_distributed_as_torchvisions():
    image = Image.new("L", (500, 375))
    torch.manual_seed(0)
    reference = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], [0.75, 4 / 3]) for _ in range(4000)])
    left, top, right, bottom = boxes(image, Data(), 4000).T
    for got, want in zip((top, left, bottom - top, right - left), reference.T, strict=True):
        assert got.mean() == pytest.approx(want.mean(), rel=0.06)
        assert got.std() == pytest.approx(want.std(), rel=0.06)


@pytest.mark.parametrize("shape", [(1, 500), (500, 1), (2, 499), (30, 3000)])
def test_a_thin_image_is_cropped_to_an_allowed_shape_and_never_to_nothing(shape):
    image = Image.new("L", shape, 77)
    data = Data(image_size=8)
    for box in boxes(image, data, 200):
        width, height = box[2] - box[0], box[3] - box[1]
        assert 0 <= box[0] < box[2] <= image.width
        assert 0 <= box[1] < box[3] <= image.height
        assert 0.5 < width / height < 2  # 3/4 to 4/3 and whole pixels
    for sample in range(20):
        assert np.asarray(train_transform(image, data, sample_rng(0, 0, sample))).tolist() == [[77] * 8] * 8
    assert np.asarray(eval_transform(image, data)).tolist() == [[77] * 8] * 8


def test_an_image_that_no_crop_fits_gives_its_largest_allowed_middle():
    """As torchvision's fallback."""
    data = Data(crop_scale=(0.9, 1.0), crop_ratio=(1.0, 1.0))
    assert boxes(Image.new("L", (300, 100)), data, 3).tolist() == [[100, 0, 200, 100]] * 3
    assert boxes(Image.new("L", (100, 300)), data, 3).tolist() == [[0, 100, 100, 200]] * 3


def test_flip_probabilities_of_0_1_and_a_half():
    photo, rng = photograph("chelsea"), np.random.default_rng(0)
    plain = np.asarray(eval_transform(photo, Data(image_size=16)))

    def flipped(probability):
        data = Data(image_size=16, train_crop="resize", flip=probability)
        got = np.asarray(train_transform(photo, data, rng))
        assert (got == plain).all() or (got == plain[:, ::-1]).all()
        return (got != plain).any()

    assert not any(flipped(0.0) for _ in range(30))
    assert all(flipped(1.0) for _ in range(30))
    assert 0.4 < np.mean([flipped(0.5) for _ in range(300)]) < 0.6


def jittered(image, strength, sample):
    data = Data(image_size=image.width, train_crop="resize", color_jitter=strength)
    return np.asarray(train_transform(image, data, sample_rng(0, 0, sample))).astype(int)


def test_brightness_stays_within_its_bounds_and_fills_them():
    grey = Image.new("RGB", (8, 8), (100, 100, 100))
    values = [jittered(grey, (0.4, 0.0, 0.0), sample)[0, 0, 0] for sample in range(500)]
    assert 60 <= min(values) <= 61
    assert 139 <= max(values) <= 140
    assert jittered(Image.new("L", (8, 8), 100), (0.4, 0.0, 0.0), 0).shape == (8, 8, 3)


def test_contrast_and_saturation_stay_within_their_bounds():
    halves = Image.new("RGB", (8, 8), (100, 100, 100))
    halves.paste((150, 150, 150), (0, 0, 4, 8))  # mean 125, each 25 from it
    spreads = [np.ptp(jittered(halves, (0.0, 0.4, 0.0), sample)) for sample in range(300)]
    assert 29 <= min(spreads) <= 33
    assert 67 <= max(spreads) <= 71
    red = Image.new("RGB", (8, 8), (150, 100, 100))
    spreads = [np.ptp(jittered(red, (0.0, 0.0, 0.4), sample)) for sample in range(300)]
    assert 29 <= min(spreads) <= 33
    assert 67 <= max(spreads) <= 71
    assert np.ptp(jittered(Image.new("RGB", (8, 8), (90, 90, 90)), (0.0, 1.0, 1.0), 0)) == 0


def test_jitter_of_nothing_changes_nothing():
    photo = photograph("chelsea").resize((32, 32))
    assert (jittered(photo, (0.0, 0.0, 0.0), 1) == np.asarray(photo)).all()
