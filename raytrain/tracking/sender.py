"""Metrics on their way to MLflow, beside the training and never in its way."""

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from raytrain.tracking.client import (
    TrackedRun,
    Warn,
    connect,
    hold_request_limits,
    import_client,
    reason,
    request_limits,
    shown,
    warned,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

SEND_EVERY_SECONDS = 1.0
"""How long metrics gather into one request."""
MAX_SEND_EVERY_SECONDS = 30.0
"""How long between two tries while the tracker fails."""
MAX_WAITING_POINTS = 100_000
"""How many metric values are kept while the tracker fails; about 20 MB."""
MACHINE_EVERY_SECONDS = 10.0
"""How often CPU, memory, disk, network and GPU are read."""


class Point(NamedTuple):
    """A value of a metric, as MLflow takes it."""

    key: str
    value: float
    milliseconds: int
    step: int


class MetricSender:
    """Sends metrics to a run from a thread of its own. For the worker of rank 0.

    A value is sent with the time at which it was recorded, and MLflow keeps one of equal (metric, step, time, value):
    so a request that was stored though its answer was lost, by this process or by one that was killed, does no harm.
    While the tracker fails, values wait in memory and are tried again, at longer and longer intervals; an outage costs
    one warning, from the thread.

    Args:
        run: The run.
        warn: Called from the thread.
        rows: What metrics.jsonl has so far; what of them the run lacks is sent first.
        system_metrics: Whether to send the machine's state too.
    """

    def __init__(
        self, run: TrackedRun, warn: Warn, rows: Sequence[Mapping[str, float]] = (), *, system_metrics: bool = False
    ) -> None:
        self._run = run
        self._warn = warn
        self._system_metrics = system_metrics
        self._earlier = list(rows)
        self._waiting: list[Point] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._client: MlflowClient | None = None
        self._lost = 0
        self._failing = False
        # For as long as it lives, so that its thread does not change the environment of a training process.
        self._release_limits = hold_request_limits()
        self._thread = threading.Thread(target=self._work, name="tracking-sender", daemon=True)
        self._thread.start()

    def send(self, row: Mapping[str, float]) -> None:
        """Queue a row of metrics.jsonl; returns at once and never raises.

        A value that is not finite is dropped: MLflow would show infinity as 1.8e308.
        """
        points = _points(row)
        with self._lock:
            room = max(0, MAX_WAITING_POINTS - len(self._waiting))
            self._waiting += points[:room]
            self._lost += len(points[room:])

    def close(self, timeout_s: float) -> int:
        """Send what is waiting, in one try, and stop.

        Returns:
            How many values were not sent. Unless the outage was warned of already, they cost a warning.
        """
        self._closing.set()
        self._thread.join(timeout_s)
        self._release_limits()
        unsent = len(self._waiting) + self._lost
        if unsent:
            self._fail(f"{unsent} metric values were not sent in {timeout_s:g} s")
        return unsent

    def _work(self) -> None:
        pause = SEND_EVERY_SECONDS
        machine = self._watch_machine() if self._system_metrics else iter(())
        closing = False
        while not closing:
            closing = self._closing.wait(pause)
            next(machine, None)
            sent = self._send_earlier()
            while sent and self._waiting:
                sent = self._deliver()
            pause = SEND_EVERY_SECONDS if sent else min(2 * pause, MAX_SEND_EVERY_SECONDS)

    def _send_earlier(self) -> bool:
        """Sends what a process before this one recorded, and was killed before it could send."""
        if self._earlier:
            try:
                store_missing(self._run, self._earlier)
            except Exception as error:  # noqa: BLE001 - no failure of the tracker is one of the training
                self._fail(reason(error))
                return False
            self._earlier.clear()
        return True

    def _deliver(self) -> bool:
        """Sends a request's worth of values. Returns whether they wait no longer."""
        with self._lock:
            points = self._waiting[:1000]  # MLflow takes 1000 in a request
        lost = 0
        try:
            with request_limits(retries=0):
                self._client = self._client or import_client()(self._run.uri)
                from mlflow.entities import Metric

                batch = [Metric(*point) for point in points]
                self._client.log_batch(self._run.run_id, metrics=batch, synchronous=True)
        except Exception as error:  # noqa: BLE001 - no failure of the tracker is one of the training
            self._fail(reason(error))
            # What the server finds wrong with a request stays wrong, and would hold up all that follows.
            if getattr(error, "error_code", "") != "INVALID_PARAMETER_VALUE":
                return False
            lost = len(points)
        else:
            self._failing = False
        with self._lock:
            del self._waiting[: len(points)]
            self._lost += lost
        return True

    def _fail(self, why: str) -> None:
        if not self._failing:
            self._failing = True
            self._warn(
                f"MLflow at {shown(self._run.uri)} does not take metrics: {why}. The training goes "
                f"on; the run directory has all metrics, and they are sent when the tracker is back"
            )

    def _watch_machine(self) -> Iterator[None]:
        """Sends the machine's state when it is due, at each `next`; ends where it cannot be read."""
        try:
            import_client()
            # Only its readers: its own thread stops for good at the first request that fails, after minutes.
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            monitor = SystemMetricsMonitor(self._run.run_id, tracking_uri=self._run.uri)
            monitor.collect_metrics()  # the first reading of a CPU's load is 0
        except Exception as error:  # noqa: BLE001 - a library or a driver is missing
            self._warn(f"tracking.system_metrics: the machine cannot be watched: {reason(error)}")
            return
        due = time.monotonic() + MACHINE_EVERY_SECONDS
        while True:
            yield
            if time.monotonic() >= due:
                due = time.monotonic() + MACHINE_EVERY_SECONDS
                for reader in monitor.monitors:
                    reader.clear_metrics()
                monitor.collect_metrics()
                readings = {f"system/{key}": value for key, value in monitor.aggregate_metrics().items()}
                now = time.time()
                # a step that no process before or after this one has
                self.send({"time": now, "step": int(now - self._run.start_time / 1000), **readings})


def log_missing(run: TrackedRun, rows: Sequence[Mapping[str, float]], warn: Warn) -> bool:
    """Store what a sender could not, because it was killed or the tracker was away; what is stored stays.

    Args:
        run: The run.
        rows: Of metrics.jsonl: `step`, `time` in seconds, and the metrics.
        warn: Called if they could not be stored.

    Returns:
        Whether MLflow has all of them now.
    """
    with warned(run, "metrics", warn):
        store_missing(run, rows)
        return True
    return False


def store_missing(run: TrackedRun, rows: Sequence[Mapping[str, float]]) -> None:
    """As `log_missing`, and raises what MLflow raises."""
    client, info = connect(run)
    from mlflow.entities import Metric

    with request_limits(retries=1):
        points = [point for row in rows for point in _points(row)]
        keys = {point.key for point in points}
        stored = {(key, point.step) for key in keys for point in client.get_metric_history(info.run_id, key)}
        missing = [Metric(*point) for point in points if (point.key, point.step) not in stored]
        for first in range(0, len(missing), 1000):  # MLflow takes 1000 in a request
            client.log_batch(info.run_id, metrics=missing[first : first + 1000])


def _points(row: Mapping[str, float]) -> list[Point]:
    when = round(row["time"] * 1000)
    return [
        Point(key, float(value), when, int(row["step"]))
        for key, value in row.items()
        if key not in ("step", "time") and math.isfinite(value)
    ]
