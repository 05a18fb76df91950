import json
import math
import os
import shutil
import stat
import subprocess
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision

from raytrain import checkpoint
from raytrain.commandline import build, dump, read_yaml
from raytrain.distributed import Runtime
from raytrain.errors import CheckpointError, NonFiniteError, RunError
from raytrain.state import TrainState
from tests.places import at

WEIGHTS = {"model": {"fc.weight": torch.arange(6.0).view(2, 3), "count": torch.tensor(3)}}


def save(folder, step, top1=None, weights=WEIGHTS):
    metrics = {} if top1 is None else {"val/top1": top1}
    training = {"scale": 1.5, "momentum": [torch.ones(2)]}
    return checkpoint.save(at(folder), step, weights, training, {"metrics": metrics}).path


def steps(folder):
    return [int(path.name.removeprefix("step_")) for path in checkpoint.saved(at(folder))]


def newest(folder):
    """The step of the newest valid checkpoint, and the warnings."""
    warnings = []
    path = checkpoint.newest_valid(at(folder), warnings.append)
    return path and int(path.name.removeprefix("step_")), warnings


# written and read back


def test_what_was_saved_reads_back(tmp_path):
    path = save(tmp_path / "run/checkpoints", 45, 0.5)
    assert path == tmp_path / "run/checkpoints/step_00000045"
    assert checkpoint.verify(at(path)) is None
    weights = checkpoint.load_weights(at(path))
    assert set(weights) == set(WEIGHTS["model"])
    assert all(weights[key].equal(tensor) for key, tensor in WEIGHTS["model"].items())
    training = checkpoint.load_training(at(path))
    assert training["scale"] == 1.5
    assert training["momentum"][0].equal(torch.ones(2))
    assert checkpoint.load_state(at(path))["step"] == 45
    assert checkpoint.load_state(at(path))["metrics"] == {"val/top1": 0.5}


def test_the_files_are_those_that_the_manifest_names(tmp_path):
    path = save(tmp_path, 1, weights={**WEIGHTS, "ema": WEIGHTS["model"]})
    manifest = json.loads((path / "manifest.json").read_text())
    names = {"model.safetensors", "ema.safetensors", "training.pt", "state.json"}
    assert set(manifest) == names
    assert {file.name for file in path.iterdir()} == names | {"manifest.json"}
    for name, entry in manifest.items():
        assert entry["bytes"] == (path / name).stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["step_00000001"]


def test_anyone_who_may_read_a_new_file_may_read_a_checkpoint(tmp_path):
    old = os.umask(0o022)
    try:
        path = save(tmp_path / "checkpoints", 1)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    for file in path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644, file.name


def test_a_later_format_is_refused(tmp_path):
    path = save(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format_version": 99}))
    with pytest.raises(CheckpointError, match="99"):
        checkpoint.load_state(at(path))


def make_state(**overrides):
    sections = {
        "data": {"source": "digits", "image_size": 32},
        "model": {"name": "resnet18"},
        "train": {"global_batch_size": 4, "micro_batch_size": 2, "ema_decay": 0.9},
    }
    config = build(sections, {key.replace("__", "."): value for key, value in overrides.items()}, "")
    return TrainState(config, 3, Runtime(), "fp32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a network that has taken a step."""
    state = make_state()
    for parameter in state.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(
            memory_format=torch.channels_last if parameter.ndim == 4 else torch.contiguous_format
        )
    state.optimizer.step()
    state.batchnorm.update(torch.full_like(state.batchnorm.running, 2.0), 1)
    state.ema.update_parameters(state.model)
    state.progress.step = 1
    state.progress.take_score({"val/top1": float(np.float32(0.5)), "val/loss": 1.25, "val/samples": 2.0})
    folder, description = tmp_path_factory.mktemp("checkpoints"), {"class_names": ["a", "b", "ü"], "epoch": 0.5}
    return state, checkpoint.save(at(folder), *state.parts(description)).path


@pytest.mark.parametrize("name", ["model", "ema"])
def test_weights_are_torchvisions_and_need_no_pickle(trained, name):
    """A16 and B23: no wrapper's prefix in a key."""
    state, path = trained
    weights = safetensors.torch.load_file(path / f"{name}.safetensors")
    network = torchvision.models.resnet18(num_classes=3)
    assert list(network.load_state_dict(weights, strict=True)) == [[], []]
    assert int(network.bn1.num_batches_tracked) == 1
    assert network.bn1.running_mean.tolist() == pytest.approx([0.2] * 64)  # a tenth of the way from 0 to 2
    body = (state.model if name == "model" else state.ema.module).body
    for key, tensor in body.state_dict().items():
        assert weights[key].equal(tensor), key
    images = torch.rand(2, 3, 32, 32)
    assert torch.allclose(network.eval()(images), body.eval()(images), rtol=1e-3)


def test_the_training_state_reads_back_with_stock_torch_load(trained):
    _, path = trained
    training = torch.load(path / "training.pt", weights_only=True)
    assert training["ema_updates"] == 1
    buffers = [entry["momentum_buffer"] for entry in training["optimizer"]["state"].values()]
    assert len(buffers) == 62


def test_state_json_is_plain_json(trained):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    _, path = trained
    state = json.loads((path / "state.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert state["class_names"] == ["a", "b", "ü"]
    assert state["step"] == state["progress"]["step"] == 1
    assert state["progress"]["best_top1"] == state["metrics"]["val/top1"] == 0.5


def test_a_state_reads_back_to_the_bit(trained):
    state, path = trained
    other = make_state(run__seed=7)
    other.load(at(path))
    for ours, theirs in ((state.model, other.model), (state.ema.module, other.ema.module)):
        for key, tensor in ours.state_dict().items():
            assert theirs.state_dict()[key].equal(tensor), key
    assert other.batchnorm.running.equal(state.batchnorm.running)
    assert int(other.ema.n_averaged) == 1
    assert other.progress == state.progress
    ours, theirs = state.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    assert all(ours[k]["momentum_buffer"].equal(theirs[k]["momentum_buffer"]) for k in ours)


@pytest.mark.parametrize(
    "overrides", [{"model__name": "resnet34"}, {"optim__name": "adamw", "comm__reduction": "exact"}]
)
def test_a_checkpoint_of_another_network_or_recipe_is_refused_by_path(trained, overrides):
    _, path = trained
    with pytest.raises(CheckpointError, match=str(path)):
        make_state(**overrides).load(at(path))


def test_a_checkpoint_without_an_average_is_refused_where_one_is_wanted(tmp_path):
    path = checkpoint.save(at(tmp_path), *make_state(train__ema_decay=None).parts({})).path
    with pytest.raises(CheckpointError, match=str(path)):
        make_state().load(at(path))


# torn, flipped, missing


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = [cut, flip, Path.unlink, lambda path: path.write_bytes(b"")]
FILES = ["model.safetensors", "training.pt", "state.json", "manifest.json"]


@pytest.mark.parametrize("damage", DAMAGES, ids=["cut", "flipped", "missing", "empty"])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_it(tmp_path, file, damage):
    save(tmp_path, 10)
    save(tmp_path, 20)
    path = save(tmp_path, 30)
    damage(path / file)
    assert checkpoint.verify(at(path))
    step, warnings = newest(tmp_path)
    assert step == 20
    assert len(warnings) == 1
    assert str(path) in warnings[0]


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"model.safetensors": {}}', '{"model.safetensors": null}'])
def test_a_manifest_that_vouches_for_nothing_is_no_manifest(tmp_path, text):
    save(tmp_path, 10)
    (save(tmp_path, 20) / "manifest.json").write_text(text)
    step, warnings = newest(tmp_path)
    assert step == 10
    assert "step_00000020" in warnings[0]


def test_where_all_are_damaged_none_is_taken_for_a_beginning(tmp_path):
    for step in (10, 20, 30):
        flip(save(tmp_path, step) / "model.safetensors")
    warnings = []
    for _ in range(2):  # the next start is refused as well
        with pytest.raises(CheckpointError, match=r"damaged_step_00000010, .*20, .*30"):
            checkpoint.newest_valid(at(tmp_path), warnings.append)
    assert [f"step_{step:08d}" in warning for step, warning in zip((10, 20, 30), warnings, strict=True)] == [True] * 3


def test_one_that_cannot_be_read_just_now_is_not_taken_for_damaged(tmp_path, monkeypatch):
    save(tmp_path, 10)

    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_fingerprint", fail)
        with pytest.raises(RunError, match=r"cannot read checkpoint .*step_00000010"):
            newest(tmp_path)
    assert newest(tmp_path) == (10, [])


def test_without_checkpoints_there_is_none_and_no_warning(tmp_path):
    assert newest(tmp_path) == newest(tmp_path / "not there") == (None, [])


def test_what_a_killed_process_left_is_not_taken_for_a_checkpoint(tmp_path):
    save(tmp_path, 10)
    shutil.copytree(tmp_path / "step_00000010", tmp_path / ".writing-00000020")
    assert newest(tmp_path) == (10, [])
    assert newest(tmp_path)[0] == 10
    save(tmp_path, 20)
    assert newest(tmp_path) == (20, [])


def test_saving_again_replaces_one_that_was_damaged(tmp_path):
    path = save(tmp_path, 10)
    cut(path / "model.safetensors")
    (path / "other").write_text("stray")
    assert save(tmp_path, 10) == path
    assert checkpoint.verify(at(path)) is None
    assert not (path / "other").exists()


# kept and removed


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, top1 in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.8), (5, 0.3), (6, 0.4)):
        save(tmp_path, step, top1)
    checkpoint.prune(at(tmp_path), keep_last=2, keep_best=2)
    assert steps(tmp_path) == [2, 4, 5, 6]
    assert checkpoint.best(at(tmp_path)).name == "step_00000002"
    checkpoint.prune(at(tmp_path), keep_last=1, keep_best=1)
    assert steps(tmp_path) == [2, 6]
    checkpoint.prune(at(tmp_path), keep_last=1, keep_best=0)
    assert steps(tmp_path) == [6]


def test_of_equally_good_ones_the_newest_is_kept(tmp_path):
    for step, top1 in ((1, 0.5), (2, 0.5), (3, 0.1), (4, None)):
        save(tmp_path, step, top1)
    checkpoint.prune(at(tmp_path), keep_last=1, keep_best=1)
    assert steps(tmp_path) == [2, 4]


@pytest.mark.parametrize("keep_best", [2, 3, 4, 5, 6, 50])
def test_fewer_than_may_be_kept_are_all_kept(tmp_path, keep_best):
    for step, top1 in ((1, 0.1), (2, 0.3), (3, 0.2), (4, None)):
        save(tmp_path, step, top1)
    checkpoint.prune(at(tmp_path), keep_last=1, keep_best=keep_best)
    assert steps(tmp_path) == ([2, 3, 4] if keep_best == 2 else [1, 2, 3, 4])
    checkpoint.prune(at(tmp_path), keep_last=50, keep_best=0)
    assert steps(tmp_path) == ([2, 3, 4] if keep_best == 2 else [1, 2, 3, 4])


def test_the_best_by_loss_is_that_with_the_least(tmp_path):
    for step, loss in ((1, 0.7), (2, 0.2), (3, math.nan), (4, 0.9)):
        state = {"metrics": {"val/top1": step / 10, "val/loss": loss}}
        checkpoint.save(at(tmp_path), step, WEIGHTS, {}, state)
    assert checkpoint.best(at(tmp_path), "val/loss").name == "step_00000002"
    checkpoint.prune(at(tmp_path), keep_last=1, keep_best=1, by="val/loss")
    assert steps(tmp_path) == [2, 4]


def test_a_score_that_is_no_number_is_never_the_best(tmp_path):
    for step, top1 in ((1, 0.5), (2, math.nan), (3, 0.4), (4, None)):
        save(tmp_path, step, top1)
    assert checkpoint.best(at(tmp_path)).name == "step_00000001"
    checkpoint.prune(at(tmp_path), keep_last=1, keep_best=1)
    assert steps(tmp_path) == [1, 4]


def test_pruning_removes_what_a_killed_process_left(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".writing-00000002").mkdir()
    (tmp_path / ".writing-00000002/model.safetensors").write_bytes(b"half")
    (tmp_path / ".writing-removed-step_00000000").mkdir()
    checkpoint.prune(at(tmp_path), 2, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_damaged_newer_ones_do_not_drive_out_the_only_good_one(tmp_path, keep_last):
    """A run that falls back to step 10 sets the damaged ones aside, and saves before it has come past them."""
    save(tmp_path, 10)
    for step in (20, 30, 40):
        flip(save(tmp_path, step) / "model.safetensors")
    assert newest(tmp_path)[0] == 10
    save(tmp_path, 15)
    checkpoint.prune(at(tmp_path), keep_last, 0)
    assert newest(tmp_path) == (15, [])
    assert (tmp_path / "step_00000010").exists() == (keep_last > 1)
    assert [path.name for path in tmp_path.glob("damaged_*")] == []  # a good one has taken their place


def test_a_damaged_best_does_not_drive_out_a_good_one(tmp_path):
    save(tmp_path, 10, 0.5)
    flip(save(tmp_path, 20, 0.9) / "model.safetensors")
    assert newest(tmp_path)[0] == 10
    save(tmp_path, 30, 0.1)
    checkpoint.prune(at(tmp_path), 1, 1)
    assert [path.name for path in checkpoint.saved(at(tmp_path))] == ["step_00000010", "step_00000030"]


# what cannot or must not be written


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model", "ema"])
def test_weights_that_are_no_numbers_are_refused_and_nothing_is_written(tmp_path, value, name):
    """A08."""
    save(tmp_path, 1)
    weights = {"model": WEIGHTS["model"], "ema": WEIGHTS["model"]}
    weights[name] = {"fc.bias": torch.tensor([0.0, value])}
    with pytest.raises(NonFiniteError, match=rf"{name} fc\.bias .*step 2"):
        save(tmp_path, 2, weights=weights)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_folder_that_cannot_be_is_refused_by_path(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="file/checkpoints/step_00000001"):
        save(tmp_path / "file/checkpoints", 1)


@pytest.fixture
def small_disk(new_disk):
    """A file system of one mebibyte."""
    return new_disk(1024)


def test_a_full_disk_is_named_and_leaves_the_previous_checkpoint(small_disk):
    """B25."""
    save(small_disk, 1)
    large = {"model": {"fc.weight": torch.zeros(2**20)}}
    with pytest.raises(RunError, match=r"step_00000002.*(No space left|ENOSPC|os error 28)"):
        save(small_disk, 2, weights=large)
    assert newest(small_disk) == (1, [])
    assert [path.name for path in small_disk.iterdir()] == ["step_00000001"]
    with pytest.raises(RunError, match=r"step_00000003"):
        checkpoint.save(at(small_disk), 3, WEIGHTS, {"momentum": torch.zeros(2**20)}, {})
    assert newest(small_disk) == (1, [])
    save(small_disk, 4)
    assert newest(small_disk) == (4, [])


def test_a_read_only_disk_is_named_and_leaves_the_previous_checkpoint(small_disk):
    save(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(RunError, match=r"step_00000002.*Read-only"):
        save(small_disk, 2)
    assert newest(small_disk) == (1, [])


def test_the_config_in_a_checkpoint_reads_back(tmp_path):
    """The loop stores `dump(config)`; a reader needs nothing but YAML."""
    config = build({}, {"optim.base_lr": 1e-7, "data.path": "/a b"}, "")
    path = checkpoint.save(at(tmp_path), 1, WEIGHTS, {}, {"config": dump(config)}).path
    text = json.loads((path / "state.json").read_text())["config"]
    (tmp_path / "config.yaml").write_text(text)
    assert build(read_yaml(tmp_path / "config.yaml"), {}, "") == config


def test_safetensors_reads_weights_of_every_dtype_and_shape(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{dtype}{shape}": (torch.randn(shape, generator=generator) * 9).to(dtype)
        for dtype in checkpoint._DTYPES
        for shape in ((), (0,), (3,), (2, 3, 5))
    }
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    path = checkpoint.save(at(tmp_path), 1, {"model": tensors}, {}, {}).path / "model.safetensors"
    found = safetensors.torch.load_file(path)
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert found[key].equal(tensor), key
    with safetensors.safe_open(path, "pt") as file:  # which maps it
        assert file.get_tensor("torch.float64(3,)").equal(tensors["torch.float64(3,)"])
