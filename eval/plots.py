"""What the figures of a report have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fla_train.eval.paper import NOTED
from fla_train.eval.sets import PAPER_SETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINED = {"color": "0.4", "linestyle": "--", "linewidth": 1}


def set_title(name: str, records: Sequence[dict]) -> str:
    """What figures call a set: the papers' name for theirs, marked where its data have a note."""
    noted = any("note" in record["perplexity"].get(name, {}) for record in records)
    return (PAPER_SETS[name].title if name in PAPER_SETS else name) + NOTED * noted


@contextmanager
def grid(file: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[np.ndarray]:
    """Axes [rows, columns], `size` inches each; written as png and pdf when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=(size[0] * columns, size[1] * rows), layout="constrained", squeeze=False
    )
    yield axes
    figure.savefig(file.with_suffix(".png"), dpi=130)
    figure.set_layout_engine("none")  # found once; finding it again takes as long as drawing
    figure.savefig(file.with_suffix(".pdf"))
    plt.close(figure)


def readable_sets(records: Sequence[dict]) -> dict[str, dict]:
    """The sets that any of the evaluations could read, with one of the results."""
    return {
        name: result
        for record in records
        for name, result in record["perplexity"].items()
        if "error" not in result
    }


def mark_training(axes: Axes, records: Sequence[dict], label: bool) -> None:
    for i, length in enumerate(sorted({record["trained_length"] for record in records})):
        axes.axvline(length, label="training length" if label and i == 0 else None, **TRAINED)


def legend(axes: np.ndarray) -> None:
    """One legend below all panels, since not every line is in each of them."""
    found = {}
    for panel in axes.flat:
        found |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure = axes.flat[0].figure
    # A letter of 8 points is about 0.062 inches wide, a line with its gaps 0.5: what does not fit is cut off.
    fitting = figure.get_figwidth() / (0.5 + 0.062 * max(map(len, found)))
    place = {"loc": "outside lower center", "ncols": max(1, min(len(found), int(fitting)))}
    figure.legend(found.values(), found.keys(), frameon=False, fontsize=8, **place)


def short(length: int) -> str:
    """2048 -> 2k."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
