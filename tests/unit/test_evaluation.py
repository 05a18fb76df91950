import io
import math
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch import distributed as dist

from raytrain.config import Data
from raytrain.data.loader import Batch, eval_batches
from raytrain.distributed import Runtime
from raytrain.evaluation import evaluate
from tests.ranks import run_ranks

IMAGES = 10
CLASSES = 7


class Numbered:
    """Image i is of one grey, 20 times i."""

    def __init__(self, labels):
        self.labels = np.array(labels, dtype=np.int64)
        self.class_names = tuple("abcdefg")

    def prefetch(self, indices):
        pass

    def read(self, index):
        file = io.BytesIO()
        Image.new("L", (8, 8), 20 * index).save(file, "png")
        return file.getvalue()

    def name(self, index):
        return f"sample {index}"


class Table(torch.nn.Module):
    """A network that knows each image's logits by its grey."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.as_tensor(logits, dtype=torch.float32)

    def forward(self, images):
        return self.logits[images[:, 0, 0, 0].long() // 20]


def make_case(count=IMAGES):
    rng = np.random.default_rng(3)
    return rng.normal(0, 3, (count, CLASSES)).astype(np.float32), rng.integers(CLASSES, size=count)


def by_hand(logits, labels):
    logits = logits.astype(np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
    places = (logits > logits[np.arange(len(labels)), labels][:, None]).sum(1)
    return {"val/top1": (places < 1).mean(), "val/top5": (places < 5).mean(), "val/loss": losses.mean()}


def evaluate_cases(runtime):
    """A validation set of ten images, and one of a single image."""
    results = []
    for count in (IMAGES, 1):
        logits, labels = make_case(count)
        batches = eval_batches(
            Numbered(labels), Data(image_size=8), 3, runtime.rank, runtime.world_size, 1, runtime.device
        )
        results.append(evaluate(Table(logits), batches, CLASSES, runtime))
    return results


def test_one_process_measures_what_is_computed_by_hand():
    for result, count in zip(evaluate_cases(Runtime()), (IMAGES, 1), strict=True):
        expected = by_hand(*make_case(count))
        assert result["val/samples"] == count
        assert result["val/top1"] == expected["val/top1"]
        assert result["val/top5"] == expected["val/top5"]
        assert result["val/loss"] == pytest.approx(expected["val/loss"], rel=1e-6)
    assert 0 < by_hand(*make_case())["val/top1"] < by_hand(*make_case())["val/top5"] < 1  # the case tells them apart


def evaluate_on_four_then_three(runtime, folder):
    """Starting processes is what takes time, so the four of them become three and one."""
    of_four = evaluate_cases(runtime)
    dist.destroy_process_group()
    rank, size, meet = (runtime.rank, 3, "three") if runtime.rank < 3 else (0, 1, "one")
    dist.init_process_group("gloo", init_method=f"file://{folder}/{meet}", rank=rank, world_size=size)
    return of_four, evaluate_cases(Runtime(rank, rank, size))


def test_any_number_of_workers_measures_the_same_to_the_last_bit(tmp_path):
    """A09."""
    alone = evaluate_cases(Runtime())
    assert run_ranks(4, evaluate_on_four_then_three, str(tmp_path)) == [(alone, alone)] * 4


def batch_of(logits, labels):
    images = (torch.arange(len(labels), dtype=torch.uint8) * 20).view(-1, 1, 1, 1).expand(-1, 8, 8, 3)
    return Table(logits), [Batch(images, torch.tensor(labels), len(labels))]


@pytest.mark.parametrize(("classes", "has_top5"), [(2, False), (3, False), (5, False), (6, True), (1000, True)])
def test_top5_is_left_out_where_it_says_nothing(classes, has_top5):
    model, batches = batch_of(np.zeros((2, classes)), [0, classes - 1])
    result = evaluate(model, batches, classes, Runtime())
    assert ("val/top5" in result) == has_top5
    assert set(result) - {"val/top5"} == {"val/top1", "val/loss", "val/samples"}
    assert result["val/loss"] == pytest.approx(math.log(classes), rel=1e-6)


def test_batches_of_unequal_size_weigh_by_their_images():
    logits = np.zeros((10, 6), np.float32)
    logits[:9, 0] = 50  # nine right and without loss
    logits[9, 1] = 1
    model, (whole,) = batch_of(logits, [0] * 9 + [3])
    parts = [Batch(whole.images[low:high], whole.labels[low:high], high - low) for low, high in ((0, 9), (9, 10))]
    result = evaluate(model, parts, 6, Runtime())
    assert result["val/loss"] == pytest.approx(math.log(5 + math.e) / 10, rel=1e-6)
    assert result["val/top1"] == 0.9


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_reported_as_such(value):
    logits = np.zeros((4, 6), np.float32)
    logits[1, 0] = value
    result = evaluate(*batch_of(logits, [1, 1, 1, 1]), 6, Runtime())
    assert math.isnan(result["val/loss"])
    assert result["val/samples"] == 4
    assert math.isfinite(result["val/top1"])


@pytest.mark.parametrize("size", [1e-6, 1e3, 1e9, 1e12, 1e30])
def test_a_loss_of_any_size_is_reported_truly(size):
    """A run that diverges has losses like these before they are no numbers."""
    logits = np.zeros((4, 6), np.float32)
    logits[:, 0] = size
    loss = evaluate(*batch_of(logits, [1, 1, 1, 1]), 6, Runtime())["val/loss"]
    assert loss == pytest.approx(size + math.log1p(5 * math.exp(-size)), rel=1e-5)


def test_a_network_is_evaluated_in_eval_mode_and_left_as_it_was():
    class Mode(Table):
        def forward(self, images):
            assert not self.training
            assert not torch.is_grad_enabled()
            return super().forward(images)

    for training in (True, False):
        model, batches = batch_of(np.zeros((2, 6)), [0, 1])
        model = Mode(model.logits).train(training)
        evaluate(model, batches, 6, Runtime())
        assert model.training == training


def evaluate_slowly(runtime):
    """Five batches of 1.5 s on two ranks: 4.5 s, and 1.5 s of waiting for the rank with one batch more."""

    def batches():
        for _ in range(3 - runtime.rank):
            time.sleep(1.5)
            yield Batch(torch.zeros(2, 4, 4, 3, dtype=torch.uint8), torch.tensor([0, 1]), 2)

    return evaluate(Zeros(), batches(), 2, runtime)


class Zeros(torch.nn.Module):
    """Logits of 0 for two classes: the first is the answer, its probability a half."""

    def forward(self, images):
        return torch.zeros(len(images), 2)


def test_an_evaluation_may_take_longer_than_a_collective():
    """C61: no rank waits for all of another's evaluation."""
    both = run_ranks(2, evaluate_slowly, timeout_seconds=4)
    assert both[0] == both[1] == {"val/top1": 0.5, "val/loss": pytest.approx(math.log(2)), "val/samples": 10.0}
