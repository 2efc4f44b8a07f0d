"""Accuracy curves as PNG."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

MOST_POINTS = 32  # limit on the points of a curve over lengths or slices
AXES = {"prefix": "prefix length (tokens)", "length": "sequence length (tokens)"}


def plot_accuracy(curves: Mapping[str, Mapping], title: str, out: Path) -> Path:
    """Plot curves by name (`TaskScore.curve`): accuracy against prefix length, length or number of pairs.

    The dashed line is chance, for the longest of the curves, where the task knows it. A curve over more than
    `MOST_POINTS` lengths is drawn as means over groups of lengths, since a single length has few sequences.
    """
    from fla_train.utils.figure_style import new_axes  # imports matplotlib

    axes = new_axes(7, 4)
    lowest = 0.0
    for name, curve in curves.items():
        x, y, n = curve["x"], curve["y"], curve["n"]
        if curve["axis"] != "prefix" and len(x) > MOST_POINTS:
            x, y = _grouped(x, y, n)
        lowest = min(lowest, *y)
        axes.plot(x, y, label=name, lw=1.5, marker="o" if len(x) <= MOST_POINTS else None, ms=3)
    longest = max(curves.values(), key=lambda curve: curve["x"][-1])
    if longest.get("chance"):
        axes.plot(longest["x"], longest["chance"], label="chance", color="gray", ls="--", lw=1, zorder=3)
    # All curves are of one task, so they have one axis and one metric.
    axis, metric = longest["axis"], longest["metric"]
    axes.set_xlabel(AXES.get(axis, axis.replace("_", " ")))
    axes.set_ylabel(metric.replace("_", " "))
    axes.set(ylim=(lowest - 0.05, 1.05), title=title)  # scaled accuracy goes below 0
    axes.legend(fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    axes.figure.savefig(out, dpi=120)
    return out


def _grouped(x: list[float], y: list[float], weights: list[float]) -> list[np.ndarray]:
    """Replace groups of adjacent points by their weighted means, at most `MOST_POINTS`."""
    starts = np.arange(0, len(x), -(-len(x) // MOST_POINTS))
    totals = np.add.reduceat(weights, starts)
    return [np.add.reduceat(np.multiply(values, weights), starts) / totals for values in (x, y)]
