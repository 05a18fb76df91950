"""What one process of a run does, whoever started it.

No Ray here: `launch` calls `work` from inside the processes that Ray starts, `standalone` from torchrun's.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from raytrain.data.source import Sources, open_sources
from raytrain.distributed import Runtime
from raytrain.loop import train
from raytrain.recorder import Listener, Recorder
from raytrain.run import Run
from raytrain.state import Progress
from raytrain.tracking import MetricSender

STOP_POLL_SECONDS = 0.5
CLOSE_SENDER_SECONDS = 15.0


def work(run: Run, runtime: Runtime, listener: Listener, sources: Sources | None = None) -> Progress:
    """Trains as one rank of a run. All ranks must call.

    The run is asked to stop by `request_stop`, or by the runtime's own `stop_requested`.

    Args:
        run: what to do.
        runtime: this process.
        listener: takes rank 0's events; must not raise or wait.
        sources: the images, where they are open already.

    Raises:
        RaytrainError: see `loop.train`.
    """
    sources = sources or open_sources(run.config.data)
    if runtime.rank != 0:
        return train(run.config, runtime, sources, run.checkpoints, Recorder())
    with _watch_for_stop(run, runtime) as watching, sending(run, listener) as send:
        recorder = Recorder(run.path / "metrics.jsonl", listener, send)
        try:
            return train(run.config, watching, sources, run.checkpoints, recorder)
        finally:
            recorder.close()


def request_stop(run: Run, signum: int) -> None:
    """Asks a run, on whatever machine it is, to stop after its present step."""
    (run.path / "stop").write_text(str(signum), encoding="utf-8")


@contextmanager
def _watch_for_stop(run: Run, runtime: Runtime) -> Iterator[Runtime]:
    """A runtime that also knows of `request_stop`. The file is looked for beside the steps."""
    found: list[int] = []
    done = threading.Event()

    def watch(path: Path) -> None:
        while not done.wait(STOP_POLL_SECONDS):
            if path.exists() and (text := path.read_text(encoding="utf-8")):
                found.append(int(text))
                return

    thread = threading.Thread(target=watch, args=(run.path / "stop",), name="stop-watch", daemon=True)
    thread.start()
    try:
        yield replace(runtime, stop_requested=lambda: found[0] if found else runtime.stop_requested())
    finally:
        done.set()
        thread.join()


@contextmanager
def sending(run: Run, listener: Listener) -> Iterator[Listener]:
    """A listener that sends metrics to MLflow, where the run is tracked."""
    if run.tracked is None:
        yield lambda _: None
        return

    def warn(text: str) -> None:
        listener({"kind": "warning", "text": text})

    sender = MetricSender(run.tracked, warn, system_metrics=run.config.tracking.system_metrics)

    def send(event: dict[str, Any]) -> None:
        if event["kind"] == "metrics":
            sender.send(event["metrics"], event["step"])

    try:
        yield send
    finally:
        sender.close(CLOSE_SENDER_SECONDS)
