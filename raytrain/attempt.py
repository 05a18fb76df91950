"""One start of a run's workers: a TorchTrainer, from its placement to its end, and how it ended.

Each worker tells an actor beside the driver every second what it is doing, and is told in return whether to stop. So
the driver knows of a rank that hangs, and where in its code, and of one whose machine is gone, long before a collective
or Ray would give it up.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
import ray.train
import ray.train.torch
import ray.train.torch.config
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain.cluster import Allotment, Node
from raytrain.distributed import Runtime, flight_recorder
from raytrain.errors import RaytrainError, RunError, StoppedError, WorkerError
from raytrain.failures import Failure
from raytrain.monitor import Monitor, Status
from raytrain.relay import Orders, Relay
from raytrain.remote import RemoteServer, start_server
from raytrain.run import Run
from raytrain.signals import listen, signal_to_stop
from raytrain.watch import LOST_SECONDS, Watch
from raytrain.worker import work

POLL_SECONDS = 0.25
BEAT_SECONDS = 1.0
START_SECONDS = 300.0
"""In which all workers have begun, once there is room for them."""
MAX_CONTROLLERS = 16
"""Of attempts that are over, but for Ray's noticing that a machine is gone, which takes a minute."""
EXIT_LOST = 86
"""Of a worker that was told to end at once, or has lost its driver."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended; nothing of it: well."""

    failure: Failure | None = None
    error: RaytrainError | None = None
    """What to end the run with if it is not started again."""
    found_no_room: bool = False
    """Whether the workers could not be placed: others hold what the cluster has."""


class _Relay(Relay):
    """The relay as an actor, which also takes in Ray's controllers of the workers.

    Ray would start a process for each of them, which then imports for seconds what the one before had imported.
    """

    @ray.method(concurrency_group="controllers")
    def control(self, arguments: dict[str, Any]) -> ray.train.Result:
        """What a TrainController makes of its arguments."""
        controller = TrainController(**arguments)
        asyncio.run(controller.run())
        return controller.get_result()


def start_relay() -> Any:
    """The actor, on this machine. One serves all attempts, several of which may still be about to end."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {
        "num_cpus": 0,
        "scheduling_strategy": here,
        "concurrency_groups": {"controllers": MAX_CONTROLLERS},
        "runtime_env": {"env_vars": get_env_vars_to_propagate()},  # which a controller passes on to its workers
    }
    return ray.remote(**options)(_Relay).remote()


def attempt(
    run: Run,
    allotment: Allotment,
    nodes: Sequence[Node],
    relay: Any,
    scratch: str,
    show: Callable[[dict[str, Any]], None],
    stop_wanted: Callable[[bool], int],
) -> Ended:
    """Runs workers to their end.

    Args:
        run: what they train.
        allotment: how many of them, and what each takes.
        nodes: where they may be.
        relay: from `start_relay`.
        scratch: a directory of this machine.
        show: is given the events of rank 0's recorder.
        stop_wanted: asked several times a second, and told whether all workers have begun; once it returns a signal's
            number all ranks stop after a step. Raises StoppedError to end at once.
    """
    watch = Watch(run.config.train.step_timeout_seconds, nodes)
    server = start_server(run.config) if run.config.comm.sync == "async" else None
    trainer = _make_trainer(run, allotment, nodes, relay, server, scratch)
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001 - judged below
            errors.append(error)

    # Ray's own handlers of signals bypass Python's exceptions; outside the main thread it installs none
    thread = threading.Thread(target=fit, name="fit", daemon=True)
    try:
        ray.get(relay.begin.remote(run.attempt))
        thread.start()
        stopped = _follow(thread, allotment.num_workers, relay, watch, show, stop_wanted)
    except ray.exceptions.RayError as error:  # its workers end when they hear no more of it
        return _failed(f"the relay between workers and driver failed ({type(error).__name__})", watch)
    finally:
        if server is not None:
            ray.kill(server)
    if stopped:
        reason = "stopped before the workers had begun"  # so there is nothing to save
        return Ended(Failure(reason, is_transient=False), StoppedError(reason, stopped))
    if watch.fault is not None:
        return _failed(watch.fault, watch, watch.details)
    return _judge(errors[0], watch) if errors else Ended()


def _follow(
    thread: threading.Thread,
    num_workers: int,
    relay: Any,
    watch: Watch,
    show: Callable[[dict[str, Any]], None],
    stop_wanted: Callable[[bool], int],
) -> int:
    """Shows, watches and passes on, until the trainer has ended, or the watch has found a fault.

    Of that Ray knows only later; meanwhile the next workers can be on their way.

    Returns:
        The signal that came before all workers had begun, or 0.

    Raises:
        RayError: the relay is gone.
    """
    started, stop = time.monotonic(), 0
    while thread.is_alive() and watch.fault is None:
        thread.join(POLL_SECONDS)
        events, beats = ray.get(relay.fetch.remote())
        for event in events:
            show(event)
        watch.look(beats)
        begun = len(watch.spoken) == num_workers
        wanted = stop_wanted(begun)
        if wanted and not begun:
            return wanted
        if wanted and not stop:
            stop = wanted
            ray.get(relay.order.remote(Orders(stop)))
        if not begun and time.monotonic() - started > START_SECONDS:
            watch.fault = f"{len(watch.spoken)} of {num_workers} workers had begun in {START_SECONDS:g} s"
    if watch.fault is not None:
        ray.get(relay.order.remote(Orders(abort=True)))
    for event in ray.get(relay.fetch.remote())[0]:
        show(event)
    return 0


def _judge(error: BaseException, watch: Watch) -> Ended:
    """What the error that Ray's trainer ended with comes from."""
    failures: dict[int, Exception] = dict(sorted(getattr(error, "worker_failures", {}).items()))
    own = [failure for failure in failures.values() if isinstance(failure, RaytrainError)]
    for failure in (*(one for one in own if isinstance(one, StoppedError)), *own):
        return Ended(Failure(str(failure), step=watch.step, is_transient=False), failure)
    dead = [rank for rank, failure in failures.items() if type(failure).__name__ == "WorkerHealthCheckFailedError"]
    if dead:
        who = ", ".join(f"{rank}{watch.node_of(rank)}" for rank in dead)
        return _failed(f"the worker process of rank {who} died: it was killed, or its machine is gone or full", watch)
    for rank, failure in failures.items():
        text = str(failure).strip().splitlines()
        return _failed(f"rank {rank}{watch.node_of(rank)} failed: {text[-1] if text else repr(failure)}", watch, error)
    if "WorkerGroupStartupTimeoutError" in repr(error):
        return Ended(found_no_room=True)
    first = (str(error).strip() or repr(error)).splitlines()[0]
    return _failed(f"Ray's controller of the workers failed: {first}", watch, error)


def _failed(reason: str, watch: Watch, details: object = "") -> Ended:
    return Ended(Failure(reason, str(details), watch.step), WorkerError(reason))


class _Trainer(ray.train.torch.TorchTrainer):
    """Ray's, without three of its actors: each takes a process that needs longer to start than all else it does.

    One is for the controller, see `_Relay`. One would distribute Ray's datasets. The third would remove placement
    groups, which Ray itself does when the driver is gone, and lives for ever where the driver was killed and there is
    no dashboard.
    """

    def __init__(self, relay: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._relay = relay

    def _initialize_and_run_controller(self, **arguments: Any) -> ray.train.Result:
        return ray.get(self._relay.control.remote(arguments))

    def _create_default_callbacks(self) -> list[Any]:
        without = ("PlacementGroupCleanerCallback", "DatasetsCallback")
        return [one for one in super()._create_default_callbacks() if type(one).__name__ not in without]


def _make_trainer(
    run: Run, allotment: Allotment, nodes: Sequence[Node], relay: Any, server: Any, scratch: str
) -> ray.train.torch.TorchTrainer:
    use_gpu = "GPU" in allotment.resources
    return _Trainer(
        relay,
        _train_worker,
        train_loop_config={"run": run, "relay": relay, "server": server},
        torch_config=_TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=allotment.num_workers,
            use_gpu=use_gpu,
            resources_per_worker=allotment.resources,
            label_selector={"ray.io/node-id": f"in({','.join(node['NodeID'] for node in nodes)})"},
        ),
        run_config=ray.train.RunConfig(
            # a directory that Ray has used before it would resume from, by rules of its own
            name=f"{time.strftime('%Y%m%d-%H%M%S')}-{run.attempt}",
            # never used: no checkpoint is reported to Ray
            storage_path=scratch,
            logging_config=ray.train.LoggingConfig(log_level="CRITICAL"),
            # the driver decides, see `failures`; by default Ray would try for ever to start what cannot be
            failure_config=ray.train.FailureConfig(0, controller_failure_limit=0, max_preemption_failures=0),
        ),
    )


class _Backend(ray.train.torch.config._TorchBackend):  # noqa: SLF001
    """Ray's, and beside it the signals to a worker, which its main thread has to ask for: a step runs in another."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Before the training function is called."""
        worker_group.execute(listen)
        super().on_start(worker_group, backend_config)


@dataclass
class _TorchConfig(ray.train.torch.TorchConfig):
    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend


def _dump_flight_recorder(run: Run, status: Status) -> None:
    """What torch knows of the collectives of a worker that is about to end."""
    if text := flight_recorder():
        with suppress(RunError):
            run.folder.write(f"flight_recorder-{run.attempt}-{status.rank}.json", text.encode())


def _train_worker(payload: dict[str, Any]) -> None:
    """What runs in each of Ray's workers."""
    context, run, relay = ray.train.get_context(), payload["run"], payload["relay"]
    node = ray.get_runtime_context().get_node_id()
    monitor = Monitor(context.get_world_rank(), socket.gethostname(), node)
    with _beating(run, relay, monitor) as stop_requested:
        runtime = Runtime(
            context.get_world_rank(),
            context.get_local_rank(),
            context.get_world_size(),
            ray.train.torch.get_device(),
            stop_requested,
            node,
            payload["server"] and RemoteServer(payload["server"]),
        )
        work(run, runtime, lambda event: relay.push.remote(run.attempt, event), monitor)


@contextmanager
def _beating(run: Run, relay: Any, monitor: Monitor) -> Iterator[Callable[[], int]]:
    """Tells the relay of this worker, from a thread. Gives what to ask for the signal to stop for."""
    limit = run.config.train.step_timeout_seconds
    orders, done = [Orders()], threading.Event()

    def beat() -> None:
        heard = time.monotonic()
        while True:
            status = monitor.status()
            if limit is not None and status.seconds > limit and status.phase != "start":
                status = monitor.status(stack=True)
            try:
                orders[0] = ray.get(relay.beat.remote(run.attempt, status, done=False), timeout=LOST_SECONDS)
                heard = time.monotonic()
            except ray.exceptions.ActorDiedError:  # and the driver starts others
                orders[0] = Orders(abort=True)
            except ray.exceptions.RayError:
                pass
            if orders[0].abort or time.monotonic() - heard > LOST_SECONDS:
                _dump_flight_recorder(run, status)
                os._exit(EXIT_LOST)
            if done.wait(BEAT_SECONDS):
                return

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield lambda: orders[0].stop or signal_to_stop()
    finally:
        done.set()
        thread.join(LOST_SECONDS)  # or its last word might come after the one that follows
        relay.beat.remote(run.attempt, monitor.status(), done=True)
