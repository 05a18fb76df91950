"""The learning curves of a run as one figure."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    "loss": {"train/loss": "train", "val/loss": "validation"},
    "validation accuracy": {"val/top1": "top 1", "val/top5": "top 5"},
    "learning rate": {"train/lr": ""},
    "images / s": {"perf/images_per_second": ""},
}
"""From title to the metrics in a panel, with their labels."""
COLORS = ("#4269d0", "#ef7d1a")
"""Of the first and the second metric of a panel."""
GRAY = "#666666"


def draw_curves(metrics: Sequence[Mapping[str, float]]) -> "Figure":
    """Loss, accuracy, learning rate and throughput over the step, as far as there are any."""
    from matplotlib.figure import Figure  # without pyplot there is no display and no state to care for

    known = {key for row in metrics for key in row}
    panels = [(title, labels) for title, labels in PANELS.items() if known & labels.keys()]
    columns = 2 if len(panels) > 1 else 1
    rows = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(5.2 * columns, 3.1 * rows), layout="constrained")
    for place, (title, labels) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for color, (key, label) in zip(COLORS, labels.items(), strict=False):
            points = [(row["step"], row[key]) for row in metrics if key in row]
            if not points:
                continue
            steps, values = zip(*points, strict=True)
            width, marker = (1.2, "") if len(points) > 60 else (1.8, "o")
            axes.plot(steps, values, color=color, label=label, linewidth=width, marker=marker, markersize=3.5)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step", color=GRAY)
        axes.grid(visible=True, color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=GRAY)
        if title == "loss" and axes.dataLim.y0 > 0 and axes.dataLim.y1 > 20 * axes.dataLim.y0:
            axes.set_yscale("log")  # one wild early evaluation would flatten all that follows
        if "accuracy" in title:
            axes.yaxis.set_major_formatter("{x:.0%}")
        if any(labels.values()):
            axes.legend(frameon=False)
        else:
            axes.set_ylim(bottom=0)
    return figure
