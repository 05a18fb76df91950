"""Starts a run's workers, resizes them with the cluster, and starts them anew after failures, until the run is done."""

import itertools
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

import ray
import ray.exceptions
from ray._private import state as ray_state

from raytrain import run as runs
from raytrain.attempt import attempt, start_relay
from raytrain.cluster import Allotment, Node, allot, capacity, usable_nodes
from raytrain.config import Config
from raytrain.console import Console
from raytrain.data.order import epoch_order
from raytrain.errors import ResourceError, RunError, StoppedError, WorkerError
from raytrain.failures import Failure, decide
from raytrain.plan import Plan
from raytrain.recorder import EVENTS, Lines
from raytrain.run import Run

T = TypeVar("T")

LOOK_SECONDS = 2.0
"""How often the cluster is looked at: for nodes that have come or are about to leave, or that a run waits for."""
SETTLE_SECONDS = 6.0
"""How long there must be room for more workers before a run is interrupted for them."""


class Supervisor:
    """Starts workers until the run is done, or has to be given up.

    Args:
        run: which.
        plan: of its epochs and steps.
        console: shows it.
        signals: that have come to this process.
        relay: from `start_relay`.
    """

    def __init__(self, run: Run, plan: Plan, console: Console, signals: list[int], relay: Any) -> None:
        self._run, self._plan, self._console, self._signals, self._relay = run, plan, console, signals, relay
        self._scaling = run.config.scaling
        self._events = Lines(run.folder, EVENTS)
        self._failures: list[Failure] = []
        self._crowded = False
        """Whether Ray could not place workers that the cluster would hold if it were empty."""

    def train(self) -> None:
        """Returns when the run is done.

        Raises:
            RaytrainError: what ended it.
        """
        with closing(self._events), tempfile.TemporaryDirectory(prefix="raytrain-") as self._scratch:
            self._train()

    def _train(self) -> None:
        for number in itertools.count():
            if number > 0 and not _lives(self._relay):
                self._relay = start_relay()
            allotment, nodes = self._patiently(self._room)
            self._run = self._patiently(lambda: runs.next_attempt(self._run))
            self._console.workers(allotment.num_workers)
            self._note("start", workers=allotment.num_workers)
            watch = _ClusterWatch(self._run.config, allotment, nodes, self._signals, self._console)
            ended = attempt(
                self._run, allotment, nodes, self._relay, self._scratch, self._console.handle, watch.stop_wanted
            )
            self._crowded = ended.found_no_room
            if self._crowded:
                continue
            if ended.failure is None:
                self._note("end")
                return
            if isinstance(ended.error, StoppedError):
                self._take_stop(ended.error, watch)
                continue
            decision = decide(ended.failure, self._failures, self._scaling)
            self._failures.append(ended.failure)
            details = f"\n{ended.failure.details}" if ended.failure.details else ""
            step, reason = ended.failure.step, decision.reason
            self._note("failure", step=step, reason=reason, details=details.strip(), restart=decision.restart)
            if not decision.restart:
                if not ended.failure.is_transient:
                    assert ended.error is not None
                    raise ended.error
                samples = "" if decision.hopeless_step is None else self._samples(decision.hopeless_step)
                raise WorkerError(
                    f"{decision.reason}{samples}; continue the run with --resume{details}"
                ) from ended.error
            self._console.warn(f"{decision.reason}{details}")
            self._wait(decision.delay_seconds)

    def _take_stop(self, error: StoppedError, watch: "_ClusterWatch") -> None:
        """After all ranks have stopped with a checkpoint: ends the run, or returns for it to go on."""
        if self._signals:
            self._note("stop", reason=str(error))
            raise StoppedError(str(error), self._signals[0])
        if watch.reason is None and self._scaling.max_failures == 0:  # a worker was signalled, and none is to follow
            self._note("stop", reason=str(error))
            raise error
        reason = watch.reason or "a worker was told to stop"
        self._note("resize", reason=reason)
        self._console.line(f"{reason}; going on after a checkpoint")

    def _room(self) -> tuple[Allotment, list[Node]]:
        """Workers that there is room for, and the nodes that have it."""
        nodes = usable_nodes(ray.nodes(), nodes_leaving())
        return allot(self._scaling, _unused(nodes) if self._crowded else nodes), nodes

    def _patiently(self, call: Callable[[], T]) -> T:
        """What a call returns that may need time in a run that has begun: for nodes to come, for a disk to have room.

        Raises:
            ResourceError: there is still no room for the workers.
            RunError: the run directory can still not be written.
            StoppedError: a signal came meanwhile.
        """
        begun, told = time.monotonic(), False
        while True:
            try:
                return call()
            except (ResourceError, RunError) as error:
                if self._run.attempt == 0 or time.monotonic() - begun > self._scaling.node_wait_seconds:
                    raise
                if not told:
                    told = True
                    self._console.warn(f"waiting up to {self._scaling.node_wait_seconds:g} s: {error}")
                self._wait(LOOK_SECONDS)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._signals:
                self._note("stop", reason="stopped between two starts of the workers")
                raise StoppedError("stopped; the newest checkpoint is of an earlier step", self._signals[0])
            time.sleep(min(left, 0.1))

    def _samples(self, step: int) -> str:
        """Which images a step has: in a file, and the first of them."""
        order = epoch_order(self._run.config.run.seed, step // self._plan.steps_per_epoch, self._plan.num_images)
        samples = [int(order[place]) for part in self._plan.micro_batches(step) for place in part]
        name = f"samples_of_step_{step}.txt"
        self._run.folder.write(name, "".join(f"{sample}\n" for sample in samples).encode())
        first = ", ".join(map(str, samples[:8]))
        return f"; its training images are {first}, ... (all {len(samples)} in {self._run.folder.where(name)})"

    def _note(self, kind: str, **what: Any) -> None:
        row = {"time": round(time.time(), 3), "kind": kind, "attempt": self._run.attempt, **what}
        self._events.add(row)
        try:
            self._events.flush()
        except RunError as error:
            self._console.warn(str(error))


class _ClusterWatch:
    """Looks for reasons to stop an attempt: signals, nodes that are about to leave, nodes that have come."""

    def __init__(
        self, config: Config, allotment: Allotment, nodes: list[Node], signals: list[int], console: Console
    ) -> None:
        self._scaling, self._allotment, self._signals, self._console = config.scaling, allotment, signals, console
        self._ids = {node["NodeID"] for node in nodes}
        self._looked = time.monotonic()
        self._more_since: float | None = None
        self._heard = 0
        self.reason: str | None = None
        """Why the cluster had the attempt stopped; None: it had not."""

    def stop_wanted(self, begun: bool) -> int:  # noqa: FBT001 - one fact, from one caller
        """The signal to stop for, or 0.

        Args:
            begun: whether all workers have.

        Raises:
            StoppedError: at a second signal.
        """
        if len(self._signals) > max(1, self._heard):
            raise StoppedError("stopped at once; the newest checkpoint is of an earlier step", self._signals[-1])
        if self._signals:
            if not self._heard:
                self._console.line("stopping after the present step, with a checkpoint; once more to stop at once")
            self._heard = len(self._signals)
            return self._signals[0]
        if self.reason is None and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            self.reason = self._look() if begun else self._look_early()
        return signal.SIGTERM if self.reason else 0

    def _look(self) -> str | None:
        leaving = nodes_leaving()
        if self._ids.intersection(leaving):
            return "a node is about to leave"
        if self._allotment.num_workers == self._scaling.max_workers:
            return None
        nodes = usable_nodes(ray.nodes(), leaving)
        try:
            room = allot(self._scaling, nodes).num_workers
        except ResourceError:
            room = 0
        # what Ray has not got back from a worker that is gone, or what others hold, is no room
        room = min(room, self._allotment.num_workers + capacity(_unused(nodes), self._allotment.resources))
        if room <= self._allotment.num_workers:
            self._more_since = None
        elif self._more_since is None:
            self._more_since = time.monotonic()
        elif time.monotonic() - self._more_since > SETTLE_SECONDS:
            return f"there is room for {room} workers in place of {self._allotment.num_workers}"
        return None

    def _look_early(self) -> str | None:
        """A node that leaves before its worker was placed leaves Ray waiting for it."""
        there = {node["NodeID"] for node in usable_nodes(ray.nodes(), nodes_leaving())}
        return None if self._ids <= there else "a node has left before the workers had begun"


def _unused(nodes: list[Node]) -> list[Node]:
    """The nodes with what of their resources nobody has."""
    free = ray_state.available_resources_per_node()
    return [{**node, "Resources": free.get(node["NodeID"], {})} for node in nodes]


def nodes_leaving() -> set[str]:
    """Ids of the nodes that Ray has been told are about to leave."""
    return set(ray_state.state.get_draining_nodes())


def _lives(relay: Any) -> bool:
    try:
        ray.get(relay.fetch.remote(), timeout=LOOK_SECONDS)
    except ray.exceptions.RayError:
        return False
    return True
