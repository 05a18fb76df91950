"""The loop: what a step is, what stops it, and that a run that was stopped ends as if it had not been."""

import io
import math
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch.nn import functional

from raytrain import checkpoint
from raytrain.commandline import build
from raytrain.data.loader import Batch, StepBatches, train_batches
from raytrain.data.source import Sources
from raytrain.distributed import Runtime
from raytrain.errors import CheckpointError, ConfigError, DataError, NonFiniteError, StoppedError
from raytrain.loop import compute_gradients, train, update
from raytrain.monitor import Monitor
from raytrain.plan import make_plan
from raytrain.recorder import Recorder, read_metrics
from raytrain.schedule import make_schedule
from raytrain.state import TrainState
from tests.places import at
from tests.ranks import run_ranks

CLASSES = 3


class Noise:
    """Small images of noise, each class about a colour of its own."""

    class_names = ("red", "green", "blue")

    def __init__(self, count, seed=0):
        rng = np.random.default_rng(seed)
        self.labels = np.arange(count, dtype=np.int64) % CLASSES
        self._files = []
        for label in self.labels:
            pixels = rng.integers(0, 100, (32, 32, 3), dtype=np.uint8)
            pixels[..., label] += 120
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "png")
            self._files.append(file.getvalue())

    def prefetch(self, indices):
        pass

    def read(self, index):
        return self._files[index]

    def name(self, index):
        return f"noise {index}"


def make_config(**overrides):
    """squeezenet: dropout and no batch norm, and 20 ms for four images."""
    sections = {
        "data": {"image_size": 32, "train_crop": "random_resized", "crop_scale": [0.5, 1.0], "num_threads": 1},
        "model": {"name": "squeezenet1_1"},
        "optim": {"base_lr": 0.005},
        "schedule": {"lr_scaling": "none", "warmup_epochs": 1},
        "train": {
            "epochs": 4,
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "precision": "fp32",
            "log_every": 1,
        },
        "checkpoint": {"every_epochs": None, "keep_last": 50},
    }
    return build(sections, {key.replace("__", "."): value for key, value in overrides.items()}, "test")


def run(config, folder: Path, images=18, runtime=None, val=5):
    """Trains, and returns the progress and the rows of metrics.jsonl."""
    sources = Sources(Noise(images), Noise(val, seed=1))
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(at(folder))
    try:
        progress = train(config, runtime or Runtime(), sources, at(folder / "checkpoints"), recorder)
    finally:
        recorder.close()
    return progress, read_metrics(at(folder))


def series(rows, key):
    return [(row["step"], row[key]) for row in rows if key in row]


def stop_after(step, signum=signal.SIGTERM):
    """A runtime that is asked to stop while it computes a step, counted from 1."""
    asked = []

    def stop_requested():
        asked.append(1)
        return signum if len(asked) >= step else 0

    return Runtime(stop_requested=stop_requested)


def saved_steps(folder):
    return [int(path.name.removeprefix("step_")) for path in checkpoint.saved(at(folder / "checkpoints"))]


def assert_same_bits(one, two):
    """Two checkpoints hold the same weights, averages, optimizer and progress."""
    for name in ("model", "ema"):
        if at(one).exists(f"{name}.safetensors"):
            ours, theirs = checkpoint.load_weights(at(one), name), checkpoint.load_weights(at(two), name)
            assert ours.keys() == theirs.keys()
            assert [key for key in ours if not ours[key].equal(theirs[key])] == []
    ours, theirs = checkpoint.load_training(at(one)), checkpoint.load_training(at(two))
    key = "exp_avg" if "exp_avg" in ours["optimizer"]["state"][0] else "momentum_buffer"
    momenta = [[value[key] for value in t["optimizer"]["state"].values()] for t in (ours, theirs)]
    assert all(a.equal(b) for a, b in zip(*momenta, strict=True))
    assert ours["ema_updates"] == theirs["ema_updates"]
    ours, theirs = (checkpoint.load_state(at(path)) for path in (one, two))
    for state in (ours, theirs):
        del state["progress"]["train_seconds"]
    assert ours == theirs


# what a run does


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four epochs of 18 images in steps of 8, 8 and 2, with a moving average; warm-up over two of them."""
    folder = tmp_path_factory.mktemp("straight")
    config = make_config(train__ema_decay=0.8, schedule__warmup_epochs=2)
    return config, *run(config, folder), folder


def test_the_learning_rate_of_each_step_is_the_schedules(straight):
    config, progress, rows, _ = straight
    plan = make_plan(config.train, 18)
    schedule = make_schedule(config, plan)
    assert plan.total_steps == progress.step == 12
    assert series(rows, "train/lr") == [(step + 1, schedule(step)) for step in range(12)]


def test_each_metric_is_recorded_once_a_step_and_evaluation_once_an_epoch(straight):
    _, _, rows, _ = straight
    assert [step for step, _ in series(rows, "train/loss")] == list(range(1, 13))
    assert series(rows, "val/samples") == [(3, 5.0), (6, 5.0), (9, 5.0), (12, 5.0)]
    assert series(rows, "epoch") == [(step, step / 3) for step in range(1, 13)]
    assert len({row["train/loss"] for row in rows if "train/loss" in row}) == 12
    for row in rows:
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in row.values())
        assert 0 <= row.get("perf/data_wait_fraction", 0) <= 1


def test_the_last_checkpoint_says_what_was_trained(straight):
    _, progress, rows, folder = straight
    assert saved_steps(folder) == [12]
    state = checkpoint.load_state(at(folder / "checkpoints/step_00000012"))
    assert state["class_names"] == ["red", "green", "blue"]
    assert state["images_seen"] == 4 * 18
    assert state["epoch"] == 4
    assert state["metrics"]["val/top1"] == series(rows, "val/top1")[-1][1]
    best = max(score for _, score in series(rows, "val/top1"))
    assert progress.best_top1 == best
    assert progress.best_step == max(step for step, score in series(rows, "val/top1") if score == best)
    training = checkpoint.load_training(at(folder / "checkpoints/step_00000012"))
    assert training["ema_updates"] == 12


def test_training_learns(tmp_path):
    _, rows = run(make_config(train__max_steps=30), tmp_path, images=24)
    losses = [loss for _, loss in series(rows, "train/loss")]
    assert np.mean(losses[-9:]) < 0.6 * np.mean(losses[:9])


def test_a_finished_run_that_is_resumed_does_nothing(straight, tmp_path):
    config, _, _, folder = straight
    shutil.copytree(folder, tmp_path / "copy")
    before = (tmp_path / "copy/metrics.jsonl").read_text()
    progress, _ = run(config, tmp_path / "copy")
    assert progress.step == 12
    assert (tmp_path / "copy/metrics.jsonl").read_text() == before
    assert saved_steps(tmp_path / "copy") == [12]


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"checkpoint__every_epochs": 1}, [3, 6, 9, 12]),
        ({"checkpoint__every_epochs": 2}, [6, 12]),
        ({"checkpoint__every_steps": 5}, [5, 10, 12]),
        ({"checkpoint__every_steps": 2, "checkpoint__keep_last": 1, "checkpoint__keep_best": 0}, [12]),
        ({"train__max_steps": 4, "checkpoint__every_epochs": 1}, [3, 4]),
    ],
)
def test_checkpoints_are_saved_when_they_are_due(keys, steps, tmp_path):
    run(make_config(**keys), tmp_path)
    assert saved_steps(tmp_path) == steps


def test_evaluation_is_done_when_it_is_due_and_at_the_end(tmp_path):
    _, rows = run(make_config(train__eval_every_epochs=2, train__max_steps=8), tmp_path)
    assert [step for step, _ in series(rows, "val/top1")] == [6, 8]


def test_logged_losses_are_means_over_the_images_since_the_last_log(straight, tmp_path):
    _, _, rows, _ = straight
    losses = dict(series(rows, "train/loss"))
    _, rare = run(make_config(train__ema_decay=0.8, schedule__warmup_epochs=2, train__log_every=2), tmp_path)
    weights = [8, 8, 2] * 4
    logged = series(rare, "train/loss")
    assert [step for step, _ in logged] == [2, 3, 4, 6, 8, 9, 10, 12]  # each second, and each evaluated
    last = 0
    for step, loss in logged:
        part = range(last, step)
        mean = sum(losses[i + 1] * weights[i] for i in part) / sum(weights[i] for i in part)
        assert loss == pytest.approx(mean, rel=1e-6)
        last = step


# A10: a step is a step


def gradient_of(config, batches, images, parts):
    state = TrainState(config, CLASSES, Runtime(), "fp32")
    state.model.eval()  # no dropout
    totals = compute_gradients(
        config, state, StepBatches(batches, 0), parts, images, 0, "fp32", Runtime(), Monitor()
    ).totals
    return totals, [parameter.grad.clone() for parameter in state.model.parameters()]


@pytest.mark.parametrize("reduction", ["float", "exact"])
@pytest.mark.parametrize(("images", "sizes"), [(28, [4, 4, 4]), (23, [3, 4]), (21, [2, 3]), (19, [3])])
def test_the_last_short_step_has_the_gradient_of_one_big_batch(images, sizes, reduction):
    """28 images are 7 micro-batches of 4: one step of four, and one of the other three. The rest are ragged."""
    config = make_config(train__global_batch_size=16, train__label_smoothing=0.1, comm__reduction=reduction)
    plan = make_plan(config.train, images)
    assert plan.steps_per_epoch == 2
    steps = list(train_batches(Noise(images), config.data, plan, 0, 0, 1, 0, 1, torch.device("cpu")))
    parts = steps[1].batches
    rest = images - 16
    assert [len(batch.labels) for batch in parts] == sizes
    totals, gradients = gradient_of(config, parts, rest, len(parts))
    images, labels, counts = zip(*parts, strict=True)
    whole = Batch(torch.cat(images), torch.cat(labels), sum(counts))
    body = build_plain(config)
    pixels = whole.images.permute(0, 3, 1, 2) / 255
    pixels = (pixels - torch.tensor(config.data.mean).view(3, 1, 1)) / torch.tensor(config.data.std).view(3, 1, 1)
    loss = functional.cross_entropy(body(pixels), whole.labels, label_smoothing=0.1)
    loss.backward()
    assert float(totals.loss) / rest == pytest.approx(loss.item(), rel=1e-5)
    for got, parameter in zip(gradients, body.parameters(), strict=True):
        assert float((got - parameter.grad).norm()) <= 1e-5 * max(float(parameter.grad.norm()), 1e-3)


def build_plain(config):
    """The same network by torchvision alone."""
    torch.manual_seed(config.run.seed)
    return torchvision.models.squeezenet1_1(num_classes=CLASSES).eval()


@pytest.mark.parametrize(("images", "batch", "per_epoch"), [(28, 16, 2), (12, 32, 1)])
def test_optimizer_steps_of_an_epoch_with_accumulation(images, batch, per_epoch, tmp_path):
    config = make_config(train__global_batch_size=batch, train__epochs=2)
    progress, rows = run(config, tmp_path, images=images)
    assert progress.step == 2 * per_epoch == len(series(rows, "train/lr"))


def test_max_steps_counts_optimizer_steps(tmp_path):
    config = make_config(train__global_batch_size=16, train__max_steps=1, schedule__warmup_epochs=0)
    progress, rows = run(config, tmp_path, images=28)
    assert progress.step == 1
    assert checkpoint.load_state(at(tmp_path / "checkpoints/step_00000001"))["images_seen"] == 16
    assert series(rows, "train/lr") == [(1, 0.005)]


def test_clipping_scales_the_whole_gradient_to_its_greatest_norm():
    config = make_config(train__clip_grad_norm=0.5, optim__momentum=0, optim__nesterov=False, optim__weight_decay=0)
    state = TrainState(config, CLASSES, Runtime(), "fp32")
    parameters = [parameter.data for parameter in state.model.parameters()]
    before = [parameter.clone() for parameter in parameters]
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert update(state, 0.1, 0.5)
    expected = 0.1 * 0.5 / math.sqrt(sum(tensor.numel() for tensor in before))
    for old, new in zip(before, parameters, strict=True):
        assert float((old - new).abs().max()) == pytest.approx(expected, rel=2e-2, abs=1e-7)
    moved = math.sqrt(sum(float(((old - new) ** 2).sum()) for old, new in zip(before, parameters, strict=True)))
    assert moved == pytest.approx(0.1 * 0.5, rel=1e-3)


# B21, B23: stopped and resumed


@pytest.mark.parametrize("stop", [2, 6, 7])
def test_a_run_that_was_stopped_ends_in_the_same_bits_as_one_that_was_not(straight, stop, tmp_path):
    """The warm-up ends after step 6; step 7 lies within an epoch."""
    config, progress, rows, folder = straight
    with pytest.raises(StoppedError, match=f"step {stop} of 12"):
        run(config, tmp_path, runtime=stop_after(stop))
    assert saved_steps(tmp_path) == [stop]
    again, resumed = run(config, tmp_path)
    timing = ("perf/images_per_second", "perf/data_wait_fraction", "time")
    untimed = [[{k: v for k, v in row.items() if k not in timing} for row in part] for part in (resumed, rows)]
    assert untimed[0] == untimed[1]
    assert_same_bits(folder / "checkpoints/step_00000012", tmp_path / "checkpoints/step_00000012")
    assert (again.best_top1, again.best_step) == (progress.best_top1, progress.best_step)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_has_a_checkpoint_of_that_step_and_the_signals_exit_code(signum, code, tmp_path):
    with pytest.raises(StoppedError, match=r"step 4 of 12") as caught:
        run(make_config(train__log_every=50), tmp_path, runtime=stop_after(4, signum))
    assert caught.value.exit_code == code
    assert saved_steps(tmp_path) == [4]
    assert checkpoint.load_state(at(tmp_path / "checkpoints/step_00000004"))["images_seen"] == 18 + 8


def test_being_asked_to_stop_at_the_last_step_is_too_late(tmp_path):
    progress, _ = run(make_config(train__epochs=2), tmp_path, runtime=stop_after(6))
    assert progress.step == 6
    assert saved_steps(tmp_path) == [6]


@pytest.mark.parametrize("reduction", ["float", "exact"])
def test_a_network_with_batch_norm_resumes_to_the_same_bits(reduction, tmp_path):
    config = make_config(
        model__name="shufflenet_v2_x0_5", train__epochs=2, train__ema_decay=0.5, comm__reduction=reduction,
        optim__base_lr=1e-3, train__label_smoothing=0.1,
    )  # fmt: skip
    _, rows = run(config, tmp_path / "straight")
    with pytest.raises(StoppedError):
        run(config, tmp_path / "stopped", runtime=stop_after(2))
    _, resumed = run(config, tmp_path / "stopped")
    last = "checkpoints/step_00000006"
    assert_same_bits(tmp_path / "straight" / last, tmp_path / "stopped" / last)
    assert series(rows, "train/loss") == series(resumed, "train/loss")


def test_adamw_resumes_to_the_same_bits(tmp_path):
    config = make_config(optim__name="adamw", optim__base_lr=1e-3, train__epochs=2)
    run(config, tmp_path / "straight")
    with pytest.raises(StoppedError):
        run(config, tmp_path / "stopped", runtime=stop_after(4))
    run(config, tmp_path / "stopped")
    weights = [
        checkpoint.load_weights(at(tmp_path / name / "checkpoints/step_00000006")) for name in ("straight", "stopped")
    ]
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])


def test_a_damaged_checkpoint_costs_its_steps_and_no_more(straight, tmp_path):
    config, _, rows, folder = straight
    config = make_config(train__ema_decay=0.8, schedule__warmup_epochs=2, checkpoint__every_steps=2)
    with pytest.raises(StoppedError):
        run(config, tmp_path, runtime=stop_after(7))
    assert saved_steps(tmp_path) == [2, 4, 6, 7]
    (tmp_path / "checkpoints/step_00000007/model.safetensors").write_bytes(b"torn")
    _, resumed = run(config, tmp_path)
    assert series(resumed, "train/loss") == series(rows, "train/loss")
    ours = checkpoint.load_weights(at(tmp_path / "checkpoints/step_00000012"))
    theirs = checkpoint.load_weights(at(folder / "checkpoints/step_00000012"))
    assert all(ours[key].equal(theirs[key]) for key in ours)


def test_the_moving_average_goes_on_from_where_it_was(tmp_path):
    """B23: by hand, from the weights of every step."""
    config = make_config(train__ema_decay=0.5, train__epochs=2, checkpoint__every_steps=1)
    with pytest.raises(StoppedError):
        run(config, tmp_path, runtime=stop_after(3))
    run(config, tmp_path)
    steps = [tmp_path / f"checkpoints/step_{step:08d}" for step in range(1, 7)]
    average = {key: tensor.clone() for key, tensor in checkpoint.load_weights(at(steps[0])).items()}
    for number, path in enumerate(steps, 1):
        for key, tensor in checkpoint.load_weights(at(path)).items():
            average[key] = tensor if number == 1 else 0.5 * average[key] + 0.5 * tensor
        assert checkpoint.load_training(at(path))["ema_updates"] == number
        stored = checkpoint.load_weights(at(path), "ema")
        assert all(torch.allclose(stored[key], average[key], atol=1e-6) for key in average)


def test_a_checkpoint_of_another_network_is_refused_by_path(straight, tmp_path):
    _, _, _, folder = straight
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(CheckpointError, match="step_00000012"):
        run(make_config(model__name="shufflenet_v2_x0_5", train__ema_decay=0.8), tmp_path / "copy")


# B22: steps whose gradients overflow


def overflowing_state(config, scale=2.0**127):
    state = TrainState(config, CLASSES, Runtime(), "fp16")
    state.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return state


@pytest.mark.parametrize("reduction", ["float", "exact"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_that_overflows_changes_nothing_but_the_scale(reduction, clip):
    config = make_config(train__ema_decay=0.5, comm__reduction=reduction)
    plan = make_plan(config.train, 8)
    own = next(train_batches(Noise(8), config.data, plan, 0, 0, 1, 0, 1, torch.device("cpu")))
    state = overflowing_state(config)
    before = {key: tensor.clone() for key, tensor in state.model.state_dict().items()}
    compute_gradients(config, state, own, 2, 8, 0, "fp16", Runtime(), Monitor())
    assert not update(state, 0.1, clip)
    assert all(tensor.equal(before[key]) for key, tensor in state.model.state_dict().items())
    assert int(state.ema.n_averaged) == 0
    assert state.scaler.get_scale() == 2.0**126


@pytest.mark.parametrize(("optimizer", "keys"), [("sgd", {}), ("sgd", {"optim__nesterov": False}), ("adamw", {})])
def test_the_step_after_one_that_overflowed_is_that_of_a_new_optimizer(optimizer, keys):
    """The first step of a float16 run overflows more often than not: the scale is found by trying."""
    config = make_config(optim__name=optimizer, **keys)
    state = overflowing_state(config, 2.0**16)
    plain = build_plain(config)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": config.optim.weight_decay},
        {"params": [p for p in plain.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if optimizer == "sgd":
        reference = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=config.optim.nesterov, fused=False)
    else:
        reference = torch.optim.AdamW(groups, lr=0.1, fused=False)
    pairs = list(zip(state.model.parameters(), plain.parameters(), strict=True))
    generator = torch.Generator().manual_seed(1)
    for ours, _ in pairs:
        ours.grad = torch.full_like(ours, math.inf)
    state.scaler.scale(torch.zeros(()))
    assert not update(state, 0.1, None)
    for _ in range(2):
        for ours, theirs in pairs:
            theirs.grad = torch.randn(theirs.shape, generator=generator)
            ours.grad = torch.empty_like(ours).copy_(theirs.grad * state.scaler.get_scale())
        assert update(state, 0.1, None)
        reference.step()
        for ours, theirs in pairs:
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_skipped_steps_are_counted_and_hold_the_learning_rate_back(tmp_path):
    """The images of a skipped step are used up; the schedule counts only what was applied."""
    config = make_config(train__precision="fp16", train__epochs=2, checkpoint__every_steps=1)
    state = overflowing_state(config)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-56)
    data = {"class_names": list(Noise.class_names), "train_images": 18}
    checkpoint.save(at(tmp_path / "checkpoints"), *state.parts(data))  # a run of no steps to go on from
    progress, rows = run(config, tmp_path)
    saved = checkpoint.saved(at(tmp_path / "checkpoints"))
    skipped = [checkpoint.load_state(path)["progress"]["skipped_steps"] for path in saved]
    assert progress.step == 6
    assert 1 <= progress.skipped_steps < 6
    assert skipped[0] == 0
    assert skipped[1] == 1
    assert skipped == sorted(skipped)
    assert skipped[-1] == progress.skipped_steps
    schedule = make_schedule(config, make_plan(config.train, 18))
    expected = [(step + 1, schedule(step - skipped[step])) for step in range(6)]
    assert series(rows, "train/lr") == expected
    start, first = (checkpoint.load_weights(at(tmp_path / f"checkpoints/step_{n:08d}")) for n in (0, 1))
    assert all(start[key].equal(first[key]) for key in start)


# numbers that are none


def test_a_loss_that_is_not_finite_ends_the_run_with_step_rank_and_rate_and_no_checkpoint(tmp_path):
    config = make_config(optim__base_lr=1e30, schedule__warmup_epochs=0, train__max_steps=9)
    with pytest.raises(NonFiniteError, match=r"step 1 on rank 0, learning rate ") as caught:
        run(config, tmp_path)
    rate = float(str(caught.value).split("learning rate ")[1].split(";")[0])
    assert rate == pytest.approx(make_schedule(config, make_plan(config.train, 18))(1), rel=1e-5)
    assert "optim.base_lr" in str(caught.value)
    assert caught.value.exit_code == 1
    assert saved_steps(tmp_path) == []


def test_weights_that_are_not_finite_after_the_last_step_are_not_saved(tmp_path):
    config = make_config(optim__base_lr=1e300, schedule__warmup_epochs=0, train__max_steps=1)
    with pytest.raises(NonFiniteError):
        run(config, tmp_path)
    assert saved_steps(tmp_path) == []


def test_an_earlier_checkpoint_outlives_a_loss_that_is_not_finite(tmp_path):
    run(make_config(train__max_steps=3, schedule__warmup_epochs=0), tmp_path)
    wild = make_config(train__max_steps=9, optim__base_lr=1e30, schedule__warmup_epochs=0)
    with pytest.raises(NonFiniteError, match=r"step \d+ on rank 0"):
        run(wild, tmp_path)
    assert saved_steps(tmp_path) == [3]
    assert checkpoint.verify(at(tmp_path / "checkpoints/step_00000003")) is None


# faults of the data and of the recipe


def test_an_unreadable_image_is_named(tmp_path):
    class Torn(Noise):
        def read(self, index):
            return super().read(index)[: 40 if index == 5 else None]

    with pytest.raises(DataError, match="noise 5"):
        train(make_config(), Runtime(), Sources(Torn(18), Noise(5)), at(tmp_path), Recorder())


def test_a_warm_up_longer_than_the_run_ends_it_before_its_first_step(tmp_path):
    with pytest.raises(ConfigError, match="warmup_epochs"):
        run(make_config(train__max_steps=3), tmp_path)
    assert read_metrics(at(tmp_path)) == []


# more than one process


def many_things(runtime, folder):
    """What several processes do otherwise than one might; in processes that are started once."""
    torch.set_num_threads(1)
    sources, nothing = Sources(Noise(18), Noise(5, seed=1)), Recorder()
    config = make_config(train__ema_decay=0.8, train__epochs=2, comm__reduction="exact")
    progress = train(config, runtime, sources, at(folder / "exact/checkpoints"), nothing)
    results = {"resumed": (progress.step, progress.metrics)}

    for reduction in ("float", "exact"):
        config = make_config(comm__reduction=reduction)
        plan = make_plan(config.train, 18)
        state = TrainState(config, CLASSES, runtime, "fp32")
        batches = train_batches(
            sources.train, config.data, plan, 0, runtime.rank, runtime.world_size, 0, 1, runtime.device
        )
        totals = compute_gradients(config, state, next(batches), 2, 8, 0, "fp32", runtime, Monitor()).totals
        results[reduction] = float(totals.loss), [p.grad.numpy() for p in state.model.parameters()]

    last_rank = runtime.rank == runtime.world_size - 1
    stopping = replace(runtime, stop_requested=lambda: signal.SIGTERM if last_rank else 0)
    try:
        train(make_config(), stopping, sources, at(folder / "stopped"), nothing)
    except StoppedError as error:
        results["stopped"] = str(error), error.exit_code
    wild = make_config(optim__base_lr=1e30, schedule__warmup_epochs=0)
    try:
        train(wild, runtime, sources, at(folder / "wild"), nothing)
    except NonFiniteError as error:
        results["wild"] = str(error)
    return results


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """What one process and each of two do, and their folders. Both go on from what one process left at step 2."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    config = make_config(train__ema_decay=0.8, train__epochs=2, comm__reduction="exact")
    for folder in folders:
        with pytest.raises(StoppedError):
            run(config, folder / "exact", runtime=stop_after(2))
    threads = torch.get_num_threads()
    try:
        (alone,) = run_ranks(1, many_things, folders[0])
    finally:
        torch.set_num_threads(threads)
    return alone, run_ranks(2, many_things, folders[1]), *folders


def test_a_run_goes_on_with_other_workers_to_the_same_bits(one_and_two):
    """B23 and law 1, the average included."""
    alone, both, *folders = one_and_two
    for rank in both:
        assert rank["resumed"] == alone["resumed"]
    one, two = (folder / "exact/checkpoints/step_00000006" for folder in folders)
    assert_same_bits(one, two)
    assert checkpoint.load_training(at(two))["ema_updates"] == 6


def test_dropout_is_a_function_of_the_micro_batch_and_not_of_who_computes_it(one_and_two):
    alone, both, *_ = one_and_two
    for rank in both:
        assert rank["exact"][0] == alone["exact"][0]
        assert all((a == b).all() for a, b in zip(rank["exact"][1], alone["exact"][1], strict=True))
        assert rank["float"][0] == pytest.approx(alone["float"][0], rel=1e-6)
        for got, want in zip(rank["float"][1], alone["float"][1], strict=True):
            assert np.linalg.norm(got - want) <= 1e-5 * max(np.linalg.norm(want), 1e-3)


def test_one_rank_that_is_asked_to_stop_stops_all_after_the_same_step(one_and_two):
    """C58."""
    _, both, _, folder = one_and_two
    for rank in both:
        message, code = rank["stopped"]
        assert "step 1 of 12" in message
        assert code == 143
    assert [path.name for path in checkpoint.saved(at(folder / "stopped"))] == ["step_00000001"]


def test_a_loss_that_is_not_finite_ends_all_ranks_at_the_same_step(one_and_two):
    _, both, _, folder = one_and_two
    assert both[0]["wild"] == both[1]["wild"]
    assert "step 1 on rank 0, 1" in both[0]["wild"]
    assert not (folder / "wild").exists()


def test_a_run_goes_on_with_the_data_it_began_with_or_not_at_all(tmp_path):
    config = make_config()
    with pytest.raises(StoppedError):
        run(config, tmp_path, runtime=stop_after(2))
    with pytest.raises(DataError, match="train_images was 18, is 30"):
        run(config, tmp_path, images=30)
    relabelled = Noise(18)
    relabelled.labels = relabelled.labels[::-1].copy()
    with pytest.raises(DataError, match="train_labels are others, though as many"):
        train(config, Runtime(), Sources(relabelled, Noise(5, seed=1)), at(tmp_path / "checkpoints"), Recorder())
    renamed = Noise(18)
    renamed.class_names = ("red", "green", "azure")
    with pytest.raises(DataError, match=r"class_names was \['red', 'green', 'blue'\], is \['red', 'green', 'azure'\]"):
        train(config, Runtime(), Sources(renamed, Noise(5)), at(tmp_path / "checkpoints"), Recorder())


def test_a_precision_that_auto_comes_to_is_checked_like_one_that_was_set(tmp_path, monkeypatch):
    monkeypatch.setattr("raytrain.loop._agree_on_precision", lambda *_: "fp16")  # as on a GPU without bfloat16
    with pytest.raises(ConfigError, match=r"train.precision fp16 .*a gradient that is late"):
        run(make_config(comm__overlap="next_step", train__precision="auto"), tmp_path)
