"""The table, the ratios and the picture of `raytrain.bench.comm`, and their way into MLflow."""

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain import tracking
from raytrain.bench.comm_rank import REFERENCES
from raytrain.bench.comm_ranks import Measured, Probe
from raytrain.bench.hosts import bits_per_second
from raytrain.bench.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GRAY = "#4269d0", "#ef7d1a", "#666666"


Figures = dict[tuple[str | None, str], list[Measured]]
"""By rate, None for links that are not shaped, and strategy, one for each round."""

COLUMNS = {
    "speed": "images/s",
    "step": "ms a step",
    "predicted": "ms a step, predicted",
    "vs_ddp": "of ddp at that rate",
    "lost_fraction": "of the time lost to communication",
    "wait_fraction": "of the time spent waiting",
    "wire": "MB a step on the wire",
    "arithmetic": "MB a step by arithmetic",
    "limit": "images/s that the wire lets through",
    "top1": "top-1 on the digits",
}


def link_name(rate: str | None) -> str:
    """How a link is called in the report."""
    return "unshaped" if rate is None else f"at {rate}"


@dataclass(frozen=True)
class CommReport(Report):
    """A report with a picture.

    Args:
        speeds: images/s by rate and strategy.
    """

    speeds: dict[tuple[str | None, str], list[float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        figures: Figures,
        strategies: Sequence[str],
        sync: Sequence[str],
        notes: tuple[str, ...],
        top1: Mapping[str, list[float]],
        probes: Mapping[str | None, list[Probe]],
        *,
        images_per_step: int,
        predict: Sequence[int] = (),
    ) -> "CommReport":
        """From what was measured.

        Args:
            figures: of `computation` and `ddp` unshaped, and of each rate that of `ddp` and the strategies.
            strategies: that the ratios choose the best of.
            sync: those of them that are synchronous SGD with 16 bits or more.
            notes: what a reader must know.
            top1: by strategy, what it came to on the digits.
            probes: by rate, one of each round, where there are predictions.
            images_per_step: over all workers.
            predict: numbers of workers to predict the efficiency for.
        """
        rows, units, lines = {}, {}, {}
        for rate, name in figures:
            title = "computation" if name == "computation" else f"{name} {link_name(rate)}"
            columns = _columns(figures, rate, name, images_per_step)
            if name in strategies:
                columns["top1"] = top1.get(name, [])
            if any(name in probe.sums for probe in probes.get(rate, ())):
                columns["step"] = [1000 * images_per_step / turn.images_per_second for turn in figures[rate, name]]
                columns["predicted"] = [1000 * probe.step_seconds(name, probe.world_size) for probe in probes[rate]]
            keys = {column: title if column == "speed" else f"{title}: {column}" for column in COLUMNS}
            rows |= {keys[column]: values for column, values in columns.items() if values}
            units |= {keys[column]: COLUMNS[column] for column, values in columns.items() if values}
            lines[title] = [keys[column] if columns[column] else "" for column in COLUMNS]
        used = [i for i in range(len(COLUMNS)) if any(names[i] for names in lines.values())]
        tables = [{title: tuple(names[i] for i in used) for title, names in lines.items()}]
        ratios, best = _ratios(figures, strategies, sync)
        for title in lines:
            if f"{title}: predicted" in rows:
                ratios[f"{title}: predicted_vs_measured"] = (f"{title}: predicted", f"{title}: step")
        if probes and predict:
            efficiencies = _efficiencies(probes, predict)
            rows |= {f"{title} on {count}": values for (title, count), values in efficiencies.items()}
            units |= {f"{title} on {count}": f"efficiency on {count} workers" for title, count in efficiencies}
            titles = dict.fromkeys(title for title, _ in efficiencies)
            tables.append({title: tuple(f"{title} on {count}" for count in predict) for title in titles})
            notes = (*notes, "Efficiency: predicted by raytrain.comm.predict; computation alone over a step.")
        speeds = {pair: [turn.images_per_second for turn in turns] for pair, turns in figures.items()}
        return cls("comm", units, rows, ratios, (*notes, *best), tuple(tables), speeds=speeds)

    def draw(self) -> "Figure":
        """Images/s by strategy, a panel for each rate, beside those of computation alone and of ddp unshaped."""
        from matplotlib.figure import Figure  # without pyplot there is no display and no state to care for

        rates = list(dict.fromkeys(rate for rate, name in self.speeds if name not in REFERENCES))
        tallest = max(sum(rate == other for other, _ in self.speeds) for rate in rates)
        figure = Figure(figsize=(1.5 + 3.7 * len(rates), 1.3 + 0.3 * tallest), layout="constrained")
        for place, rate in enumerate(rates, start=1):
            axes = figure.add_subplot(1, len(rates), place)
            bars = {name: speeds for (other, name), speeds in self.speeds.items() if other == rate}
            bars.pop("computation", None)
            medians = [statistics.median(speeds) for speeds in bars.values()]
            spread = [
                [median - min(speeds) for median, speeds in zip(medians, bars.values(), strict=True)],
                [max(speeds) - median for median, speeds in zip(medians, bars.values(), strict=True)],
            ]
            colors = [GRAY if name in REFERENCES else BLUE for name in bars]
            drawn = axes.barh(list(bars), medians, xerr=spread, color=colors, ecolor="#222222", height=0.7)
            axes.bar_label(drawn, fmt="%.0f", label_type="center", color="white", fontsize=8)
            for name, style in (("computation", ":"), ("ddp", "--")):
                label = "computation alone" if name == "computation" else "ddp, unshaped"
                axes.axvline(statistics.median(self.speeds[None, name]), color=ORANGE, linestyle=style, label=label)
            axes.invert_yaxis()
            axes.set_xlim(0, 1.08 * max(max(speeds) for speeds in self.speeds.values()))
            axes.set_title(f"links {link_name(rate)}", loc="left", fontsize=11)
            axes.set_xlabel("images / s", color=GRAY)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(colors=GRAY)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=2, frameon=False, fontsize=9)
        return figure

    def store(self, folder: Path) -> None:
        """Writes table, figures and picture."""
        (folder / "table.md").write_text(self.table() + "\n", encoding="utf-8")
        self.write_json(str(folder / "figures.json"))
        self.draw().savefig(folder / "picture.png", dpi=130)


@contextmanager
def tracked(uri: str | None, params: Mapping[str, str]) -> Iterator[Callable[[CommReport], None]]:
    """Gives what stores a report in a run of MLflow, which is started at once; without a URI it stores nothing.

    Raises:
        TrackingError: MLflow cannot be used.
    """
    if uri is None:
        yield lambda _: None
        return

    def warn(message: str) -> None:
        print(f"warning: {message}", file=sys.stderr)

    def store(report: CommReport) -> None:
        with tempfile.TemporaryDirectory() as folder:
            report.store(Path(folder))
            tracking.log_files(run, {Path(folder): ""}, warn)

    where = tracking.resolve_uri(uri, Path.cwd())
    run = tracking.start_run(where, "raytrain-bench", name="comm", params=params, tags={}, config="")
    status = "FAILED"
    try:
        yield store
        status = "FINISHED"
    finally:
        tracking.finish_run(run, status, warn)


def _columns(figures: Figures, rate: str | None, name: str, images_per_step: int) -> dict[str, list[float]]:
    """A line of the table: by column, the figures of each round, where there are any."""
    turns = figures[rate, name]
    columns: dict[str, list[float]] = {column: [] for column in COLUMNS}
    columns["speed"] = [turn.images_per_second for turn in turns]
    if name == "computation":
        return columns
    ddp, alone = figures[rate, "ddp"], figures[None, "computation"]
    seconds = 0 if rate is None else 8 / bits_per_second(rate)
    waits = [turn.wait_fraction for turn in turns]
    sizes = [turn.wire_bytes for turn in turns if turn.wire_bytes]  # 0 where there is nobody to send to
    return columns | {
        "vs_ddp": [own.images_per_second / other.images_per_second for own, other in zip(turns, ddp, strict=True)],
        "lost_fraction": [
            1 - own.images_per_second / other.images_per_second for own, other in zip(turns, alone, strict=True)
        ],
        "wait_fraction": [wait for wait in waits if wait is not None],
        "wire": [size / 1e6 for size in sizes],
        "arithmetic": [turn.sent_bytes / 1e6 for turn in turns],
        "limit": [images_per_step / (size * seconds) for size in sizes] if seconds else [],
    }


def _efficiencies(
    probes: Mapping[str | None, list[Probe]], predict: Sequence[int]
) -> dict[tuple[str, int], list[float]]:
    """By strategy and rate, and number of workers: computation alone over a predicted step, of each round."""
    return {
        (f"{name} {link_name(rate)}", count): [
            probe.computation.seconds / probe.step_seconds(name, count) for probe in measured
        ]
        for rate, measured in probes.items()
        for name in measured[0].sums
        for count in predict
    }


def _ratios(
    figures: Figures, strategies: Sequence[str], sync: Sequence[str]
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Of each rate, the best strategy over ddp, at that rate and unshaped; and a note of which it is.

    Links that are not shaped count where no other are. The keys of the first rate have no rate in them.
    """
    ratios, notes = {}, []
    rates = list(dict.fromkeys(rate for rate, _ in figures if rate is not None)) or [None]
    rates = rates if strategies else []
    for number, rate in enumerate(rates):
        suffix = f"_{link_name(rate).replace(' ', '_')}" if number else ""
        for kind, names in (("best_sync", sync), ("best", strategies)):
            if names:
                best = max(names, key=lambda name: statistics.median(t.images_per_second for t in figures[rate, name]))
                if rate is not None:
                    ratios[f"{kind}_vs_unshaped{suffix}"] = (f"{best} {link_name(rate)}", "ddp unshaped")
                ratios[f"{kind}_vs_plain{suffix}"] = (f"{best} {link_name(rate)}", f"ddp {link_name(rate)}")
                notes.append(f"{kind} {link_name(rate)}: {best}.")
    return ratios, [" ".join(notes)] if notes else []
