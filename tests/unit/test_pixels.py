"""From bytes to pixels, and what is done to them."""

import io
import struct
import zlib
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data as photographs
from sklearn.datasets import load_sample_image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import v2 as transforms

from raytrain.config import Data
from raytrain.data import augment
from raytrain.data.decode import decode
from raytrain.data.order import Streams
from raytrain.errors import DataError


def photograph(name="astronaut"):
    pixels = load_sample_image(f"{name}.jpg") if name in ("china", "flower") else getattr(photographs, name)()
    return Image.fromarray(pixels)


def encoded(image, kind="jpeg", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def eval_transform(image, data):
    return augment.eval_transform(torch.from_numpy(np.array(image)), data).numpy()


def train_transform(image, data, rng):
    """With one stream for shape and colours."""
    changes = augment.draw_changes(image.height, image.width, data, rng)
    return augment.train_transform(torch.from_numpy(np.array(image)), changes, data, rng).numpy()


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
        decode(broken_images()[name], lambda: f"some/{name}")


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


@pytest.mark.parametrize("kind", modes())
def test_every_kind_of_image_becomes_what_pil_converts_it_to(kind):
    image = Image.open(io.BytesIO(modes()[kind]))
    expected = image.convert("RGBA").convert("RGB") if "palette" in kind else image.convert("RGB")
    got = decode(modes()[kind], str)
    assert got.dtype == np.uint8
    assert (got == np.asarray(expected)).all()


# what is done to them


@pytest.mark.parametrize("name", ["astronaut", "coffee", "chelsea", "china", "flower"])
@pytest.mark.parametrize(("resize", "size"), [(256, 224), (224, 224), (72, 64), (40, 32)])
def test_evaluation_is_torchvisions_resize_and_centre_crop(name, resize, size):
    reference = transforms.Compose([transforms.Resize(resize), transforms.CenterCrop(size)])
    data = Data(image_size=size, eval_resize=resize)
    photo = photograph(name)
    for image in (photo, photo.rotate(90, expand=True), photo.crop((0, 0, 301, 257)), photo.crop((5, 0, 40, 300))):
        got, expected = eval_transform(image, data).astype(int), np.asarray(reference(image)).astype(int)
        assert got.shape == (size, size, 3)
        assert abs(got - expected).mean() < 0.1
        assert abs(got - expected).max() <= 2


@pytest.mark.parametrize("size", [224, 96, 32])
def test_without_eval_resize_the_short_side_becomes_image_size(size):
    reference = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size)])
    photo = photograph("coffee")
    difference = eval_transform(photo, Data(image_size=size)).astype(int) - np.asarray(reference(photo))
    assert abs(difference).mean() < 0.1


@pytest.mark.parametrize("name", ["coffee", "chelsea", "flower"])
def test_a_random_crop_is_resized_as_by_pillow(name):
    photo = photograph(name)
    differences = []
    for sample in range(40):
        top, left, height, width = augment._random_box(
            photo.height, photo.width, (0.08, 1.0), (0.75, 4 / 3), Streams(0, 0).of(sample)
        )
        got = train_transform(photo, Data(image_size=96), Streams(0, 0).of(sample)).astype(int)
        box = (left, top, left + width, top + height)
        expected = photo.resize((96, 96), Image.Resampling.BILINEAR, box=box)
        cropped = photo.crop(box).resize((96, 96), Image.Resampling.BILINEAR)  # as torchvision: nothing from outside
        assert abs(got - np.asarray(expected)).mean() < 1
        differences.append(abs(got - np.asarray(cropped)))
    assert np.mean(differences) < 0.1
    assert np.max(differences) <= 2


def test_resize_for_training_is_evaluation():
    data = Data(image_size=64, eval_resize=72, train_crop="resize")
    photo = photograph("coffee")
    assert (train_transform(photo, data, Streams(0, 0).of(0)) == eval_transform(photo, data)).all()


def boxes(image, data, count=2000):
    """Left, top, right and bottom of each."""
    drawn = np.array(
        [
            augment._random_box(image.height, image.width, data.crop_scale, data.crop_ratio, Streams(0, 0).of(sample))
            for sample in range(count)
        ]
    )
    top, left, height, width = drawn.T
    return np.stack([left, top, left + width, top + height], 1)


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
    image = Image.new("RGB", shape, (77, 77, 77))
    data = Data(image_size=8)
    for box in boxes(image, data, 200):
        width, height = box[2] - box[0], box[3] - box[1]
        assert 0 <= box[0] < box[2] <= image.width
        assert 0 <= box[1] < box[3] <= image.height
        assert 0.5 < width / height < 2  # 3/4 to 4/3 and whole pixels
    for sample in range(20):
        assert train_transform(image, data, Streams(0, 0).of(sample)).tolist() == [[[77] * 3] * 8] * 8
    assert eval_transform(image, data).tolist() == [[[77] * 3] * 8] * 8


def test_an_image_that_no_crop_fits_gives_its_largest_allowed_middle():
    """As torchvision's fallback."""
    data = Data(crop_scale=(0.9, 1.0), crop_ratio=(1.0, 1.0))
    assert boxes(Image.new("L", (300, 100)), data, 3).tolist() == [[100, 0, 200, 100]] * 3
    assert boxes(Image.new("L", (100, 300)), data, 3).tolist() == [[0, 100, 100, 200]] * 3


def test_flip_probabilities_of_0_1_and_a_half():
    photo, rng = photograph("chelsea"), np.random.default_rng(0)
    plain = eval_transform(photo, Data(image_size=16))

    def flipped(probability):
        data = Data(image_size=16, train_crop="resize", flip=probability)
        got = train_transform(photo, data, rng)
        assert (got == plain).all() or (got == plain[:, ::-1]).all()
        return (got != plain).any()

    assert not any(flipped(0.0) for _ in range(30))
    assert all(flipped(1.0) for _ in range(30))
    assert 0.4 < np.mean([flipped(0.5) for _ in range(300)]) < 0.6


def jittered(image, strength, sample):
    data = Data(image_size=image.width, train_crop="resize", color_jitter=strength)
    return train_transform(image, data, Streams(0, 0).of(sample)).astype(int)


def test_brightness_stays_within_its_bounds_and_fills_them():
    grey = Image.new("RGB", (8, 8), (100, 100, 100))
    values = [jittered(grey, (0.4, 0.0, 0.0), sample)[0, 0, 0] for sample in range(500)]
    assert 60 <= min(values) <= 61
    assert 139 <= max(values) <= 140


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
