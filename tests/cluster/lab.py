"""Three hosts with Ray, an MLflow server on one of them, and a run that is started again whenever its driver ends."""

import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from raytrain.bench.hosts import ROOT, cluster_of, environment
from tests.cluster.checks import KEEP, Steps, read_rows
from tests.cluster.nodes import start_ray

DISK = "64m"
RECIPE = (
    "model.name=shufflenet_v2_x0_5",
    "train.micro_batch_size=8",
    "train.log_every=1",
    "train.step_timeout_seconds=20",
    "checkpoint.every_steps=10",
    f"checkpoint.keep_last={KEEP[0]}",
    f"checkpoint.keep_best={KEEP[1]}",
    "scaling.cpus_per_worker=1",
    "scaling.max_failures=1000",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
)
EXACT = ("comm.reduction=exact", "scaling.num_workers={min: 1, max: 3}")
FLOAT = ("comm.reduction=float", "scaling.num_workers=2")
STUCK_SECONDS = 240


class StuckError(Exception):
    """The run did not go on, or not end, in a time in which it should have."""


class Lab:
    """Hosts with Ray, an MLflow server, and a run whose driver is started again whenever it has ended too soon.

    What it lacks for the moment, `tick` gives back when it is due: to be called again and again.
    """

    def __init__(self, hosts, folder, steps, is_fixed, seed):
        self.hosts, self.folder, self.total_steps, self.is_fixed = hosts, folder, steps, is_fixed
        self.random = random.Random(seed)
        self.disk, self.log, self.run = folder / "disk", folder / "driver.log", folder / "disk" / "run"
        self.gone, self.notes, self.said, self.corrupted, self._due = [], [], [], [], []
        (folder / "probe").mkdir()
        self.steps = Steps(folder / "probe", "run")
        head = hosts[0].address
        self.uri = f"http://{head}:5000"
        self.words = [
            *RECIPE,
            *(FLOAT if is_fixed else EXACT),
            f"run.storage_path={self.disk}",
            f"tracking.uri={self.uri}",
        ]
        path = f"{ROOT / 'tests' / 'cluster' / 'probe'}:{ROOT}"
        self.env = environment(PYTHONPATH=path, PROBE_FOLDER=str(folder / "probe"), RAY_ADDRESS=f"{head}:6379")
        self.driver, self.finishing = None, False

    def set_up(self):
        self.start_mlflow()
        self.start_ray(self.hosts[0])
        with ThreadPoolExecutor() as executor:
            list(executor.map(self.start_ray, self.hosts[1:]))
        self.wait_for_mlflow()

    def start_ray(self, host):
        start_ray(host, None if host is self.hosts[0] else self.hosts[0], env=self.env)

    def start_mlflow(self):
        store = self.folder / "mlflow"
        store.mkdir(exist_ok=True)
        options = [f"--host={self.hosts[0].address}", "--port=5000", "--workers=1", "--allowed-hosts=*"]
        options += [f"--backend-store-uri=sqlite:///{store}/mlflow.db", f"--artifacts-destination={store}/artifacts"]
        env = environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
        self.server = self.hosts[0].start("mlflow", "server", *options, env=env, out=self.folder / "mlflow.log")

    def wait_for_mlflow(self):
        code = f"import urllib.request as r; r.urlopen('{self.uri}/health', timeout=2)"
        self.wait("the MLflow server", lambda: self.hosts[0].run(sys.executable, "-c", code).returncode == 0)

    def fit(self, name, *words):
        command = [sys.executable, "-u", "-m", "raytrain.fit", *self.words, f"run.name={name}", *words]
        return self.hosts[0].start(*command, env=self.env, out=self.log)

    def start_driver(self, *words):
        self.driver = self.fit("run", f"train.max_steps={self.total_steps}", *words)

    def end_driver(self, number, code):
        """Signals the driver, and returns when it has ended."""
        self.hosts[0].signal(self.driver, number)
        with suppress(subprocess.TimeoutExpired):
            self.driver.wait(60)
        when = time.time()
        if self.driver.poll() != code:
            self.note(f"the driver's exit code was {self.driver.poll()} after {signal.Signals(number).name}")
            self.driver.kill()
        self.driver = None
        return when

    def workers(self):
        """The processes that compute steps: {rank: (process, host)}."""
        attempt, found = self.steps.attempt, {}
        ranks = {row["file"]: row["rank"] for row in self.steps.rows if row["attempt"] == attempt}
        for host in self.hosts:
            for pid in host.pids() if host.is_on else ():
                with suppress(OSError):
                    for link in Path(f"/proc/{pid}/fd").iterdir():
                        if (name := Path(link.readlink()).name) in ranks:
                            found[ranks[name]] = psutil.Process(pid), host
        return found

    def some_worker(self):
        self.wait("a worker", self.workers)
        rank, (process, host) = self.random.choice(sorted(self.workers().items()))
        return process, f"rank {rank} on {host.name}"

    def some_host(self):
        """One that may lose its power or its link, and has a worker."""
        there = [host for _, host in self.workers().values() if host in self.hosts[1:] and host not in self.gone]
        return self.random.choice(sorted(there, key=lambda host: host.name))

    def later(self, seconds, what, call):
        self._due.append((time.monotonic() + seconds, what, call))

    def lacks(self, *what):
        return any(one in what or not what for _, one, _ in self._due)

    def note(self, text):
        self.notes.append(text)
        print(f"  ! {text}", flush=True)

    def tick(self):
        """Gives back what is due, and starts again what has died of a fault."""
        for due in [due for due in self._due if due[0] <= time.monotonic()]:
            self._due.remove(due)
            due[2]()
        for host in self.hosts:
            if host.is_on and host not in self.gone and not self.has_ray(host):
                for pid in host.pids():
                    psutil.Process(pid).kill()
                self.start_ray(host)
                print(f"  Ray is started again in {host.name}", flush=True)
        self._listen()
        if self.driver is None or self.driver.poll() is None:
            return
        if self.driver.poll() == 0:
            if not self.finishing:
                raise StuckError("the run has ended before its last fault")
        else:
            self.note(f"the driver ended with exit code {self.driver.poll()}: {self.log.read_text()[-600:]}")
            if len(self.notes) > 20:
                raise StuckError("the driver ends again and again")
            self.start_driver("--resume")

    def _listen(self):
        """Notes what the driver says, and when: (time, line)."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.said += [(time.time(), line) for line in lines[len(self.said) :]]

    def has_ray(self, host):
        for pid in host.pids():
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).name() == "raylet":
                    return True
        return False

    def wait(self, what, condition, seconds=STUCK_SECONDS):
        """Ticks until the condition holds; returns what it returned."""
        end = time.monotonic() + seconds
        while not (result := condition()):
            if time.monotonic() > end:
                raise StuckError(f"waited {seconds} s for {what}\n{self.log.read_text()[-3000:]}")
            self.tick()
            time.sleep(0.1)
        return result

    def pause(self, seconds):
        end = time.monotonic() + seconds
        self.wait("time to pass", lambda: time.monotonic() > end)

    def keep_evidence(self):
        """Copies the run directory and Ray's logs out of what will be gone with the hosts."""
        shutil.copytree(self.run, self.folder / "left" / "run", dirs_exist_ok=True)
        for path in (self.folder / "hosts").glob("*/ray-*/session_2*/logs"):
            shutil.copytree(path, self.folder / "left" / "-".join(path.parts[-4:-2]), dirs_exist_ok=True)

    def set_pace(self, seconds):
        (self.folder / "probe" / "pace").write_text(str(seconds))

    def events(self, since):
        return [row for row in read_rows(self.run / "events.jsonl") if row["time"] >= since]


@contextmanager
def lab_in(folder, steps, *, is_fixed=False, seed=0):
    """A Lab whose run directory is on a small disk that its hosts share."""
    folder = Path(folder).resolve()
    (folder / "disk").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder / "disk"], check=True)
    try:
        with cluster_of(3, folder / "hosts") as hosts:
            lab = Lab(hosts, folder, steps, is_fixed, seed)
            try:
                lab.set_up()
                yield lab
            except StuckError:
                lab.keep_evidence()
                raise
    finally:
        subprocess.run(["umount", "-l", folder / "disk"], check=True)
