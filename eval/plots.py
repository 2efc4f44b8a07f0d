"""What the figures of a report have in common."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fla_train.eval.paper import NOTED
from fla_train.eval.sets import PAPER_SETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINED = {"color": "0.4", "linestyle": "--", "linewidth": 1}
MEANING = f"{NOTED.strip()} not the papers' own data, as the report's notes say"


def set_title(name: str, records: Sequence[dict]) -> str:
    """What figures call a set: the papers' name for theirs, marked where its data have a note.

    A file of one's own may be named like one of theirs: it keeps its plain name.
    """
    results = [record["perplexity"].get(name, {}) for record in records]
    theirs = name in PAPER_SETS and not any(result.get("own_file") for result in results)
    noted = any("note" in result for result in results)
    return (PAPER_SETS[name].title if theirs else name) + NOTED * noted


def meaning(titles: Iterable[str]) -> list[str]:
    """The line below a figure that says what `NOTED` means, if a title has it."""
    return [MEANING] if any(title.endswith(NOTED) for title in titles) else []


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
    """A line at each training length; none for a model whose training nobody recorded."""
    known = {record["trained_length"] for record in records} - {None}
    for i, length in enumerate(sorted(known)):
        axes.axvline(length, label="training length" if label and i == 0 else None, **TRAINED)


def legend(axes: np.ndarray, lines: Sequence[str] = ()) -> None:
    """One legend below all panels, since not every line is in each of them; `lines` of text above it."""
    found = {}
    for panel in axes.flat:
        found |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure = axes.flat[0].figure
    # A letter of 8 points is about 0.062 inches wide, a line with its gaps 0.5: what does not fit is cut off.
    width = figure.get_figwidth()
    fitting = width / (0.5 + 0.062 * max(map(len, found)))
    text = "\n".join(row for line in lines for row in textwrap.wrap(line, int(width / 0.062)))
    place = {"loc": "outside lower center", "ncols": max(1, min(len(found), int(fitting)))}
    place |= {"title": text or None, "title_fontsize": 8}
    figure.legend(found.values(), found.keys(), frameon=False, fontsize=8, **place)


def short(length: int) -> str:
    """2048 -> 2k."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
