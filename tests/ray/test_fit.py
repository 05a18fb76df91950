"""Runs that end well, runs that are refused, and what both leave behind."""

import json
import math
import os
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from raytrain import config
from raytrain.data.loader import eval_batches
from raytrain.data.source import open_sources
from tests.ray.conftest import (
    LIGHT,
    PHOTO_CLASSES,
    check_quiet,
    check_refused,
    client,
    environment,
    fit,
    mlflow_points,
    mlflow_runs,
    only_mlflow_run,
    photo_folder,
    recorded_points,
    snapshot,
    steps_of,
    with_probe,
)

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore")  # in MLflow and torch.export themselves

STEPS, STEPS_PER_EPOCH, PEAK = 8, 6, 0.05
GOOD = (
    "model.name=resnet18",
    "train.global_batch_size=256",
    "train.micro_batch_size=64",
    f"train.max_steps={STEPS}",
    "train.log_every=1",
    f"optim.base_lr={PEAK}",
    "schedule.warmup_epochs=0",
    "comm.reduction=exact",
    "scaling.cpus_per_worker=1",
    "tracking.system_metrics=false",
    "run.storage_path=out/runs",
    "tracking.uri=sqlite:///mlflow.db",
    "run.name=good",
)
TRAIN_KEYS = {
    "epoch",
    "train/loss",
    "train/lr",
    "perf/images_per_second",
    "perf/data_wait_fraction",
    "perf/comm_fraction",
    "perf/comm_bytes_per_step",
}
VAL_KEYS = {"val/top1", "val/top5", "val/loss", "val/samples"}


class Good:
    """A run over Ray that has ended: where, and what was seen of it."""

    def __init__(self, base):
        self.launch = base / "launch"
        self.path = self.launch / "out" / "runs" / "good"
        # without OMP_NUM_THREADS, which the tests set for themselves: who sets the threads is what is asked
        env = with_probe(base / "probe", OMP_NUM_THREADS=None)
        self.ended, _ = fit(self.launch, *GOOD, env=env)
        self.probes = {int(path.stem): json.loads(path.read_text()) for path in (base / "probe").glob("[0-9]*.json")}
        self.files = snapshot(self.launch)
        assert self.ended.returncode == 0, self.ended.stdout + self.ended.stderr

    @property
    def mlflow_run(self):
        return only_mlflow_run(self.launch)

    @property
    def checkpoint(self):
        return self.path / "checkpoints" / f"step_{STEPS:08d}"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return Good(tmp_path_factory.mktemp("good"))


def test_the_terminal_shows_progress_and_a_summary_and_nothing_else(good):
    assert good.ended.stderr == ""
    lines = good.ended.stdout.splitlines()
    points = recorded_points(good.path)
    top1, top5 = points["val/top1", STEPS], points["val/top5", STEPS]

    progress = [line for line in lines if "images/s " in line and line.startswith("epoch")]
    assert len(progress) == STEPS
    for step, line in enumerate(progress, 1):
        loss, lr = points["train/loss", step], points["train/lr", step]
        rate = points["perf/images_per_second", step]
        assert re.fullmatch(
            re.escape(
                f"epoch {1 if step <= STEPS_PER_EPOCH else 2}/2  step {step}/{STEPS}  loss {loss:.4f}  lr {lr:.4g}  "
                f"{rate:,.0f} images/s  2 workers  "
            )
            + r"\d+:\d\d left",
            line,
        ), line

    evaluations = [line for line in lines if "val top1" in line]
    assert len(evaluations) == 2
    assert f"top1 {top1:.4f}  top5 {top5:.4f}  loss {points['val/loss', STEPS]:.4f}  (359 images)" in evaluations[-1]

    rest = [line for line in lines if line not in {*progress, *evaluations}]
    assert [rest[0], rest[1]] == ["starting 2 workers", "storing the run in MLflow"]
    summary = {line.split()[0]: line.split(maxsplit=1)[1] for line in rest[2:]}
    assert set(summary) == {"top-1", "best", "time", "images/s", "checkpoint", "MLflow"}
    assert summary["top-1"] == f"{top1:.4f}, top-5 {top5:.4f} on 359 images"
    assert summary["checkpoint"] == str(good.checkpoint)
    assert summary["MLflow"] == "mlflow ui"
    check_quiet(good.ended.stdout)


def test_one_run_in_mlflow_that_is_finished(good):
    run = good.mlflow_run  # one in all experiments: none of rank 1
    assert run.info.status == "FINISHED"
    assert run.info.end_time > run.info.start_time
    assert run.info.run_name == "good"
    assert client(good.launch).get_experiment(run.info.experiment_id).name == "raytrain"
    assert json.loads((good.path / "mlflow.json").read_text())["run_id"] == run.info.run_id


def test_params_and_tags_say_what_was_run_and_where(good):
    data = good.mlflow_run.data
    expected = {
        "train.global_batch_size": "256",
        "scaling.num_workers": "2",
        "model.name": "resnet18",
        "comm.reduction": "exact",
        "peak_lr": "0.05",
        "max_images_per_worker_step": "128",
        "micro_batches_per_step": "4",
        "steps_per_epoch": "6",
        "total_steps": "8",
        "num_train_images": "1438",
    }
    assert {key: data.params.get(key) for key in expected} == expected
    versions = {f"version.{name}": metadata.version(name) for name in ("torch", "torchvision", "ray", "mlflow")}
    places = {"world_size": "2", "device": "cpu", "host": socket.gethostname()}
    assert {key: data.tags.get(key) for key in (*versions, *places)} == {**versions, **places}


def test_each_metric_and_step_is_once_in_mlflow_and_as_in_the_run_directory(good):
    points = mlflow_points(good.launch, good.mlflow_run.info.run_id)
    assert points == recorded_points(good.path)
    assert {key for key, _ in points} == TRAIN_KEYS | VAL_KEYS
    assert {key: steps_of(points, key) for key in TRAIN_KEYS} == {key: [1, 2, 3, 4, 5, 6, 7, 8] for key in TRAIN_KEYS}
    assert {key: steps_of(points, key) for key in VAL_KEYS} == {key: [6, 8] for key in VAL_KEYS}
    assert {points["val/samples", step] for step in (6, 8)} == {359}
    cosine = [PEAK * (1 + math.cos(math.pi * step / 7)) / 2 for step in range(8)]
    assert [points["train/lr", step] for step in range(1, 9)] == pytest.approx(cosine, rel=1e-12, abs=1e-18)
    assert [points["epoch", step] for step in range(1, 9)] == [step / 6 for step in range(1, 9)]
    assert points["train/loss", 1] == pytest.approx(math.log(10), rel=0.25)  # untrained, ten classes
    assert points["train/loss", 6] < points["train/loss", 1]
    for key in ("perf/data_wait_fraction", "perf/comm_fraction"):
        assert all(0 <= points[key, step] <= 1 for step in range(1, 9))
    correct = points["val/top1", 8] * 359
    assert correct == pytest.approx(round(correct), abs=1e-9)


def test_artifacts_are_the_run_directory(good):
    run = good.mlflow_run
    store, run_id = client(good.launch), run.info.run_id
    top = {artifact.path for artifact in store.list_artifacts(run_id)}
    assert {"config.yaml", "learning_curves.png", "metrics.jsonl", "events.jsonl", "checkpoints"} <= top

    def fetch(path):
        return Path(store.download_artifacts(run_id, path)).read_bytes()

    resolved = yaml.safe_load((good.path / "config.yaml").read_text())
    assert yaml.safe_load(fetch("config.yaml")) == resolved
    assert resolved["train"]["global_batch_size"] == 256
    assert resolved["data"]["source"] == "digits"
    assert fetch("metrics.jsonl") == (good.path / "metrics.jsonl").read_bytes()
    assert fetch("learning_curves.png").startswith(b"\x89PNG")
    best = json.loads((good.checkpoint / "state.json").read_text())["progress"]["best_step"]
    kept = {artifact.path for artifact in store.list_artifacts(run_id, "checkpoints")}
    assert kept == {f"checkpoints/step_{step:08d}" for step in {best, STEPS}}
    files = {"model.safetensors", "training.pt", "state.json", "manifest.json"}
    assert {path.name for path in good.checkpoint.iterdir()} == files
    for name in files:
        assert fetch(f"checkpoints/{good.checkpoint.name}/{name}") == (good.checkpoint / name).read_bytes()


def test_relative_paths_are_those_of_the_launch_directory(good):
    base = good.launch.parent
    assert [path.relative_to(base) for path in base.rglob("mlflow.db")] == [good.launch.relative_to(base) / "mlflow.db"]
    assert [path.relative_to(base) for path in base.rglob("mlruns")] == [good.launch.relative_to(base) / "mlruns"]
    assert sorted(path.name for path in good.launch.iterdir() if not path.name.startswith(".")) == [
        "mlflow.db",
        "mlruns",
        "out",
    ]
    assert sorted(good.probes) == [0, 1]
    for seen in good.probes.values():
        stores = {"mlflow.db", "mlruns", "out"} & set(seen["files"])
        assert not stores or seen["cwd"] == str(good.launch)


def test_a_worker_has_as_many_threads_as_cpus(good):
    assert {rank: seen["threads"] for rank, seen in good.probes.items()} == {0: 1, 1: 1}
    assert len({seen["pid"] for seen in good.probes.values()}) == 2


def test_the_logged_model_is_the_trained_one(good):
    run = good.mlflow_run
    (logged,) = client(good.launch).search_logged_models([run.info.experiment_id])
    assert logged.source_run_id == run.info.run_id
    model = mlflow.pyfunc.load_model(logged.artifact_location)
    assert model.metadata.metadata == {"class_names": [str(digit) for digit in range(10)], "step": STEPS}

    values = yaml.safe_load((good.path / "config.yaml").read_text())["data"]
    data = config.Data.model_validate(values)
    batches = eval_batches(open_sources(data).val, data, 64, 0, 1, 1, torch.device("cpu"))
    hits = images = 0
    for batch in batches:
        assert batch.images.dtype == torch.uint8
        assert batch.images.shape[1:] == (32, 32, 3)
        hits += int((model.predict(batch.images.numpy()).argmax(1) == batch.labels.numpy()).sum())
        images += len(batch.labels)
    assert images == 359
    assert hits / 359 == recorded_points(good.path)["val/top1", STEPS]


def test_torchrun_comes_to_the_same_bits_in_the_same_directory(good, tmp_path):
    words = [word for word in GOOD if not word.startswith("run.storage_path")]
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "raytrain.fit")
    launch = tmp_path / "launch"
    ended, _ = fit(launch, *words, "tracking.log_model=false", module=torchrun, env=environment(OMP_NUM_THREADS="1"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    check_quiet(ended.stdout + ended.stderr)
    assert len([line for line in ended.stdout.splitlines() if f"/{STEPS}  loss" in line]) == STEPS
    path = launch / "runs" / "good"
    names = {"attempt", "config.yaml", "checkpoints", "metrics.jsonl", "mlflow.json", "result.json"}
    assert {entry.name for entry in path.iterdir()} == names
    assert {entry.name for entry in good.path.iterdir()} - {"events.jsonl"} == names

    here, there = (load_file(p / "checkpoints/step_00000008/model.safetensors") for p in (path, good.path))
    assert list(here) == list(there)
    assert [key for key in here if not torch.equal(here[key], there[key])] == []
    own, others = recorded_points(path), recorded_points(good.path)
    exact = [place for place in others if place[0].startswith(("train/", "val/", "epoch"))]
    assert {place: own.get(place) for place in exact} == {place: others[place] for place in exact}

    run = only_mlflow_run(launch)
    assert run.info.status == "FINISHED"
    assert (run.data.tags["world_size"], run.data.params["scaling.num_workers"]) == ("2", "2")
    assert mlflow_points(launch, run.info.run_id) == own


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("run.name=good",), ("run good exists already", "--resume", "run.name")),
        (("run.name=good", "--resume", "optim.base_lr=0.1"), ("optim.base_lr: 0.05 -> 0.1",)),
        (("run.name=goof", "--resume"), ("no run goof in", "out/runs", "without --resume")),
    ],
    ids=["the name is taken", "another recipe", "no such run"],
)
def test_a_run_that_exists_is_left_alone(good, words, parts):
    before = snapshot(good.launch)
    given = [word for word in GOOD if not word.startswith(("run.name", "optim.base_lr"))]
    ended, seconds = fit(good.launch, *given, *words)
    check_refused(good.launch.parent / "nowhere", ended, *parts)
    assert seconds < 60
    assert snapshot(good.launch) == before
    assert len(mlflow_runs(good.launch)) == 1


def test_a_finished_run_has_nothing_to_resume(good):
    """The last of those that look at `good`."""
    kept = ("metrics.jsonl", f"checkpoints/{good.checkpoint.name}/model.safetensors", "config.yaml")
    before = {name: (good.path / name).read_bytes() for name in kept}
    points, first = mlflow_points(good.launch, good.mlflow_run.info.run_id), good.mlflow_run.info
    ended, _ = fit(good.launch, *GOOD, "--resume")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert not re.search(r"step \d+/8", ended.stdout)
    assert f"{points['val/top1', STEPS]:.4f}" in ended.stdout
    assert {name: (good.path / name).read_bytes() for name in kept} == before
    assert good.mlflow_run.info.run_id == first.run_id
    assert good.mlflow_run.info.status == "FINISHED"
    assert mlflow_points(good.launch, first.run_id) == points
    assert len(client(good.launch).search_logged_models([first.experiment_id])) == 1


def test_the_readme_s_snippet_loads_the_model(good):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    snippet = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1] + "\nassert logits.shape == (5, 10)\n"
    ended = subprocess.run(
        [sys.executable, "-c", snippet], cwd=good.launch, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_a_folder_of_photographs(tmp_path):
    launch = tmp_path / "launch"
    photo_folder(launch / "photos")
    ended, _ = fit(
        launch,
        "data.source=folder",
        "data.path=photos",
        "data.image_size=64",
        "model.name=resnet18",
        "train.epochs=1",
        "scaling.num_workers=1",
        "scaling.cpus_per_worker=1",
        "run.name=photos",
        *(word for word in LIGHT if not word.startswith("schedule")),
        env=with_probe(tmp_path / "probe", OMP_NUM_THREADS="2"),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    path = launch / "runs" / "photos"
    state = json.loads((path / "checkpoints" / "step_00000003" / "state.json").read_text())
    assert state["class_names"] == list(PHOTO_CLASSES)
    assert (state["step"], state["images_seen"]) == (3, 96)
    points = recorded_points(path)
    assert points == mlflow_points(launch, only_mlflow_run(launch).info.run_id)
    assert steps_of(points, "train/loss") == [1, 2, 3]
    assert points["val/samples", 3] == 32
    assert {key for key, _ in points} == TRAIN_KEYS | {"val/top1", "val/loss", "val/samples"}
    assert not re.search("top-?5", ended.stdout)
    assert "1 worker " in ended.stdout
    # a user's own setting stays
    assert json.loads((tmp_path / "probe" / "0.json").read_text())["threads"] == 2


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("train.epoch=3", ("train.epoch,", "train.epochs?")),
        ("optim.base_lr=-1", ("optim.base_lr", "greater than 0", "-1")),
        ("train.global_batch_size=100", ("global_batch_size 100", "micro_batch_size 16", "96", "112")),
        ("scaling.num_workers=3", ("scaling.num_workers 3", "2 micro-batches", "at most 2 workers")),
        ("model.name=resnet5", ("model.name", "resnet5", "resnet50")),
        ("train.precision=fp16", ("train.precision fp16", "bf16 or fp32")),
        ("data.source=folder", ("data.path is not set", "train/ and val/")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_value_is_refused(tmp_path, word, parts):
    if word == "train.precision=fp16":
        word = "train.precision=fp16 scaling.use_gpu=false"
    ended, seconds = fit(tmp_path / "launch", *word.split(), "schedule.warmup_epochs=0")
    check_refused(tmp_path / "launch", ended, *parts)
    assert seconds < 60


@pytest.mark.parametrize("fault", ["no folder", "an empty class", "a class that train lacks"])
def test_bad_data_is_refused(tmp_path, fault):
    launch, data = tmp_path / "launch", tmp_path / "data"
    parts = {
        "no folder": (str(data / "train"), "data.path"),
        "an empty class": (str(data / "train" / "dog"), "fill it or remove it"),
        "a class that train lacks": (str(data / "val"), "lacks: emu"),
    }[fault]
    if fault != "no folder":
        photo_folder(data, 4, 2)
    if fault == "an empty class":
        (data / "train" / "dog").mkdir()
    if fault == "a class that train lacks":  # as many classes as in train, one of another name
        (data / "val" / "rocket").rename(data / "val" / "emu")
    ended, seconds = fit(launch, "data.source=folder", f"data.path={data}", "schedule.warmup_epochs=0")
    check_refused(launch, ended, *parts)
    assert seconds < 60


def test_more_workers_than_cpus_are_refused(tmp_path):
    wanted = os.cpu_count() + 2
    ended, seconds = fit(
        tmp_path / "launch",
        f"scaling.num_workers={wanted}",
        "scaling.cpus_per_worker=1",
        f"train.global_batch_size={2 * wanted}",
        "train.micro_batch_size=2",
    )
    check_refused(tmp_path / "launch", ended, f"scaling.num_workers {wanted} needs {wanted} CPU")
    assert 1 <= int(re.search(r"has (\d+) CPU", ended.stderr)[1]) < wanted
    assert seconds < 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_gpu_that_is_not_there_is_refused(tmp_path):
    ended, seconds = fit(tmp_path / "launch", "scaling.use_gpu=true")
    check_refused(tmp_path / "launch", ended, "2 GPU", "0 GPU")
    assert seconds < 60


def test_an_mlflow_that_does_not_answer_is_refused(tmp_path):
    ended, seconds = fit(tmp_path / "launch", "tracking.uri=http://127.0.0.1:9")
    check_refused(tmp_path / "launch", ended, "http://127.0.0.1:9", "tracking.uri", "tracking.enabled=false")
    assert seconds < 60
