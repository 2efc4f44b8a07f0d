"""Accuracy curves as PNG."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np


def plot_accuracy(curves: Mapping[str, Mapping], title: str, out: Path) -> Path:
    """Plot curves by name (`Score.curve`): accuracy against prefix length, length or number of pairs.

    The dashed line is chance, for the longest of the curves, where the task knows it. A curve over many
    lengths is drawn as means over 32 groups of lengths, since a single length has few sequences.
    """
    from fla_train.utils.figure_style import new_axes  # imports matplotlib

    axes = new_axes(7, 4)
    lowest = 0.0
    for name, curve in curves.items():
        x, y, n = curve["x"], curve["y"], curve["n"]
        if curve["axis"] != "prefix" and len(x) > 32:
            x, y = _grouped(x, y, n, 32)
        lowest = min(lowest, *y)
        axes.plot(x, y, label=name, lw=1.5, marker="o" if len(x) <= 32 else None, ms=3)
    longest = max(curves.values(), key=lambda curve: curve["x"][-1])
    if longest.get("chance"):
        axes.plot(longest["x"], longest["chance"], label="chance", color="gray", ls="--", lw=1, zorder=3)
    axes.set(
        xlabel={"prefix": "prefix length (tokens)", "length": "sequence length (tokens)"}.get(
            curve["axis"], curve["axis"].replace("_", " ")
        ),
        ylabel=curve["metric"].replace("_", " "),
        ylim=(lowest - 0.05, 1.05),  # scaled accuracy goes below 0
        title=title,
    )
    axes.legend(fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    axes.figure.savefig(out, dpi=120)
    return out


def _grouped(x: list[float], y: list[float], weights: list[float], groups: int) -> list[np.ndarray]:
    """Join adjacent points to `groups` weighted means."""
    starts = np.arange(0, len(x), -(-len(x) // groups))
    totals = np.add.reduceat(weights, starts)
    return [np.add.reduceat(np.multiply(values, weights), starts) / totals for values in (x, y)]
