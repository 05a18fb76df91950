"""What one process of a run does, whoever started it.

No Ray here: `attempt` calls `work` from inside the processes that Ray starts, `standalone` from torchrun's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raytrain.checkpoint import saved
from raytrain.data.source import Sources, open_sources
from raytrain.distributed import Runtime
from raytrain.loop import train
from raytrain.monitor import Monitor
from raytrain.recorder import Listener, Recorder, read_metrics
from raytrain.run import Run
from raytrain.state import Progress
from raytrain.tracking import MetricSender

CLOSE_SENDER_SECONDS = 15.0


def work(run: Run, runtime: Runtime, listener: Listener, monitor: Monitor, sources: Sources | None = None) -> Progress:
    """Trains as one rank of a run. All ranks must call.

    Args:
        run: what to do.
        runtime: this process.
        listener: takes rank 0's events; must not raise or wait.
        monitor: is told where this rank is.
        sources: the images, where they are open already.

    Raises:
        RunError: the run directory is not the one that all ranks see, or this one cannot write it.
        RaytrainError: see `loop.train`.
    """
    run.check_attempt()
    if runtime.rank == 0 and not saved(run.checkpoints):  # later a disk that is full for a while ends nothing
        run.check_writable()
    sources = sources or open_sources(run.config.data)
    if runtime.rank != 0:
        return train(run.config, runtime, sources, run.checkpoints, Recorder(), monitor)
    with sending(run, listener) as send:
        recorder = Recorder(run.folder, listener, send, guard=run.check_attempt)
        try:
            return train(run.config, runtime, sources, run.checkpoints, recorder, monitor)
        finally:
            recorder.close()


@contextmanager
def sending(run: Run, listener: Listener) -> Iterator[Listener]:
    """A listener that sends metrics to MLflow, where the run is tracked."""
    if run.tracked is None:
        yield lambda _: None
        return

    def warn(text: str) -> None:
        listener({"kind": "warning", "text": text})

    sender = MetricSender(
        run.tracked, warn, read_metrics(run.folder), system_metrics=run.config.tracking.system_metrics
    )

    def send(event: dict[str, Any]) -> None:
        if event["kind"] == "metrics":
            sender.send(event["row"])

    try:
        yield send
    finally:
        sender.close(CLOSE_SENDER_SECONDS)
