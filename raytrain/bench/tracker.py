"""What an outage of MLflow costs a training: a real server, behind a gate that lets through, refuses, hangs or fails.

The sides are trainings with a run each, in threads of one process that pass a baton, as in `bench.step`. All start with
a server that answers; then one keeps it, and for the others it is gone in one way each.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from raytrain import tracking
from raytrain.bench.report import Report
from raytrain.bench.step import Baton
from raytrain.commandline import parse
from raytrain.data.source import open_sources
from raytrain.distributed import Runtime, available_cores
from raytrain.errors import RunError
from raytrain.loop import train
from raytrain.recorder import Recorder, read_metrics
from raytrain.run import Run
from raytrain.storage import Storage
from raytrain.worker import sending

SIDES = ("up", "stopped", "hanging", "errors")
RATIOS = {f"{side}_vs_up": (side, "up") for side in SIDES[1:]}
START_SECONDS = 60


def bench_tracker(rounds: int, steps: int) -> Report:
    """Measures seconds a step, every one of which is logged, and checks that each history is complete at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        port = _free_port()
        server = _start_server(folder, port)
        gates = {side: Gate(port) for side in SIDES}
        try:
            tracked = {side: _start_run(side, gate.uri) for side, gate in gates.items()}
            batons = {side: Baton(torch.device("cpu")) for side in SIDES}
            threads = {
                side: batons[side].start(partial(_side, folder / side, tracked[side], steps), available_cores())
                for side in SIDES
            }
            rows: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(rounds + 1):
                for side in SIDES[:: 1 if number % 2 else -1]:  # who follows whom changes from round to round
                    seconds = batons[side].run()
                    if number > 0:  # the first one warms up, with a server that answers
                        rows[side].append(seconds / steps)
                for side, gate in gates.items():
                    gate.mode = side
            for gate in gates.values():
                gate.mode = "up"
            for side, baton in batons.items():
                baton.end(threads[side])
            complete = [side for side in SIDES if _is_complete(folder / side, tracked[side])]
        finally:
            server.terminate()
            server.wait()
            dist.destroy_process_group()
    notes = (
        f"The quickstart's network, {steps} steps a turn, each logged; a real MLflow server behind a gate.",
        "up: it answers. stopped: its port is closed. hanging: it takes requests and is silent. errors: it says 500.",
        f"When it answered again the history in MLflow was complete: {', '.join(complete) or 'none'}.",
    )
    return Report("tracker", "seconds a step", rows, RATIOS, notes, libraries=("torch", "mlflow"), digits=3)


class Gate:
    """A port of this machine in front of another one. Its `mode` is one of SIDES."""

    def __init__(self, port: int) -> None:
        self._target, self.mode = port, "up"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._held: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self.mode == "hanging":
                self._held.append(client)
            elif self.mode == "stopped":
                client.close()
            elif self.mode == "errors":
                client.recv(2**16)
                client.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                client.close()
            else:
                server = socket.create_connection(("127.0.0.1", self._target))
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink, self.mode), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, mode: str) -> None:
        with suppress(OSError):
            while (data := source.recv(2**16)) and self.mode == mode:
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _side(folder: Path, tracked: tracking.TrackedRun, steps: int, baton: Baton) -> None:
    words = ["train.log_every=1", "train.epochs=1000", "train.eval_every_epochs=1000", "scaling.num_workers=1"]
    config = parse([*words, "checkpoint.every_epochs=null"], "quickstart", frozenset()).config
    folder.mkdir()
    directory, seen = Storage(folder, RunError), [0]

    def end_turn(event: dict[str, Any]) -> None:
        if event["kind"] == "metrics":
            seen[0] += 1
            if seen[0] % steps == 0:
                baton.wait()

    with sending(Run(config, directory, tracked), lambda _: None) as send:
        recorder = Recorder(directory, send, end_turn)
        baton.wait()
        try:
            train(config, Runtime(), open_sources(config.data), directory, recorder)
        finally:
            recorder.close()


def _is_complete(folder: Path, tracked: tracking.TrackedRun) -> bool:
    rows = read_metrics(Storage(folder, RunError))
    if not tracking.log_missing(tracked, rows, print):  # as the end of a run does
        return False
    from mlflow import MlflowClient

    points = MlflowClient(tracked.uri).get_metric_history(tracked.run_id, "train/loss")
    return sorted(point.step for point in points) == [row["step"] for row in rows]


def _start_run(name: str, uri: str) -> tracking.TrackedRun:
    return tracking.start_run(uri, "bench", name=name, params={}, tags={}, config="")


def _start_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), *store]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(  # noqa: S603 - our own words
        [*command, "--workers", "1"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return server
        time.sleep(0.2)
    server.terminate()
    raise RunError(f"an MLflow server did not start in {START_SECONDS} s")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
