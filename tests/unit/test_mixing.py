"""RandAugment, TrivialAugment, random erasing, MixUp, CutMix: torchvision's results, each sample's own draws."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data as photographs
from torchvision.transforms import v2 as transforms

from raytrain.config import Data, Train
from raytrain.data import autoaugment
from raytrain.data.augment import draw_changes, train_transform
from raytrain.data.loader import train_batches
from raytrain.data.mix import Mix, draw_mix, mix
from raytrain.data.order import COLOUR, Streams
from raytrain.plan import make_plan

CPU = torch.device("cpu")


@cache
def photograph():
    return Image.fromarray(photographs.chelsea()).resize((100, 80))


REFERENCES = {"randaugment": transforms.RandAugment(), "trivialaugment": transforms.TrivialAugmentWide()}
GREATEST = {
    "randaugment": {**autoaugment._GREATEST_RAND, "TranslateX": 150 / 331 * 100, "TranslateY": 150 / 331 * 80},
    "trivialaugment": autoaugment._GREATEST_TRIVIAL,
}


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("name", autoaugment._GREATEST_RAND)
def test_each_operation_is_torchvisions_at_every_level(kind, name):
    reference, photo = REFERENCES[kind], photograph()
    levels, signed = reference._AUGMENTATION_SPACE[name]
    magnitudes = levels(31, 80, 100)
    for level in range(0, 31, 3):
        for sign in (1, -1) if signed else (1,):
            magnitude = 0.0 if magnitudes is None else float(magnitudes[level]) * sign
            want = reference._apply_image_or_video_transform(photo, name, magnitude, reference.interpolation, {})
            same = {"Posterize": 8 - magnitude, "Solarize": 1 - magnitude}.get(name, magnitude)  # in our terms
            ours = sign * (GREATEST[kind][name] or 0.0) * level / 30
            assert (round(ours) if name == "Posterize" else ours) == pytest.approx(same, abs=1e-5)
            assert (np.asarray(autoaugment.apply(photo, name, same)) == np.asarray(want)).all()


def test_no_operation_of_torchvisions_is_missing():
    for reference in REFERENCES.values():
        assert set(autoaugment._GREATEST_RAND) == set(reference._AUGMENTATION_SPACE)


def drawn_operations(monkeypatch, draw, count):
    """Name and magnitude of each operation that so many samples are given."""
    drawn = []

    def note(image, name, magnitude):
        drawn.append((name, magnitude))
        return image

    monkeypatch.setattr(autoaugment, "apply", note)
    streams = Streams(0, 0, COLOUR)
    for sample in range(count):
        draw(photograph(), streams.of(sample))
    return drawn


def test_randaugment_draws_each_operation_as_often_with_either_sign(monkeypatch):
    drawn = drawn_operations(monkeypatch, lambda image, rng: autoaugment.rand_augment(image, 3, 9, rng), 2000)
    assert len(drawn) == 6000
    counts = Counter(name for name, _ in drawn)
    assert len(counts) == 14
    assert all(330 < count < 530 for count in counts.values())
    rotations = [magnitude for name, magnitude in drawn if name == "Rotate"]
    assert {abs(magnitude) for magnitude in rotations} == {9.0}  # 30 degrees * 9 / 30
    assert 0.4 < np.mean(np.array(rotations) > 0) < 0.6
    assert {magnitude for name, magnitude in drawn if name == "Solarize"} == {0.3}


def test_trivialaugment_draws_one_operation_at_any_level(monkeypatch):
    drawn = drawn_operations(monkeypatch, autoaugment.trivial_augment, 4000)
    assert len(drawn) == 4000
    levels = Counter(round(abs(magnitude) / 135 * 30) for name, magnitude in drawn if name == "Rotate")
    assert set(levels) == set(range(31))


def augmented(data, sample, epoch=0):
    photo = torch.from_numpy(np.array(photograph()))
    changes = draw_changes(80, 100, data, Streams(0, epoch).of(sample))
    return train_transform(photo, changes, data, Streams(0, epoch, COLOUR).of(sample)).numpy()


@pytest.mark.parametrize("kind", REFERENCES)
def test_augmentation_is_a_function_of_the_sample_and_the_epoch(kind):
    data = Data(image_size=64, train_crop="resize", auto_augment=kind, randaugment_magnitude=20)
    images = [augmented(data, sample, epoch).tobytes() for sample in range(20) for epoch in range(2)]
    assert images == [augmented(data, sample, epoch).tobytes() for sample in range(20) for epoch in range(2)]
    assert len(set(images)) > 25  # an identity, or a posterise that changes nothing, comes now and then


def test_erasing_fills_a_rectangle_of_torchvisions_sizes_with_the_mean():
    data = Data(image_size=60, train_crop="resize", random_erasing=1.0, mean=(0.1, 0.5, 0.9))
    plain = augmented(Data(image_size=60, train_crop="resize"), 0)
    areas, ratios = [], []
    for sample in range(300):
        changed = (augmented(data, sample) != plain).any(2)
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        areas.append(height * width / 3600)
        ratios.append(width / height)
        assert (augmented(data, sample)[changed] == [26, 128, 230]).all()
    assert 0.015 < min(areas) < 0.04
    assert 0.29 < max(areas) < 0.35
    assert min(ratios) < 0.45
    assert max(ratios) > 2.2
    half = Data(image_size=60, train_crop="resize", random_erasing=0.5)
    assert 0.4 < np.mean([(augmented(half, sample) != plain).any() for sample in range(300)]) < 0.6


def test_mixup_and_cutmix_are_torchvisions_for_the_same_draw():
    torch.manual_seed(0)
    images = torch.randint(0, 256, (6, 20, 20, 3), dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2, 3, 3, 1])
    rows = images.permute(0, 3, 1, 2).float()
    ours, targets = mix(images, labels, torch.tensor([Mix(0.3, 0, 0, 0, 0)] * 6), 4)
    reference = transforms.MixUp(num_classes=4)
    parameters = {"labels": labels, "batch_size": 6, "lam": 0.3}
    assert torch.allclose(ours, reference.transform(rows, parameters).permute(0, 2, 3, 1), atol=1e-3)
    want = reference._mixup_label(labels, lam=0.3)
    assert torch.allclose(targets, want)

    ours, targets = mix(images, labels, torch.tensor([Mix(1.0, 3, 5, 11, 20)] * 6), 4)
    reference = transforms.CutMix(num_classes=4)
    left = 1 - 8 * 15 / 400
    parameters = {"labels": labels, "batch_size": 6, "box": (5, 3, 20, 11), "lam_adjusted": left}
    assert ours.equal(reference.transform(rows, parameters).permute(0, 2, 3, 1))
    assert torch.allclose(targets, reference._mixup_label(labels, lam=left))


def test_the_draws_follow_their_distributions():
    streams = Streams(0, 0)
    weights = np.array([draw_mix(Data(mixup_alpha=0.4), streams.of(sample)).weight for sample in range(4000)])
    assert weights.mean() == pytest.approx(0.5, abs=0.03)
    assert weights.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.05)  # of Beta(0.4, 0.4)
    data = Data(cutmix_alpha=1.0, image_size=100)
    boxes = np.array([draw_mix(data, streams.of(sample)) for sample in range(4000)])
    _, top, left, bottom, right = boxes.T
    assert (top >= 0).all()
    assert (top <= bottom).all()
    assert (bottom <= 100).all()
    assert (left >= 0).all()
    assert (right <= 100).all()
    areas = (bottom - top) * (right - left) / 1e4
    torch.manual_seed(0)
    reference = transforms.CutMix(num_classes=2, alpha=1.0)
    drawn = [reference.make_params([torch.zeros(2, 3, 100, 100)])["lam_adjusted"] for _ in range(2000)]
    assert areas.mean() == pytest.approx(1 - np.mean(drawn), abs=0.02)
    both = [draw_mix(Data(mixup_alpha=1.0, cutmix_alpha=1.0), streams.of(sample)) for sample in range(1000)]
    assert 0.4 < np.mean([drawn.weight < 1 for drawn in both]) < 0.6


class Photographs:
    """Sample i has the label i of 40."""

    class_names = tuple(str(number) for number in range(40))
    labels = np.arange(40)

    def prefetch(self, indices):
        pass

    def read(self, index):
        return torch.full((30, 30, 3), index * 6, dtype=torch.uint8)

    def name(self, index):
        return str(index)


@pytest.mark.parametrize("keys", [{"mixup_alpha": 0.5}, {"cutmix_alpha": 1.0}, {"mixup_alpha": 1.0, "cutmix_alpha": 1}])
def test_mixed_batches_are_the_same_for_any_workers_and_threads(keys):
    data = Data(image_size=16, **keys)
    plan = make_plan(Train(global_batch_size=40, micro_batch_size=20, epochs=2), 40)  # more than a thread's chunk

    def batches(world_size, threads):
        found = {}
        for rank in range(world_size):
            for step, own in enumerate(train_batches(Photographs(), data, plan, 0, rank, world_size, 0, threads, CPU)):
                for number, batch in enumerate(own.batches, own.first):
                    found[step, number] = batch
        return [found[key] for key in sorted(found)]

    alone = batches(1, 1)
    assert len(alone) == 4
    for one, other in zip(alone, batches(2, 3), strict=True):
        assert one.images.equal(other.images)
        assert one.labels.equal(other.labels)
    for batch in alone:
        assert batch.images.dtype == torch.float32
        assert batch.images.shape == (20, 16, 16, 3)
        assert batch.labels.shape == (20, 40)
        assert batch.count == 20
        assert torch.allclose(batch.labels.sum(1), torch.ones(20))
        values = batch.labels @ (torch.arange(40.0) * 6)  # a label's share is its image's share of the pixels
        assert torch.allclose(batch.images.mean((1, 2, 3)), values, atol=0.01)
