"""The driver, from a command line to the end of a run: checks, Ray, the run directory, MLflow, then `supervisor`."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Ray reads these when it is imported or a worker is started; what the user has set stays.
_RAY_SETTINGS = {
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else what a worker prints appears twice
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how soon the end of a worker is noticed; Ray's own is 2
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # an actor for what the driver looks at itself
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning about future versions of Ray
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",  # of the ranks that wait for one that has failed
}
for _name, _value in _RAY_SETTINGS.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402
import ray.exceptions  # noqa: E402
from ray._private import worker as ray_worker  # noqa: E402

from raytrain import run as runs  # noqa: E402
from raytrain import tracking  # noqa: E402
from raytrain.attempt import start_relay  # noqa: E402
from raytrain.cluster import allot, usable_nodes  # noqa: E402
from raytrain.commandline import Request  # noqa: E402
from raytrain.config import Config  # noqa: E402
from raytrain.console import Console  # noqa: E402
from raytrain.data.source import open_sources  # noqa: E402
from raytrain.distributed import check_precision  # noqa: E402
from raytrain.errors import TrackingError  # noqa: E402
from raytrain.model import check_model  # noqa: E402
from raytrain.plan import make_plan  # noqa: E402
from raytrain.results import finishing, summary  # noqa: E402
from raytrain.schedule import make_schedule  # noqa: E402
from raytrain.signals import STOPPING, listening  # noqa: E402
from raytrain.supervisor import Supervisor, nodes_leaving  # noqa: E402


def launch(request: Request) -> None:
    """Trains over Ray's workers as a command line asks, and returns when the run has ended well.

    Raises:
        RaytrainError: any of the tree.
    """
    config, folder = runs.resolve(request)
    if runs.is_finished(folder):
        print(f"run {folder.name} is finished\n{summary(folder)}")
        return
    sources = open_sources(config.data, print)
    check_model(config.model, config.data, len(sources.train.class_names))
    plan = make_plan(config.train, len(sources.train.labels))
    make_schedule(config, plan)
    with connected(), listening() as signals:
        relay = start_relay()  # it needs seconds
        allotment = allot(config.scaling, usable_nodes(ray.nodes(), nodes_leaving()))
        device_type = "cuda" if "GPU" in allotment.resources else "cpu"
        check_precision(config.train.precision, device_type)
        _check_tracking(config)
        with runs.claim(folder, resume="--resume" in request.flags):
            tags = runs.place_tags(allotment.num_workers, device_type)
            warnings: list[str] = []
            run = runs.start(config, folder, plan.num_images, tags, warnings.append)
            with Console(plan) as console, finishing(run, console):
                for text in warnings:
                    console.warn(text)
                Supervisor(run, plan, console, signals, relay).train()


def _check_tracking(config: Config) -> None:
    """A store in a file serves one machine."""
    nodes = sum(node["Alive"] for node in ray.nodes())
    uri = tracking.resolve_uri(config.tracking.uri, Path.cwd())
    if config.tracking.enabled and nodes > 1 and tracking.is_local(uri):
        raise TrackingError(
            f"tracking.uri {uri} is a file of this machine, and the cluster has {nodes} nodes; start `mlflow server` "
            "where all of them reach it and set tracking.uri, or set tracking.enabled=false"
        )


@contextmanager
def connected() -> Iterator[None]:
    """A connection to the cluster at RAY_ADDRESS, or a Ray on this machine for as long as it is needed."""
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":  # Ray would write a token into the home directory, which clusters started later then need
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # else "(raylet) A worker died" and the like, which come whatever log_to_driver says
    ray_worker.print_to_stdstream = lambda *_, **__: None
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    for number, handler in handlers.items():
        signal.signal(number, handler)  # ray.init has put its own in their place
    try:
        yield
    finally:
        ray.shutdown()
