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
from raytrain.loop import compute_gradients, train
from raytrain.model import build_model
from raytrain.monitor import Monitor
from raytrain.plan import make_plan
from raytrain.recorder import Recorder
from raytrain.schedule import make_schedule
from raytrain.state import TrainState
from tests.places import at
from tests.ranks import run_ranks

IMAGES = 98  # three steps of 32 and one of 2 a epoch: the last has nothing for most ranks


class Part:
    """The first images of a source."""

    def __init__(self, source, count):
        self.class_names, self.labels = source.class_names, source.labels[:count]
        self.read, self.name, self.prefetch = source.read, source.name, source.prefetch


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


def follow_trajectory(runtime, config, reference):
    """The largest relative error, by step, of loss, gradients and batch-norm statistics from the same weights."""
    sources = open_part()
    plan = make_plan(config.train, IMAGES)
    state = TrainState(config, 10, runtime, "fp32")
    batches = train_batches(
        sources.train, config.data, plan, 0, runtime.rank, runtime.world_size, 0, 1, torch.device("cpu")
    )
    errors = []
    for step, (own, (weights, want)) in enumerate(zip(batches, reference, strict=True)):
        state.model.body.load_state_dict(weights)
        state.batchnorm.reload()
        parts = plan.micro_batches(step)
        images = parts[-1].stop - parts[0].start
        outcome = compute_gradients(config, state, own, len(parts), images, step, "fp32", runtime, Monitor())
        state.batchnorm.update(outcome.statistics, step + 1)
        gradients = {name: parameter.grad for name, parameter in state.model.body.named_parameters()}
        statistics = [state.model.body.state_dict()[name] for name in running_names(state.model.body)]
        got = {"loss": outcome.totals.loss / images, **gradients, "statistics": torch.cat(statistics)}
        assert got.keys() == want.keys()
        errors.append(max(relative_error(got[name], want[name]) for name in want))
    return errors


def relative_error(got, want):
    return float((got - want).norm() / want.norm()) if want.norm() else float(got.norm())


def running_names(body):
    return [name for name in body.state_dict() if name.endswith(("running_mean", "running_var"))]


def plain_pytorch(config):
    """The same recipe as a plain loop: every micro-batch in turn, one process, no code of the loop's.

    Returns, for each step, the weights before it, and its loss, gradients and batch-norm statistics.
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
    seen = []
    for step, own in enumerate(train_batches(sources.train, config.data, plan, 0, 0, 1, 0, 1, torch.device("cpu"))):
        for norm, statistics in zip(norms, running, strict=True):
            norm.running_mean.copy_(statistics[: len(norm.running_mean)])
            norm.running_var.copy_(statistics[len(norm.running_mean) :])
        weights = {key: value.clone() for key, value in model.body.state_dict().items()}
        optimizer.zero_grad()
        images, total, means = sum(len(b.labels) for b in own.batches), 0.0, [0.0] * len(norms)
        for batch in own.batches:
            logits = model(batch.images)
            loss = functional.cross_entropy(logits, batch.labels, reduction="sum", label_smoothing=0.1) / images
            loss.backward()
            total += loss.item()
            for i, norm in enumerate(norms):
                means[i] += torch.cat([norm.running_mean, norm.running_var]) / len(own.batches)
        running = [0.9 * old + 0.1 * mean for old, mean in zip(running, means, strict=True)]
        gradients = {name: parameter.grad.clone() for name, parameter in model.body.named_parameters()}
        seen.append((weights, {"loss": torch.tensor(total), **gradients, "statistics": torch.cat(running)}))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
    return seen


def run_training(runtime, config, folder, stop_after=None):
    """Trains on a part of the digits; asked to stop so that it does after `stop_after` steps."""
    rows = []

    def listen(event):
        if event["kind"] == "metrics":
            rows.append({"step": event["step"], **event["metrics"]})

    stopping = replace(runtime, stop_requested=lambda: 15 * (len(rows) + 1 == stop_after))
    try:
        train(config, stopping, open_part(), at(folder), Recorder(None, listen))
    except StoppedError:
        assert rows[-1]["step"] == stop_after
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def everything(runtime, folder):
    """What all tests of this file need of one number of workers, in one start of the processes."""
    torch.set_num_threads(1)
    world_size, seen = runtime.world_size, {}
    for reduction in ("float", "exact"):
        config = make_config(comm__reduction=reduction)
        seen[reduction] = follow_trajectory(runtime, config, torch.load(folder / "reference.pt", mmap=True))
    for precision in ("fp32", "bf16"):
        config = short_run(comm__reduction="exact", train__precision=precision)
        run_training(runtime, config, folder / precision / str(world_size))
        if world_size == 2:
            run_training(runtime, config, folder / precision / "resumed", 3)
        if world_size == 3:  # goes on where two workers stopped, as the processes for two have run before
            run_training(runtime, config, folder / precision / "resumed")
    if world_size in (1, 3):
        seen["straight"] = run_training(runtime, short_run(), folder / "float" / f"straight{world_size}")
        before = run_training(runtime, short_run(), folder / "float" / f"resumed{world_size}", 3)
        seen["resumed"] = before + run_training(runtime, short_run(), folder / "float" / f"resumed{world_size}")
    return seen


def short_run(**overrides):
    """Of a smaller network, as bits are compared, whatever computes them."""
    sizes = {"model__name": "shufflenet_v2_x0_5", "optim__base_lr": 1e-4, "train__epochs": 2, "train__ema_decay": 0.9}
    return make_config(**sizes | overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("equality")


@pytest.fixture(scope="module")
def outcomes(folder):
    torch.save(plain_pytorch(make_config()), folder / "reference.pt")  # a file, so that all processes share its memory
    return {world_size: run_ranks(world_size, everything, folder) for world_size in (1, 2, 3, 4)}


@pytest.mark.parametrize("reduction", ["float", "exact"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_step_is_that_of_plain_pytorch(world_size, reduction, outcomes):
    for rank_saw in outcomes[world_size]:
        errors = rank_saw[reduction]
        assert len(errors) == 20
        assert max(errors) < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("workers", ["2", "3", "4", "resumed"])
def test_exact_reduction_ends_in_the_same_bits(workers, precision, folder, outcomes):
    assert [path.name for path in checkpoint.saved(at(folder / precision / "resumed"))] == [
        "step_00000003",
        "step_00000008",
    ]
    assert_same_bits(folder / precision / "1", folder / precision / workers)


@pytest.mark.parametrize("world_size", [1, 3])
def test_float_reduction_resumes_to_the_same_bits(world_size, folder, outcomes):
    assert_same_bits(folder / "float" / f"straight{world_size}", folder / "float" / f"resumed{world_size}")
    seen = outcomes[world_size][0]
    assert [row["step"] for row in seen["straight"]] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert seen["resumed"] == seen["straight"]


def assert_same_bits(folder, other):
    paths = checkpoint.saved(at(folder))[-1], checkpoint.saved(at(other))[-1]
    assert [path.name for path in paths] == ["step_00000008"] * 2
    for kind in ("model", "ema"):
        weights, others = (checkpoint.load_weights(at(path), kind) for path in paths)
        assert weights.keys() == others.keys()
        for key, tensor in weights.items():
            assert torch.equal(tensor, others[key]), (kind, key)
    metrics, other_metrics = (checkpoint.load_state(at(path))["metrics"] for path in paths)
    assert metrics == other_metrics
    assert metrics["val/samples"] == 30
