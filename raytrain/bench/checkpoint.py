"""What a checkpoint costs a training: beside a synchronous save of the same state, on the same disk, in turns."""

import os
import tempfile
import time
from pathlib import Path

import torch

from raytrain.bench.report import Report
from raytrain.commandline import parse
from raytrain.data.loader import Batch, StepBatches
from raytrain.distributed import Runtime, resolve_precision
from raytrain.errors import RunError
from raytrain.loop import compute_gradients, update
from raytrain.monitor import Monitor
from raytrain.saver import Saver
from raytrain.state import TrainState
from raytrain.storage import Storage

CLASSES = 1000
IMAGES = 32
RATIOS = {"blocked_vs_sync_save": ("blocked", "sync_save"), "added_vs_sync_save": ("added", "sync_save")}


def bench_checkpoint(rounds: int, saves: int, spacing_seconds: float) -> Report:
    """Measures seconds a checkpoint of ResNet-50 with momentum and moving average, in one process on all cores.

    Args:
        rounds: measured, after one to warm up.
        saves: checkpoints in a round.
        spacing_seconds: of training from one to the next, in which it is to be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        training = _Training()
        saver = Saver(Storage(Path(folder) / "checkpoints", RunError), keep_last=1, keep_best=0, warn=print)
        training.steps(3)
        start = time.perf_counter()
        training.steps(5)
        steps = max(1, round(5 * spacing_seconds / (time.perf_counter() - start)))
        rows: dict[str, list[float]] = {"sync_save": [], "blocked": [], "added": []}
        for number in range(rounds + 1):
            sync = sum(training.save_and_wait(Path(folder) / "state.pt") for _ in range(saves)) / saves
            blocked, seconds = 0.0, {True: 0.0, False: 0.0}
            for turn in range(2 * saves):  # saving, not, not, saving, ...: what drifts meets both alike
                saving = (turn + turn // 2 + number) % 2 == 0
                start = time.perf_counter()
                blocked += training.save(saver) if saving else 0.0
                training.steps(steps)
                saver.finish()
                seconds[saving] += time.perf_counter() - start
            if number > 0:
                rows["sync_save"].append(sync)
                rows["blocked"].append(blocked / saves)
                rows["added"].append((seconds[True] - seconds[False]) / saves)
        saver.close()
        size = sum(file.stat().st_size for file in Path(folder).glob("checkpoints/step_*/*"))
    notes = (
        f"ResNet-50 with momentum and moving average: {size / 1e9:.2f} GB a checkpoint, {saves} of them a round.",
        "sync_save: torch.save of the same state into a file, and fsync, between two steps.",
        "blocked: what a step waits for Saver.save. added: wall time of the training that saves less that of the same",
        f"without, a checkpoint; {steps} steps from one to the next, all that is written within the time that counts.",
    )
    return Report("checkpoint", "seconds", rows, RATIOS, notes, libraries=("torch", "safetensors"), digits=3)


class _Training:
    """Steps of the quickstart's network with an ImageNet head, on images in memory."""

    def __init__(self) -> None:
        words = ["train.ema_decay=0.999", f"train.micro_batch_size={IMAGES}", "scaling.num_workers=1"]
        self._config = parse(words, "quickstart", frozenset()).config
        self._runtime, self._monitor = Runtime(), Monitor()
        self._precision = resolve_precision("auto", self._runtime.device)
        self._state = TrainState(self._config, CLASSES, self._runtime, self._precision)
        images = torch.randint(0, 256, (IMAGES, 32, 32, 3), dtype=torch.uint8)
        self._batches = StepBatches([Batch(images, torch.randint(CLASSES, (IMAGES,)), IMAGES)], 0)

    def steps(self, count: int) -> None:
        """Takes so many."""
        state = self._state
        for step in range(state.progress.step, state.progress.step + count):
            outcome = compute_gradients(
                self._config, state, self._batches, 1, IMAGES, step, self._precision, self._runtime, self._monitor
            )
            state.batchnorm.update(outcome.statistics, step + 1)
            update(state, 0.01, None)
            state.progress.step = step + 1

    def save(self, saver: Saver) -> float:
        """Seconds that a step is held up by a checkpoint."""
        start = time.perf_counter()
        saver.save(*self._state.parts({}))
        return time.perf_counter() - start

    def save_and_wait(self, path: Path) -> float:
        """Seconds of a synchronous save."""
        _, weights, training, state = self._state.parts({})
        start = time.perf_counter()
        with path.open("wb") as file:
            torch.save({"weights": weights, "training": training, "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - start
