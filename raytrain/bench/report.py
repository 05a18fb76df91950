"""The form that every benchmark's figures take."""

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from raytrain.distributed import available_cores


@dataclass(frozen=True)
class Report:
    """Figures of alternating rounds.

    Args:
        bench: its name.
        unit: of all rows, or by row, its own.
        rows: by name, a figure for each round.
        ratios: by key X_vs_Y, the rows above and below the line, of the same round. Where rows are costs Y's is
            above, so that more is always better.
        notes: what a reader must know beside the figures.
        tables: where units differ: by its title, the rows that a line shows, a column for each unit, and "" for none.
        libraries: those whose versions matter to the figures.
        digits: of the rows' figures, after the point.
    """

    bench: str
    unit: str | dict[str, str]
    rows: dict[str, list[float]]
    ratios: dict[str, tuple[str, str]]
    notes: tuple[str, ...] = ()
    tables: tuple[dict[str, tuple[str, ...]], ...] = ()
    libraries: tuple[str, ...] = ("torch", "torchvision")
    digits: int = 1

    def table(self) -> str:
        """Markdown: medians over the rounds, with minimum and maximum."""
        rounds = len(next(iter(self.rows.values())))
        lines = self._wide_lines() if self.tables else self._long_lines()
        lines += ["", f"| ratio, {rounds} rounds | median | min | max |", "|---|---|---|---|"]
        lines += [_line(key, figures, 3) for key, figures in self._ratio_figures().items()]
        machine = _machine(self.libraries)
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        hardware = [name for name in (machine["gpu"], f"{machine['cpu']}, {machine['cores']} cores") if name]
        return "\n".join([*lines, "", "; ".join([*hardware, versions]), *self.notes])

    def write_json(self, path: str) -> None:
        """Writes the figures with the machine they were measured on."""
        content = {
            "bench": self.bench,
            "machine": _machine(self.libraries),
            "rows": [{"name": name, "unit": self._unit(name), **_spread(self.rows[name])} for name in self.rows],
            "ratios": {key: _spread(figures) for key, figures in self._ratio_figures().items()},
        }
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _unit(self, name: str) -> str:
        return self.unit if isinstance(self.unit, str) else self.unit[name]

    def _long_lines(self) -> list[str]:
        head = [f"| {self.unit} | median | min | max |", "|---|---|---|---|"]
        return [*head, *(_line(name, figures, self.digits) for name, figures in self.rows.items())]

    def _wide_lines(self) -> list[str]:
        lines = []
        for table in self.tables:
            units = [self._unit(next(filter(None, names))) for names in zip(*table.values(), strict=True)]
            lines += [""] * bool(lines)
            lines += ["| median (min - max) | " + " | ".join(units) + " |", "|---" * (len(units) + 1) + "|"]
            lines += [
                f"| {title} | {' | '.join(_cell(self.rows[name]) if name else '' for name in names)} |"
                for title, names in table.items()
            ]
        return lines

    def _ratio_figures(self) -> dict[str, list[float]]:
        return {
            key: [one / other for one, other in zip(self.rows[above], self.rows[below], strict=True)]
            for key, (above, below) in self.ratios.items()
        }


def _line(name: str, figures: Sequence[float], digits: int) -> str:
    spread = _spread(figures)
    return f"| {name} | " + " | ".join(f"{spread[key]:.{digits}f}" for key in ("median", "min", "max")) + " |"


def _cell(figures: Sequence[float]) -> str:
    spread = _spread(figures)
    digits = 2 if spread["median"] < 10 else 0
    return "{median:.{d}f} ({min:.{d}f} - {max:.{d}f})".format(d=digits, **spread)


def _spread(figures: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(figures), "min": min(figures), "max": max(figures)}


def _machine(libraries: Sequence[str]) -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in libraries},
        },
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
