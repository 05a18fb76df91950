"""What a person sees while a run goes on: one live line, and a line for each thing worth keeping."""

import math
import sys
from typing import Any, TextIO

from rich.console import Console as Rich
from rich.live import Live
from rich.text import Text

from raytrain.plan import Plan


class Console:
    """Shows a run's events. On a terminal one line is kept alive, elsewhere each state of it is a plain line.

    Args:
        plan: of the run.
        out: where to write.
    """

    def __init__(self, plan: Plan, out: TextIO | None = None) -> None:
        self._plan, self._num_workers = plan, 0
        self._rich = Rich(file=out or sys.stdout, highlight=False, soft_wrap=True)
        self._live = Live(Text("starting"), console=self._rich, refresh_per_second=4, transient=True)
        self._epoch = 0.0

    def __enter__(self) -> "Console":
        if self._rich.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._rich.is_terminal:
            self._live.update(Text(""))
            self._live.stop()

    def handle(self, event: dict[str, Any]) -> None:
        """Takes in what a recorder tells its listeners."""
        if event["kind"] != "metrics":
            (self.warn if event["kind"] == "warning" else self.line)(event["text"])
            return
        step, metrics = event["step"], event["metrics"]
        self._epoch = metrics.get("epoch", self._epoch)
        if "val/top1" in metrics:
            top5 = f"  top5 {metrics['val/top5']:.4f}" if "val/top5" in metrics else ""
            when = f"epoch {self._epoch:g}" if self._epoch % 1 == 0 else f"step {step:,}"
            self.line(
                f"{when}: val top1 {metrics['val/top1']:.4f}{top5}  "
                f"loss {metrics['val/loss']:.4f}  ({metrics['val/samples']:.0f} images)"
            )
        elif "train/loss" in metrics:
            self.show(self._progress(step, metrics))

    def workers(self, num_workers: int) -> None:
        """Workers are being started."""
        self._num_workers = num_workers
        self.show(f"starting {self._workers()}")

    def _workers(self) -> str:
        return f"{self._num_workers} worker{'s' if self._num_workers > 1 else ''}"

    def line(self, text: str) -> None:
        """Writes a line that stays."""
        self._rich.print(Text(text))

    def warn(self, text: str) -> None:
        """Writes a warning that stays."""
        self.line(f"warning: {text}")

    def _progress(self, step: int, metrics: dict[str, float]) -> str:
        rate = metrics["perf/images_per_second"]
        left = (self._plan.images_seen(self._plan.total_steps) - self._plan.images_seen(step)) / rate
        epochs = self._plan.epochs
        return (
            f"epoch {math.ceil(metrics['epoch'])}/{epochs}  step {step:,}/{self._plan.total_steps:,}  "
            f"loss {metrics['train/loss']:.4f}  lr {metrics['train/lr']:.4g}  {rate:,.0f} images/s  "
            f"{self._workers()}  {duration(left)} left"
        )

    def show(self, text: str) -> None:
        """Makes a text the live line."""
        if self._rich.is_terminal:
            self._live.update(Text(text))
        else:
            self.line(text)


def duration(seconds: float) -> str:
    """As 1:23 or 4:05:06."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
