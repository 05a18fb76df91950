"""The driver: Ray, its resources, and a TorchTrainer whose workers each call `worker.work`."""

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Ray reads these when it is imported or a worker is started; what the user has set stays.
_RAY_SETTINGS = {
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else what a worker prints appears twice
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how soon the end of a worker is noticed; Ray's own is 2
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning about future versions of Ray
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",  # of the ranks that wait for one that has failed
}
for _name, _value in _RAY_SETTINGS.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402
import ray.exceptions  # noqa: E402
import ray.train  # noqa: E402
import ray.train.torch  # noqa: E402
from ray._private import worker as ray_worker  # noqa: E402

from raytrain import run as runs  # noqa: E402
from raytrain import tracking  # noqa: E402
from raytrain.commandline import Request  # noqa: E402
from raytrain.config import Config, Scaling  # noqa: E402
from raytrain.console import Console  # noqa: E402
from raytrain.data.source import open_sources  # noqa: E402
from raytrain.distributed import Runtime, check_precision  # noqa: E402
from raytrain.errors import RaytrainError, ResourceError, StoppedError, TrackingError, WorkerError  # noqa: E402
from raytrain.model import check_model  # noqa: E402
from raytrain.plan import make_plan  # noqa: E402
from raytrain.run import Run  # noqa: E402
from raytrain.schedule import make_schedule  # noqa: E402
from raytrain.worker import request_stop, work  # noqa: E402

POLL_SECONDS = 0.25


def launch(request: Request) -> None:
    """Trains over Ray's workers as a command line asks, and returns when the run has ended well.

    Raises:
        RaytrainError: any of the tree.
    """
    config, path = runs.resolve(request)
    if runs.is_finished(path):
        print(f"run {path.name} is finished\n{runs.summary(path)}")
        return
    sources = open_sources(config.data, print)
    check_model(config.model, config.data, len(sources.train.class_names))
    plan = make_plan(config.train, len(sources.train.labels))
    make_schedule(config, plan)
    with _signals() as signals, _ray():
        resources = worker_resources(config.scaling, ray.nodes())
        device_type = "cuda" if "GPU" in resources else "cpu"
        check_precision(config.train.precision, device_type)
        _check_tracking(config)
        with runs.claim(path, resume="--resume" in request.flags):
            tags = runs.place_tags(config.scaling.num_workers, device_type)
            run = runs.start(config, path, plan.num_images, tags)
            with Console(plan, config.scaling.num_workers) as console, runs.finishing(run, console):
                _fit(run, resources, console, signals)


def worker_resources(scaling: Scaling, nodes: list[dict[str, Any]]) -> dict[str, float]:
    """What each worker takes: {"CPU": n} or {"CPU": n, "GPU": 1}.

    Args:
        scaling: the config's section.
        nodes: as `ray.nodes()` gives them.

    Raises:
        ResourceError: the nodes cannot hold the workers, each of them on one node.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    cpus, gpus = (sum(node.get(kind, 0) for node in alive) for kind in ("CPU", "GPU"))
    use_gpu = gpus > 0 if scaling.use_gpu is None else scaling.use_gpu
    share = max(1, int(cpus // scaling.num_workers))
    need = {"CPU": float(scaling.cpus_per_worker or share), **({"GPU": 1.0} if use_gpu else {})}
    if scaling.cpus_per_worker is None:  # an even share may not fit on uneven nodes
        while need["CPU"] > 1 and _capacity(alive, need) < scaling.num_workers:
            need["CPU"] -= 1
    if _capacity(alive, need) < scaling.num_workers:
        total = {kind: amount * scaling.num_workers for kind, amount in need.items()}
        raise ResourceError(
            f"scaling.num_workers {scaling.num_workers} needs {_amounts(total)} ({_amounts(need)} a worker, each on "
            f"one node), and the cluster has {_amounts({'CPU': cpus, 'GPU': gpus})} on {len(alive)} node(s): at most "
            f"{_capacity(alive, need)} such workers"
        )
    return need


def _capacity(nodes: list[dict[str, float]], need: dict[str, float]) -> int:
    return sum(min(int(node.get(kind, 0) // amount) for kind, amount in need.items()) for node in nodes)


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def _check_tracking(config: Config) -> None:
    """A store in a file serves one machine."""
    nodes = sum(node["Alive"] for node in ray.nodes())
    uri = tracking.resolve_uri(config.tracking.uri, Path.cwd())
    if config.tracking.enabled and nodes > 1 and tracking.is_local(uri):
        raise TrackingError(
            f"tracking.uri {uri} is a file of this machine, and the cluster has {nodes} nodes; start `mlflow server` "
            "where all of them reach it and set tracking.uri, or set tracking.enabled=false"
        )


class _Relay:
    """An actor that holds events from workers until the driver fetches them."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=10_000)

    def push(self, event: dict[str, Any]) -> None:
        self._events.append(event)

    def fetch(self) -> list[dict[str, Any]]:
        events = list(self._events)
        self._events.clear()
        return events


def _train_worker(payload: dict[str, Any]) -> None:
    """What runs in each of Ray's workers."""
    context = ray.train.get_context()
    runtime = Runtime(
        context.get_world_rank(),
        context.get_local_rank(),
        context.get_world_size(),
        ray.train.torch.get_device(),
    )
    work(payload["run"], runtime, payload["relay"].push.remote)


def _fit(run: Run, resources: dict[str, float], console: Console, signals: list[int]) -> None:
    """Runs a TorchTrainer to its end, showing what its workers tell, and passing signals on to them.

    Raises:
        RaytrainError: what a worker raised, or WorkerError where one died or raised something else.
        StoppedError: at once at a second signal.
    """
    relay = ray.remote(num_cpus=0)(_Relay).remote()
    trainer = ray.train.torch.TorchTrainer(
        _train_worker,
        train_loop_config={"run": run, "relay": relay},
        torch_config=ray.train.torch.TorchConfig(backend="nccl" if "GPU" in resources else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=run.config.scaling.num_workers,
            use_gpu="GPU" in resources,
            resources_per_worker=resources,
        ),
        run_config=ray.train.RunConfig(
            # a directory that Ray has used before it would resume from, by rules of its own
            name=time.strftime("%Y%m%d-%H%M%S"),
            storage_path=str(run.path / "ray"),
            logging_config=ray.train.LoggingConfig(log_level="CRITICAL"),
        ),
    )
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001 - raised below, in the main thread
            failure.append(error)

    # Ray's own handlers of signals bypass Python's exceptions; outside the main thread it installs none
    thread = threading.Thread(target=fit, name="fit", daemon=True)
    thread.start()
    heard = 0
    lost = False

    def show_events() -> None:
        nonlocal lost
        try:
            for event in ray.get(relay.fetch.remote()) if not lost else ():
                console.handle(event)
        except ray.exceptions.RayError as error:  # progress is not worth a run
            lost = True
            console.warn(f"progress is no longer shown: {type(error).__name__}")

    while thread.is_alive():
        thread.join(POLL_SECONDS)
        show_events()
        if len(signals) > heard:
            heard = len(signals)
            if heard > 1:
                raise StoppedError("stopped at once; the newest checkpoint is of an earlier step", signals[-1])
            request_stop(run, signals[0])
            console.line("stopping after the present step, with a checkpoint; once more to stop at once")
    show_events()
    if failure:
        raise _cause(failure[0], signals)


def _cause(error: BaseException, signals: list[int]) -> RaytrainError:
    """What to tell of the error that Ray's trainer ended with."""
    failures: dict[int, Exception] = dict(sorted(getattr(error, "worker_failures", {}).items()))
    for failure in failures.values():
        if isinstance(failure, StoppedError):
            return StoppedError(str(failure), signals[0] if signals else signal.SIGTERM)
        if isinstance(failure, RaytrainError):
            return failure
    dead = [str(rank) for rank, failure in failures.items() if type(failure).__name__ == "WorkerHealthCheckFailedError"]
    if dead:
        return WorkerError(
            f"the worker process of rank {', '.join(dead)} died: it was killed, or the machine had no memory left; "
            "continue the run with --resume"
        )
    return WorkerError(f"training failed; when that is put right, continue the run with --resume\n{error}")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals to stop that have come so far, instead of their effects."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ray() -> Iterator[None]:
    """A connection to the cluster at RAY_ADDRESS, or a Ray on this machine for as long as it is needed."""
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":  # Ray would write a token into the home directory, which clusters started later then need
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # else "(raylet) A worker died" and the like, which come whatever log_to_driver says
    ray_worker.print_to_stdstream = lambda *_, **__: None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    for number, handler in handlers.items():
        signal.signal(number, handler)  # ray.init has put its own in their place
    try:
        yield
    finally:
        ray.shutdown()
