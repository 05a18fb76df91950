"""Law 1: one, two, three and four workers compute the same thing, and it is what plain PyTorch computes."""

from dataclasses import replace


import pytest
import torch
from torch.nn import functional

from raytrain import checkpoint
from raytrain.commandline import build
from raytrain.data.loader import train_batches
from raytrain.data.source import Sources, open_sources
from raytrain.errors import StoppedError
from raytrain.loop import compute_gradients, train, update
from raytrain.model import build_model
from raytrain.plan import make_plan
from raytrain.recorder import Recorder
from raytrain.schedule import make_schedule
from raytrain.state import TrainState
from tests.ranks import run_ranks

IMAGES = 98  # three steps of 32 and one of 2 a epoch: the last has nothing for most ranks


class Part:
    """The first images of a source."""

    def __init__(self, source, count):
        self.class_names, self.labels = source.class_names, source.labels[:count]
        self.read, self.name = source.read, source.name


def make_config(**overrides):
    sections = {
        "data": {
            "source": "digits",
            "image_size": 32,
            "train_crop": "random_resized",
            "crop_scale": [0.6, 1.0],
        },
        "model": {"name": "resnet18"},
        "optim": {"base_lr": 0.02},
        "schedule": {"lr_scaling": "none", "warmup_epochs": 1},
        "train": {
            "epochs": 5,
            "global_batch_size": 32,
            "micro_batch_size": 8,
            "precision": "fp32",
            "label_smoothing": 0.1,
            "log_every": 1,
        },
        "checkpoint": {"every_epochs": None},
    }
    return build(sections, {key.replace("__", "."): value for key, value in overrides.items()}, "test")


def open_part():
    sources = open_sources(make_config().data)
    return Sources(Part(sources.train, IMAGES), Part(sources.val, 30))


def follow_trajectory(runtime, config, weights):
    """Loss, gradients and batch-norm statistics of one step from each of the given weights."""
    torch.set_num_threads(1)
    sources = open_part()
    plan = make_plan(config.train, IMAGES)
    state = TrainState(config, 10, runtime, "fp32")
    batches = train_batches(
        sources.train, config.data, plan, 0, runtime.rank, runtime.world_size, 0, 1, torch.device("cpu")
    )
    seen = []
    for step, own in enumerate(batches):
        state.model.body.load_state_dict(weights[step])
        state.batchnorm.reload()
        parts = plan.micro_batches(step)
        images = parts[-1].stop - parts[0].start
        totals = compute_gradients(config, state, own, len(parts), images, step, "fp32", runtime)
        state.batchnorm.update(totals.batchnorm / len(parts), step + 1)
        gradients = [parameter.grad.clone() for parameter in state.model.parameters()]
        seen.append((float(totals.loss) / images, gradients, state.batchnorm.running.clone()))
    return seen


def plain_pytorch(config):
    """The same recipe as a plain loop: every micro-batch in turn, one process, no code of the loop's.

    Returns the weights before each step, and its loss, gradients and batch-norm statistics.
    """
    sources = open_part()
    plan = make_plan(config.train, IMAGES)
    learning_rate = make_schedule(config, plan)
    model = build_model(config.model, config.data, 10, config.run.seed)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    running = [torch.cat([torch.zeros_like(n.running_mean), torch.ones_like(n.running_var)]) for n in norms]
    for norm in norms:
        norm.momentum = 1.0
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0}],
        lr=1,
        momentum=0.9,
        nesterov=True,
    )
    weights, seen = [], []
    for step, own in enumerate(
        train_batches(sources.train, config.data, plan, 0, 0, 1, 0, 1, torch.device("cpu"))
    ):
        for norm, statistics in zip(norms, running, strict=True):
            norm.running_mean.copy_(statistics[: len(norm.running_mean)])
            norm.running_var.copy_(statistics[len(norm.running_mean) :])
        weights.append({key: value.clone() for key, value in model.body.state_dict().items()})
        optimizer.zero_grad()
        images, total, means = sum(len(b.labels) for b in own.batches), 0.0, [0.0] * len(norms)
        for batch in own.batches:
            logits = model(batch.images)
            loss = (
                functional.cross_entropy(logits, batch.labels, reduction="sum", label_smoothing=0.1) / images
            )
            loss.backward()
            total += loss.item()
            for i, norm in enumerate(norms):
                means[i] += torch.cat([norm.running_mean, norm.running_var]) / len(own.batches)
        running = [0.9 * old + 0.1 * mean for old, mean in zip(running, means, strict=True)]
        seen.append((total, [p.grad.clone() for p in model.parameters()], torch.cat(running)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
    return weights, seen


@pytest.fixture(scope="module")
def reference():
    return plain_pytorch(make_config())


@pytest.mark.parametrize("reduction", ["float", "exact"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_step_is_that_of_plain_pytorch(world_size, reduction, reference):
    weights, expected = reference
    config = make_config(comm__reduction=reduction)
    for rank_saw in run_ranks(world_size, follow_trajectory, config, weights):
        assert len(rank_saw) == 20
        for (loss, gradients, statistics), (want_loss, want_gradients, want_statistics) in zip(
            rank_saw, expected, strict=True
        ):
            assert loss == pytest.approx(want_loss, rel=1e-5)
            assert relative_error(statistics, want_statistics) < 1e-5
            for got, want in zip(gradients, want_gradients, strict=True):
                assert relative_error(got, want) < 1e-5


def relative_error(got, want):
    return float((got - want).norm() / want.norm().clamp_min(1e-12)) if want.norm() else float(got.norm())


def run_training(runtime, config, folder, stop_after=None):
    """Trains a part of the digits; asked to stop so that it does after `stop_after` steps."""
    torch.set_num_threads(1)
    rows = []

    def listen(event):
        if event["kind"] == "metrics":
            rows.append({"step": event["step"], **event["metrics"]})

    stopping = replace(runtime, stop_requested=lambda: 15 * (len(rows) + 1 == stop_after))
    try:
        train(config, stopping, open_part(), folder, Recorder(None, listen))
    except StoppedError:
        assert rows[-1]["step"] == stop_after
    return rows


def final_bits(folder):
    newest = checkpoint.saved(folder)[-1]
    tensors = {name: checkpoint.load_weights(newest, name) for name in ("model", "ema")}
    return newest.name, tensors, checkpoint.load_state(newest)["metrics"]


def assert_same_bits(folder, other):
    name, tensors, metrics = final_bits(folder)
    other_name, other_tensors, other_metrics = final_bits(other)
    assert name == other_name == "step_00000008"
    for kind, weights in tensors.items():
        assert weights.keys() == other_tensors[kind].keys()
        for key, tensor in weights.items():
            assert torch.equal(tensor, other_tensors[kind][key]), (kind, key)
    assert metrics == other_metrics
    assert metrics["val/samples"] == 30


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_exact_reduction_gives_the_same_bits_for_any_number_of_workers(tmp_path, precision):
    config = make_config(train__precision=precision, train__epochs=2, train__ema_decay=0.9, comm__reduction="exact")
    for world_size in (1, 2, 3, 4):
        run_ranks(world_size, run_training, config, tmp_path / str(world_size))
        assert_same_bits(tmp_path / "1", tmp_path / str(world_size))
    run_ranks(2, run_training, config, tmp_path / "resumed", 3)
    assert checkpoint.saved(tmp_path / "resumed")[-1].name == "step_00000003"
    run_ranks(3, run_training, config, tmp_path / "resumed")
    assert_same_bits(tmp_path / "1", tmp_path / "resumed")


@pytest.mark.parametrize("world_size", [1, 3])
def test_float_reduction_resumes_to_the_same_bits(tmp_path, world_size):
    config = make_config(train__epochs=2, train__ema_decay=0.9)
    straight = run_ranks(world_size, run_training, config, tmp_path / "straight")[0]
    before = run_ranks(world_size, run_training, config, tmp_path / "resumed", 3)[0]
    after = run_ranks(world_size, run_training, config, tmp_path / "resumed")[0]
    assert_same_bits(tmp_path / "straight", tmp_path / "resumed")
    assert without_speed(before + after) == without_speed(straight)


def without_speed(rows):
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]
