"""What a run has done, by the logs of `probe`, and whether it ended as it should.

    python -m tests.cluster.checks reference CONFIG FOLDER   trains the same in this one process, without Ray
    python -m tests.cluster.checks mlflow URI                prints what a server has
    python -m tests.cluster.checks ray ADDRESS               prints what is left in a cluster

The commands are for `verdicts`, which run them where the server and the cluster can be reached.
"""

import json
import math
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path

from raytrain.bench.hosts import ROOT, environment

KEEP = 2, 1
"""Newest and best checkpoints that the run is to keep."""
WORKER_NAMES = ("TrainWorker", "TrainController", "Relay", "raytrain")
VOLATILE = ("perf/", "system/")


class Steps:
    """The rows of all the probe's logs of one run, as they grow."""

    def __init__(self, folder, run):
        self.folder, self.run, self.rows, self._read = Path(folder), run, [], defaultdict(int)

    def poll(self):
        """Reads what has come, and returns all rows, by time."""
        new = []
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read[path])
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] += len(whole)
            new += [json.loads(line) | {"file": path.name} for line in whole.splitlines()]
        if new := [row for row in new if row["run"] == self.run]:
            self.rows = sorted([*self.rows, *new], key=lambda row: row["time"])
        return self.rows

    @property
    def attempt(self):
        """The latest that has begun a step."""
        return max((row["attempt"] for row in self.poll()), default=0)

    def last(self, attempt=math.inf):
        """The last step that was summed, by this attempt or one before; -1: none."""
        return max((row["step"] for row in self.poll() if ended(row) and row["attempt"] <= attempt), default=-1)

    def next_after(self, step, when, attempt):
        """When a later step than this was first summed, after that time and by a later attempt than this; or None."""
        rows = (row for row in self.poll() if row["time"] >= when and row["attempt"] > attempt)
        return next((row["time"] for row in rows if ended(row) and row["step"] > step), None)

    def first_of_attempt_after(self, attempt):
        """The first step that was begun again after an attempt; None: none."""
        return min((row["step"] for row in self.poll() if row["attempt"] == self._following(attempt)), default=None)

    def _following(self, attempt):
        return min((row["attempt"] for row in self.rows if row["attempt"] > attempt), default=None)


def ended(row):
    """Whether a row tells of a step that all ranks have contributed to."""
    return row["kind"] == "end"


def read_rows(path):
    """The rows of a file of the run directory; a last one that is not whole is left out."""
    rows = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        rows.extend(json.loads(line) for line in path.read_text().splitlines())
    return rows


def newest(run):
    """The newest checkpoint of a run directory, or None."""
    return max((run / "checkpoints").glob("step_*"), default=None)


def weight_faults(run, reference):
    """What differs between the last checkpoints of two runs, bit by bit."""
    import torch
    from safetensors.torch import load_file

    mine, other = newest(run), newest(reference)
    if mine is None or other is None or mine.name != other.name:
        return [f"the last checkpoints are {mine} and {other}"]
    faults, pairs = [], {}
    pairs["weight"] = [load_file(path / "model.safetensors") for path in (mine, other)]
    states = [torch.load(path / "training.pt", weights_only=True)["optimizer"]["state"] for path in (mine, other)]
    pairs["optimizer"] = [{(n, key): one[n][key] for n in one for key in one[n]} for one in states]
    for what, (first, second) in pairs.items():
        if first.keys() != second.keys() or not first:
            faults.append(f"{what}: other names")
            continue
        same = {key: _same(first[key], second[key]) for key in first}
        if not all(same.values()):
            faults.append(f"{what}: {sum(not equal for equal in same.values())} of {len(same)} differ")
    return faults


def _same(first, second):
    import torch

    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def sample_faults(rows, total_steps, steps_per_epoch, order_of):
    """Where what the last workers to compute a step took is not what the recipe says, each image of an epoch once."""
    begun, faults = defaultdict(list), []
    for row in rows:
        if not ended(row):
            begun[row["step"], row["attempt"]].append(row)
    last = {step: max(attempt for one, attempt in begun if one == step) for step, _ in begun}
    samples = defaultdict(list)
    for step in range(total_steps):
        world = begun.get((step, last.get(step)), [])
        ranks = sorted(row["rank"] for row in world)
        if not world or ranks != list(range(world[0]["world_size"])):
            faults.append(f"step {step}: ranks {ranks} of {world[0]['world_size'] if world else '?'}")
        for row in sorted(world, key=lambda row: row["rank"]):
            samples[step // steps_per_epoch] += row["samples"]
    for epoch, taken in samples.items():
        expected = list(order_of(epoch))
        if taken != expected[: len(taken)] or (len(taken) < len(expected) and epoch < max(samples)):
            twice = [sample for sample, count in Counter(taken).items() if count > 1]
            faults.append(f"epoch {epoch}: {len(taken)} of {len(expected)} samples, {len(twice)} more than once")
    return faults


def points_of(rows):
    """[((metric, step), value)] of metrics.jsonl."""
    return [((key, row["step"]), value) for row in rows for key, value in row.items() if key not in ("step", "time")]


def metric_faults(run, total_steps, tracked):
    """What is wrong with the metrics in the run directory and with what MLflow has."""
    points, faults = points_of(read_rows(run / "metrics.jsonl")), []
    faults += _repeated("metrics.jsonl", points)
    for key in ("train/loss", "train/lr", "epoch", "perf/images_per_second"):
        missing = set(range(1, total_steps + 1)) - {step for (name, step), _ in points if name == key}
        if missing:
            faults.append(f"metrics.jsonl lacks {key} of {len(missing)} steps: {sorted(missing)[:5]}")
    if [run["status"] for run in tracked] != ["FINISHED"]:
        return [*faults, f"MLflow has runs of status {[run['status'] for run in tracked]}"]
    stored = [((key, step), value) for key, step, value in tracked[0]["points"] if not key.startswith("system/")]
    faults += _repeated("MLflow", stored)
    here, there = dict(points), dict(stored)
    if wrong := [place for place in here.keys() | there.keys() if here.get(place) != there.get(place)]:
        faults.append(f"MLflow and metrics.jsonl differ in {len(wrong)} of {len(here)} points: {sorted(wrong)[:5]}")
    return faults


def _repeated(where, points):
    twice = [place for place, count in Counter(place for place, _ in points).items() if count > 1]
    return [f"{where} has {len(twice)} points more than once: {twice[:5]}"] if twice else []


def left_files(run, keep):
    """What a run directory has that it should not have at its end."""
    names = [path.name for path in run.rglob("*")]
    bad = [name for name in names if name.startswith((".writing-", "damaged_")) or name.endswith(".tmp")]
    bad += [name for name in ("probe", ".lock") if (run / name).exists()]
    saved = [path.name for path in (run / "checkpoints").iterdir()]
    return [*bad, *([f"{len(saved)} checkpoints: {saved}"] if len(saved) > keep else [])]


def left_running(lab):
    """Processes, actors and placement groups of a run that are still there."""
    cluster = command(lab, "ray", lab.env["RAY_ADDRESS"])
    actors = [name for name in cluster["actors"] if "AutoscalingCoordinator" not in name]  # one for all runs
    left = left_processes(lab.hosts) + [f"actor {name}" for name in actors]
    return left + [f"placement group {state}" for state in cluster["groups"]]


def left_processes(hosts):
    """Processes of a run that are still there."""
    import psutil

    found = []
    for host in hosts:
        for pid in host.pids():
            with suppress(psutil.NoSuchProcess):
                text = " ".join(psutil.Process(pid).cmdline())
                if any(name in text.split("/")[0] or f"-m {name}" in text for name in WORKER_NAMES):
                    found.append(f"{host.name}: {pid} {psutil.Process(pid).status()} {text[:80]}")
    return found


def verdicts(lab):
    """What is wrong with a run that has ended: {check: faults}."""
    from raytrain.data.order import epoch_order
    from raytrain.data.source import open_sources
    from raytrain.errors import RunError
    from raytrain.plan import make_plan
    from raytrain.run import load_config
    from raytrain.storage import Storage

    found = {"the driver": lab.notes + ([] if (lab.run / "result.json").exists() else ["no result.json"])}
    aside = "".join(line for _, line in lab.said)
    found["damage was seen"] = [name for name in lab.corrupted if f"damaged_{name}" not in aside]
    deadline = time.monotonic() + 20
    while (left := left_running(lab)) and time.monotonic() < deadline:
        time.sleep(0.5)
    found["nothing is left"] = left + left_files(lab.run, sum(KEEP))
    config = load_config(Storage(lab.run, RunError))
    plan = make_plan(config.train, len(open_sources(config.data).train.labels))
    order = partial(epoch_order, config.run.seed, count=plan.num_images)
    found["samples"] = sample_faults(lab.steps.poll(), plan.total_steps, plan.steps_per_epoch, order)
    tracked = [run for run in command(lab, "mlflow", lab.uri) if run["name"] == "run"]
    found["metrics"] = metric_faults(lab.run, plan.total_steps, tracked)
    found["weights"] = weight_faults(lab.run, make_reference(lab, config))
    return found


def make_reference(lab, config):
    """The directory of an undisturbed run: in one process without Ray, or on the same hosts for floating-point sums."""
    if config.comm.reduction == "float":
        lab.fit("reference", f"train.max_steps={lab.total_steps}").wait()
        return lab.disk / "reference"
    folder = lab.folder / "reference"
    words = [sys.executable, "-m", "tests.cluster.checks", "reference", lab.run / "config.yaml", folder]
    subprocess.run(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, check=True)
    return folder


def command(lab, *words):
    """What a command of this module prints, in the first host."""
    done = lab.hosts[0].run(sys.executable, "-m", "tests.cluster.checks", *words, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def train_reference(config_path, folder):
    """Trains a run's recipe in this process alone, without Ray, MLflow and faults."""
    import torch

    torch.set_num_threads(1)
    from raytrain.data.source import open_sources
    from raytrain.distributed import Runtime
    from raytrain.errors import RunError
    from raytrain.loop import train
    from raytrain.recorder import Recorder
    from raytrain.run import load_config
    from raytrain.storage import Storage

    overrides = {"checkpoint.every_steps": None, "checkpoint.every_epochs": None, "scaling.num_workers": 1}
    config = load_config(Storage(Path(config_path).parent, RunError), overrides)
    train(config, Runtime(), open_sources(config.data), Storage(folder, RunError) / "checkpoints", Recorder())


def read_mlflow(uri):
    """Every run of every experiment, with all points of all metrics."""
    from mlflow import MlflowClient
    from mlflow.entities import ViewType

    client, found = MlflowClient(uri), []
    experiments = [one.experiment_id for one in client.search_experiments(ViewType.ALL)]
    for run in client.search_runs(experiments, "", ViewType.ALL):
        points = [
            (point.key, point.step, point.value)
            for key in run.data.metrics
            for point in client.get_metric_history(run.info.run_id, key)
        ]
        found.append({"name": run.info.run_name, "status": run.info.status, "points": points})
    return found


def read_ray(address):
    """Placement groups that are not removed, actors that live, nodes that are alive."""
    import ray
    from ray._private import state

    ray.init(address, log_to_driver=False)
    groups = [group["state"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    actors = [
        actor.get("ActorClassName") or str(actor) for actor in state.actors().values() if actor["State"] != "DEAD"
    ]
    alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    return {"groups": groups, "actors": actors, "alive": alive, "free": ray.available_resources().get("CPU", 0)}


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    print(json.dumps({"reference": train_reference, "mlflow": read_mlflow, "ray": read_ray}[command](*arguments)))
