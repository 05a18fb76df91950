"""The form that every benchmark's figures take."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Report:
    """Figures of alternating rounds.

    Args:
        bench: its name.
        unit: of all rows.
        rows: by name, a figure for each round.
        ratios: by key X_vs_Y, the names of the two rows; X's figure over Y's of the same round.
        notes: what a reader must know beside the figures.
    """

    bench: str
    unit: str
    rows: dict[str, list[float]]
    ratios: dict[str, tuple[str, str]]
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """Markdown: medians over the rounds, with minimum and maximum."""
        rounds = len(next(iter(self.rows.values())))
        lines = [f"| {self.unit} | median | min | max |", "|---|---|---|---|"]
        lines += [_line(name, figures, 1) for name, figures in self.rows.items()]
        lines += ["", f"| ratio, {rounds} rounds | median | min | max |", "|---|---|---|---|"]
        lines += [_line(key, figures, 3) for key, figures in self._ratio_figures().items()]
        machine = _machine()
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        hardware = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
        return "\n".join([*lines, "", f"{hardware}; {versions}", *self.notes])

    def write_json(self, path: str) -> None:
        """Writes the figures with the machine they were measured on."""
        content = {
            "bench": self.bench,
            "machine": _machine(),
            "rows": [{"name": name, "unit": self.unit, **_spread(figures)} for name, figures in self.rows.items()],
            "ratios": {key: _spread(figures) for key, figures in self._ratio_figures().items()},
        }
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _ratio_figures(self) -> dict[str, list[float]]:
        return {
            key: [one / other for one, other in zip(self.rows[x], self.rows[y], strict=True)]
            for key, (x, y) in self.ratios.items()
        }


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _line(name: str, figures: Sequence[float], digits: int) -> str:
    spread = _spread(figures)
    return f"| {name} | " + " | ".join(f"{spread[key]:.{digits}f}" for key in ("median", "min", "max")) + " |"


def _spread(figures: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(figures), "min": min(figures), "max": max(figures)}


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "torchvision")},
        },
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
