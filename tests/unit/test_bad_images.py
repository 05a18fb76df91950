"""Images that cannot be decoded, where they are to be left out: the mean is over the others, and all ranks agree."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from raytrain import checkpoint
from raytrain.commandline import build
from raytrain.data.bad import BadImages
from raytrain.data.loader import NO_LABEL, Batch, StepBatches, eval_batches, train_batches
from raytrain.data.order import epoch_order
from raytrain.data.source import Sources
from raytrain.distributed import Runtime
from raytrain.errors import DataError, StoppedError
from raytrain.evaluation import evaluate
from raytrain.loop import compute_gradients, train
from raytrain.model import build_model
from raytrain.monitor import Monitor
from raytrain.plan import make_plan
from raytrain.recorder import Recorder, read_metrics
from raytrain.state import TrainState
from tests.places import at
from tests.ranks import run_ranks

CPU = torch.device("cpu")


class Some:
    """Images of noise, of which some cannot be decoded."""

    class_names = ("a", "b", "c")

    def __init__(self, count, bad=()):
        rng = np.random.default_rng(count)
        self.labels = np.arange(count) % 3
        self._files = []
        for _ in range(count):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "jpeg")
            self._files.append(file.getvalue())
        for number, index in enumerate(bad):
            self._files[index] = (b"", b"text", self._files[index][:300])[number % 3]

    def prefetch(self, indices):
        pass

    def read(self, index):
        return self._files[index]

    def name(self, index):
        return f"some {index}"


def make_config(**overrides):
    sections = {
        "data": {"image_size": 32, "on_bad_image": "skip", "max_bad_fraction": 0.5},
        "model": {"name": "resnet18"},
        "optim": {"base_lr": 0.02},
        "schedule": {"lr_scaling": "none", "warmup_epochs": 0},
        "train": {
            "epochs": 2,
            "global_batch_size": 12,
            "micro_batch_size": 4,
            "precision": "fp32",
            "log_every": 2,
        },
        "checkpoint": {"every_epochs": None},
    }
    return build(sections, {key.replace("__", "."): value for key, value in overrides.items()}, "test")


def batches_of(source, config, world_size=1, rank=0, bad=None):
    plan = make_plan(config.train, len(source.labels))
    return list(train_batches(source, config.data, plan, 0, rank, world_size, 0, 2, CPU, bad))


def test_a_batch_is_the_good_images_as_if_the_others_had_not_been():
    config = make_config(train__epochs=1, train__global_batch_size=20, train__micro_batch_size=20)
    whole = batches_of(Some(20), config)[0].batches[0]
    bad = BadImages(20, 0.5)
    part = batches_of(Some(20, bad=(3, 7, 11)), config, bad=bad)[0].batches[0]
    assert part.count == 17
    source = Some(20, bad=(3, 7, 11))
    order = [int(sample) for sample in epoch_order(0, 0, 20)]
    kept = [row for row, sample in enumerate(order) if sample not in (3, 7, 11)]
    assert part.images.equal(whole.images[kept])
    assert part.labels.equal(whole.labels[kept])
    found = bad.share(Runtime())
    assert [(image.sample, image.name) for image in found] == [(i, source.name(i)) for i in (3, 7, 11)]
    assert "it is empty" in found[0].reason
    assert "of no known format" in found[1].reason
    assert bad.share(Runtime()) == []
    assert len(bad) == 3


@pytest.mark.parametrize("mixup", [None, 0.5])
def test_a_micro_batch_of_less_than_two_is_filled_without_labels(mixup):
    config = make_config(
        train__epochs=1, train__global_batch_size=4, train__micro_batch_size=2, data__mixup_alpha=mixup
    )
    source = Some(4, bad=tuple(epoch_order(0, 0, 4)[[0, 1, 2]]))
    first, second = batches_of(source, config, bad=BadImages(4, 1))[0].batches
    assert first.count == 0
    assert second.count == 1
    assert first.images.shape == second.images.shape == (2, 32, 32, 3)
    assert first.labels.tolist() == [NO_LABEL, NO_LABEL]
    assert second.labels.tolist() == [NO_LABEL, source.labels[epoch_order(0, 0, 4)[3]]]


def gradients(runtime, config, own, micro_batches, images):
    state = TrainState(config, 3, runtime, "fp32")
    totals = compute_gradients(config, state, own, micro_batches, images, 0, "fp32", runtime, Monitor()).totals
    return totals, [parameter.grad.clone() for parameter in state.model.parameters()]


@pytest.mark.parametrize("reduction", ["float", "exact"])
def test_the_gradient_is_that_of_the_mean_over_the_good_images(reduction):
    config = make_config(comm__reduction=reduction)
    source = Some(12, bad=(2, 5, 9))
    own = batches_of(source, config, bad=BadImages(12, 1))[0]
    totals, got = gradients(Runtime(), config, own, 3, 12)
    assert float(totals.images) == 9
    model = build_model(config.model, config.data, 3, 0)
    loss = torch.zeros(())
    for batch in own.batches:
        loss = loss + functional.cross_entropy(model(batch.images), batch.labels, reduction="sum")
    (loss / 9).backward()
    assert float(totals.loss) == pytest.approx(loss.item(), rel=1e-5)
    for ours, parameter in zip(got, model.parameters(), strict=True):
        assert torch.allclose(ours, parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("reduction", ["float", "exact"])
def test_a_step_without_any_good_image_changes_nothing(reduction):
    config = make_config(comm__reduction=reduction)
    images = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    own = StepBatches([Batch(images, torch.full((2,), NO_LABEL), 0)], 0)
    totals, got = gradients(Runtime(), config, own, 1, 2)
    assert float(totals.images) == float(totals.loss) == 0
    assert all((gradient == 0).all() for gradient in got)


def test_evaluation_counts_the_good_images_only():
    source, config = Some(10, bad=(0, 4)), make_config()
    bad = BadImages(10, 0.5)

    class First(torch.nn.Module):
        def forward(self, images):
            return torch.tensor([[2.0, 0.0, 0.0]]).expand(len(images), 3)

    batches = eval_batches(source, config.data, 3, 0, 1, 1, CPU, bad)
    metrics = evaluate(First(), batches, 3, Runtime())
    labels = np.delete(source.labels, [0, 4])
    assert metrics["val/samples"] == 8
    assert metrics["val/top1"] == pytest.approx((labels == 0).mean())
    loss = functional.cross_entropy(First()(labels), torch.from_numpy(labels))
    assert metrics["val/loss"] == pytest.approx(float(loss), rel=1e-6)
    assert [image.sample for image in bad.share(Runtime())] == [0, 4]


def test_a_validation_batch_without_any_good_image_counts_nothing():
    source, config = Some(5, bad=(3, 4)), make_config()
    batches = list(eval_batches(source, config.data, 3, 0, 1, 1, CPU, BadImages(5, 1)))
    assert [batch.count for batch in batches] == [3, 0]
    model = TrainState(config, 3, Runtime(), "fp32").model
    assert evaluate(model, batches, 3, Runtime())["val/samples"] == 3


def test_a_validation_set_without_any_good_image_is_refused():
    batches = eval_batches(Some(3, bad=(0, 1, 2)), make_config().data, 3, 0, 1, 1, CPU, BadImages(3, 1))
    model = TrainState(make_config(), 3, Runtime(), "fp32").model
    with pytest.raises(DataError, match="not one image of the validation set"):
        evaluate(model, batches, 3, Runtime())


def run(runtime, config, folder, stop_after=None):
    sources = Sources(Some(26, bad=(1, 8, 9, 20)), Some(7, bad=(2,)))
    asked = []

    def stop_requested():
        asked.append(1)
        return 15 if stop_after is not None and len(asked) >= stop_after else 0

    runtime = Runtime(runtime.rank, runtime.local_rank, runtime.world_size, stop_requested=stop_requested)
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(at(folder) if runtime.rank == 0 else None)
    try:
        train(config, runtime, sources, at(folder / "checkpoints"), recorder)
    except StoppedError:
        assert stop_after is not None
    finally:
        recorder.close()


def test_any_number_of_workers_leaves_out_the_same_and_ends_in_the_same_bits(tmp_path):
    """A12: ranks stay in step, each bad image is counted once, no other is used twice."""
    config = make_config(comm__reduction="exact")
    for world_size in (1, 3):
        run_ranks(world_size, run, config, tmp_path / str(world_size))
    run_ranks(2, run, config, tmp_path / "resumed", 4)  # inside the second epoch
    run_ranks(3, run, config, tmp_path / "resumed")
    expected = checkpoint.load_weights(at(checkpoint.saved(at(tmp_path / "1/checkpoints"))[-1]))
    for name in ("1", "3", "resumed"):
        weights = checkpoint.load_weights(at(checkpoint.saved(at(tmp_path / name / "checkpoints"))[-1]))
        assert all(weights[key].equal(tensor) for key, tensor in expected.items())
        lines = (tmp_path / name / "bad_images.jsonl").read_text().splitlines()
        listed = [(row["split"], row["sample"], row["image"]) for row in map(json.loads, lines)]
        assert sorted(listed) == [
            *(("train", sample, f"some {sample}") for sample in (1, 8, 9, 20)),
            ("val", 2, "some 2"),
        ]
        rows = read_metrics(at(tmp_path / name))
        assert rows[-1]["data/bad_images"] == 5
        assert rows[-1]["val/samples"] == 6
        assert rows[-1]["step"] == 6


def test_too_many_bad_images_end_the_run_on_all_ranks(tmp_path):
    config = make_config(data__max_bad_fraction=0.1)
    messages = run_ranks(2, fails_in, config, tmp_path)
    assert len(set(messages)) == 1
    assert "of 26 images are bad, more than data.max_bad_fraction 0.1" in messages[0]
    assert "cannot decode image some " in messages[0]


def fails_in(runtime, config, folder):
    with pytest.raises(DataError) as caught:
        train(
            config,
            runtime,
            Sources(Some(26, bad=(1, 8, 9, 20)), Some(7)),
            at(folder / "checkpoints"),
            Recorder(),
        )
    return str(caught.value)


def test_by_default_a_bad_image_ends_the_run(tmp_path):
    config = make_config(data__on_bad_image="fail")
    with pytest.raises(DataError, match="cannot decode image some"):
        train(config, Runtime(), Sources(Some(26, bad=(1,)), Some(7)), at(tmp_path), Recorder())
