"""What only a GPU shows. Needs neither Ray nor MLflow."""

import pytest
import torch

from raytrain import checkpoint
from raytrain.commandline import parse
from raytrain.config import Data, Train
from raytrain.data.loader import train_batches
from raytrain.data.source import open_sources
from raytrain.distributed import Runtime
from raytrain.loop import train
from raytrain.model import build_model
from raytrain.plan import make_plan
from raytrain.recorder import Recorder
from tests.places import at

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

RECIPE = ("model.name=resnet18", "train.max_steps=60", "schedule.warmup_epochs=0.5", "scaling.num_workers=1")


def run(folder, *words):
    config = parse([*RECIPE, *words], "quickstart", frozenset()).config
    events = []
    progress = train(
        config,
        Runtime(device=torch.device("cuda", 0)),
        open_sources(config.data),
        at(folder),
        Recorder(None, events.append),
    )
    return progress, [event for event in events if event["kind"] == "metrics"]


@pytest.mark.parametrize("reduction", ["float", "exact"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_digits_are_learnt(tmp_path, precision, reduction):
    progress, events = run(tmp_path, f"train.precision={precision}", f"comm.reduction={reduction}")
    losses = [event["metrics"]["train/loss"] for event in events if "train/loss" in event["metrics"]]
    assert losses[-1] < 0.7 * losses[0]
    assert progress.metrics["val/samples"] == 359
    assert progress.metrics["val/top1"] > 0.5


def test_a_checkpoint_of_a_gpu_reads_on_a_cpu(tmp_path):
    run(tmp_path, "train.max_steps=2", "schedule.warmup_epochs=0")
    newest = checkpoint.newest_valid(at(tmp_path), pytest.fail)
    config = parse([*RECIPE], "quickstart", frozenset()).config
    model = build_model(config.model, config.data, 10, seed=1)
    model.body.load_state_dict(checkpoint.load_weights(at(newest)))
    assert checkpoint.load_training(at(newest))["optimizer"]["state"][0]["momentum_buffer"].device.type == "cpu"


def test_the_scaler_s_state_goes_on(tmp_path):
    run(tmp_path, "train.precision=fp16", "train.max_steps=5", "schedule.warmup_epochs=0")
    scaler = checkpoint.load_training(at(checkpoint.saved(at(tmp_path))[-1]))["scaler"]
    assert scaler["scale"] > 0
    assert scaler["_growth_tracker"] <= 5


@pytest.mark.parametrize("keys", [{}, {"mixup_alpha": 0.4, "cutmix_alpha": 1.0}, {"color_jitter": (0.4, 0.4, 0.4)}])
def test_batches_are_those_of_a_cpu(keys):
    data = Data(source="digits", image_size=32, flip=0.5, **keys)
    source = open_sources(data).train
    plan = make_plan(Train(epochs=2, global_batch_size=256, micro_batch_size=64), len(source.labels))

    def batches(device):
        for step in train_batches(source, data, plan, 0, 0, 1, 0, 4, torch.device(device)):
            if device == "cuda":
                torch.randn(2000, 2000, device=device) @ torch.randn(2000, 2000, device=device)  # something beside it
            yield from step.batches

    for ours, theirs in zip(batches("cuda"), batches("cpu"), strict=True):
        assert ours.images.device.type == "cuda"
        assert torch.allclose(ours.images.cpu().float(), theirs.images.float(), atol=1e-3)
        assert torch.allclose(ours.labels.cpu().float(), theirs.labels.float())
