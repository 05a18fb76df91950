"""The command line in processes of its own, what it leaves behind, and real photographs to train on."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import skimage.data
from PIL import Image
from sklearn.datasets import load_sample_images

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 400  # of a run that takes 20 s on two idle cores
LIGHT = ("tracking.log_model=false", "tracking.system_metrics=false", "schedule.warmup_epochs=0", "train.log_every=1")
NOISE = ("Traceback", "WARNING", "INFO", "(pid=", "(raylet)", "Warning:", "ray.exceptions")
PHOTO_CLASSES = ("cat", "coffee", "flower", "rocket")

# Tells of each process that belongs to a process group where it is and how many threads torch has there.
# Asked in a new thread each time: a thread keeps the number that it saw first.
PROBE = """
import json, os, sys, threading, time

def tell():
    torch, dist = sys.modules["torch"], sys.modules["torch.distributed"]
    if dist.is_available() and dist.is_initialized():
        seen = {"pid": os.getpid(), "cwd": os.getcwd(), "files": os.listdir(), "threads": torch.get_num_threads()}
        path = os.path.join(os.environ["PROBE_FOLDER"], f"{dist.get_rank()}.json")
        with open(path + ".tmp", "w") as file:
            json.dump(seen, file)
        os.replace(path + ".tmp", path)

def tell_quietly():
    try:
        tell()
    except Exception:  # torch is not there, or being imported
        pass

def watch():
    while True:
        time.sleep(0.2)
        thread = threading.Thread(target=tell_quietly, daemon=True)
        thread.start()
        thread.join()

threading.Thread(target=watch, daemon=True).start()
"""


def environment(**changes):
    """This process's environment, with changes; None takes a variable away."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "RAY_", "TORCHELASTIC_"))}
    wanted = {**own, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "", **changes}
    return {key: value for key, value in wanted.items() if value is not None}


def with_probe(folder, **changes):
    """An environment in which each rank writes folder/RANK.json, see PROBE."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PROBE)
    return environment(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}", PROBE_FOLDER=str(folder), **changes)


def fit(cwd, *words, module=("raytrain.fit",), env=None):
    """`python -m raytrain.fit WORDS` to its end, with what it printed and how long it took."""
    started = time.monotonic()
    with background(cwd, *words, module=module, env=env) as run:
        run.wait()
    return subprocess.CompletedProcess(words, run.returncode, run.out(), run.err()), time.monotonic() - started


class Background:
    """A command that runs, its output going into files."""

    def __init__(self, command, cwd, env):
        self._seen = set()
        number = len(list(cwd.parent.glob(f"{cwd.name}-*.out")))
        self._out, self._err = (cwd.parent / f"{cwd.name}-{number}.{end}" for end in ("out", "err"))
        with self._out.open("w") as out, self._err.open("w") as err:
            # a session of its own, so that a Ctrl-C can be sent to it as a terminal sends it: to the group
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=env or environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def returncode(self):
        return self.process.returncode

    def out(self):
        return self._out.read_text()

    def err(self):
        return self._err.read_text()

    def wait(self, seconds=TIMEOUT_SECONDS):
        return self.process.wait(seconds)

    def wait_for(self, text):
        """Returns when `text` is in what the command has printed."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while text not in self.out():
            assert self.process.poll() is None, f"ended with {self.returncode}: {self.out()}{self.err()}"
            assert time.monotonic() < end, f"waited in vain for {text!r}: {self.out()}{self.err()}"
            time.sleep(0.05)

    def tree(self):
        """All the processes below the command's; they end with the block, if the command dies before them too."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self._seen.update(found)
        return found

    def kill(self):
        """Ends the command and all that it has started."""
        with suppress(psutil.NoSuchProcess):
            self.tree()
        for process in (*self._seen, self.process):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


@contextmanager
def background(cwd, *words, module=("raytrain.fit",), env=None):
    """`python -m raytrain.fit WORDS` as it runs; at the end of the block neither it nor its children do."""
    cwd.mkdir(parents=True, exist_ok=True)
    run = Background([sys.executable, "-m", *module, *words], cwd, env)
    try:
        yield run
    finally:
        run.kill()


def client(cwd):
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{cwd / 'mlflow.db'}")


def mlflow_runs(cwd):
    """Every MLflow run there is in a launch directory's store, of whatever experiment and state."""
    from mlflow.entities import ViewType

    store = client(cwd)
    return store.search_runs([e.experiment_id for e in store.search_experiments(ViewType.ALL)], "", ViewType.ALL)


def only_mlflow_run(cwd):
    (found,) = mlflow_runs(cwd)
    return found


def mlflow_points(cwd, run_id):
    """{(metric, step): value}, after a check that there is one value of each."""
    store = client(cwd)
    points = [
        ((metric.key, metric.step), metric.value)
        for key in store.get_run(run_id).data.metrics
        if not key.startswith("system/")
        for metric in store.get_metric_history(run_id, key)
    ]
    assert [place for place, count in Counter(place for place, _ in points).items() if count > 1] == []
    return dict(points)


def recorded_points(run_path):
    """The same of a run directory's metrics.jsonl."""
    rows = [json.loads(line) for line in (run_path / "metrics.jsonl").read_text().splitlines()]
    points = [((key, row["step"]), value) for row in rows for key, value in row.items() if key not in ("step", "time")]
    assert [place for place, count in Counter(place for place, _ in points).items() if count > 1] == []
    return dict(points)


def steps_of(points, key):
    return sorted(step for name, step in points if name == key)


def snapshot(folder):
    """What would show any change under a folder: {path: (size, time of change)}."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and ".lock" not in path.name
    }


def check_refused(cwd, ended, *parts):
    """A user's error: exit 2, one message with all of `parts` in it, and nothing begun."""
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stderr.startswith("raytrain: ")
    assert ended.stderr.count("raytrain: ") == 1
    assert len(ended.stderr.splitlines()) <= 3, ended.stderr
    for part in parts:
        assert part in ended.stderr
    assert all("are no images by their names" in line for line in ended.stdout.splitlines()), ended.stdout
    check_quiet(ended.stdout + ended.stderr)
    assert list(cwd.glob("runs/*")) == []
    assert not (cwd / "mlflow.db").exists() or mlflow_runs(cwd) == []


def check_quiet(text):
    """Nothing of Ray's, torch's or MLflow's own."""
    assert [word for word in NOISE if word in text] == [], text


def photo_folder(root, train_per_class=24, val_per_class=8):
    """A dataset of 64 x 64 px pieces of photographs: four classes, four formats, and what a folder gathers besides.

    Returns:
        The paths of the training images, in the order of a source: by class, then by name.
    """
    flower = next(
        image
        for image, name in zip(load_sample_images().images, load_sample_images().filenames, strict=True)
        if "flower" in name
    )
    pictures = (skimage.data.chelsea(), skimage.data.coffee(), flower, skimage.data.rocket())
    photos = dict(zip(PHOTO_CLASSES, pictures, strict=True))
    random = np.random.default_rng(0)
    train = []
    for split, count in (("train", train_per_class), ("val", val_per_class)):
        for name, photo in photos.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                top, left = (random.integers(0, length - 64) for length in photo.shape[:2])
                path = folder / f"{number:03d}.{('jpg', 'png', 'bmp', 'webp')[number % 4]}"
                Image.fromarray(photo[top : top + 64, left : left + 64]).save(path)
                if split == "train":
                    train.append(path)
        (root / split / ".ipynb_checkpoints").mkdir()
        (root / split / ".ipynb_checkpoints" / "000.png").write_bytes(b"a copy that an editor keeps")
        (root / split / "notes.txt").write_text("not a class")
        (root / split / "cat" / "Thumbs.db").write_text("not an image")
    return train
