"""Metrics on their way to MLflow, beside the training and never in its way."""

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

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


class MetricSender:
    """Sends metrics to a run from a thread of its own. For the worker of rank 0.

    While the tracker fails, values wait in memory and are tried again, at longer and longer intervals; an
    outage costs one warning, from the thread. A value is sent with the time of `send`, and MLflow keeps one
    of equal (metric, step, time, value): a request that was stored though its answer was lost does no harm.
    """

    def __init__(self, run: TrackedRun, warn: Warn, *, system_metrics: bool = False) -> None:
        self._run = run
        self._warn = warn
        self._system_metrics = system_metrics
        self._last_steps = dict(run.last_steps)
        self._waiting: list[tuple[str, float, int, int]] = []  # key, value, milliseconds, step
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._client: MlflowClient | None = None
        self._lost = 0
        self._failing = False
        # For as long as it lives, so that its thread does not change the environment of a training process.
        self._release_limits = hold_request_limits()
        self._thread = threading.Thread(target=self._work, name="tracking-sender", daemon=True)
        self._thread.start()

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the metrics of a step; returns at once and never raises.

        A (metric, step) at or before one that was sent is dropped: a resumed run repeats steps. So is a value
        that is not finite: MLflow would show infinity as 1.8e308.
        """
        now = int(time.time() * 1000)
        with self._lock:
            for key, value in metrics.items():
                if step <= self._last_steps.get(key, -1) or not math.isfinite(value):
                    continue
                if len(self._waiting) >= MAX_WAITING_POINTS:
                    self._lost += 1
                    continue
                self._last_steps[key] = step
                self._waiting.append((key, float(value), now, step))

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
            sent = True
            while sent and self._waiting:
                sent = self._deliver()
            pause = SEND_EVERY_SECONDS if sent else min(2 * pause, MAX_SEND_EVERY_SECONDS)

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
        stored = [step for key, step in self._last_steps.items() if key.startswith("system/")]
        step = max(stored, default=-1) + 1
        due = time.monotonic() + MACHINE_EVERY_SECONDS
        while True:
            yield
            if time.monotonic() >= due:
                due = time.monotonic() + MACHINE_EVERY_SECONDS
                for reader in monitor.monitors:
                    reader.clear_metrics()
                monitor.collect_metrics()
                readings = monitor.aggregate_metrics()
                self.send({f"system/{key}": value for key, value in readings.items()}, step)
                step += 1


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
        client, info = connect(run)
        from mlflow.entities import Metric

        with request_limits(retries=1):
            keys = {key for row in rows for key in row} - {"step", "time"}
            stored = {(key, point.step) for key in keys for point in client.get_metric_history(info.run_id, key)}
            missing = [
                Metric(key, value, int(row["time"] * 1000), int(row["step"]))
                for row in rows
                for key, value in row.items()
                if key in keys and (key, row["step"]) not in stored and math.isfinite(value)
            ]
            for first in range(0, len(missing), 1000):  # MLflow takes 1000 in a request
                client.log_batch(info.run_id, metrics=missing[first : first + 1000])
        return True
    return False
