"""Accuracy curves of docs/results.md and docs/expressivity.md, from docs/reports/expressivity-runs.tar.xz.

    python scripts/docs_figures.py [FOLDER]

Each panel is a column of a table: sequence accuracy up to each prefix length of the longer test. Thick: the
best seed of a row. Pale: its other seeds. Dotted: training lengths. FOLDER is docs/figures if not given.
"""

import json
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fla_train.eval.expressivity_table import Run, read_tables

DOCS = Path(__file__).parent.parent / "docs"
N_H = tuple(f"DeltaProduct_{steps} [-1, 1]" for steps in (1, 2, 3, 4))
OF_2411 = (
    *("DeltaNet [-1, 1], 1 layer", "DeltaNet [-1, 1], 5 layers", "DeltaNet [0, 1], 5 layers"),
    *("Mamba [-1, 1], 1 layer", "Mamba [0, 1], 1 layer", "DeltaProduct_2 [-1, 1], 1 layer"),
)


class Panels(NamedTuple):
    """One figure: columns of a table and those of its rows that are drawn, all if none are named."""

    table: str
    columns: tuple[str, ...]
    rows: tuple[str, ...] = ()


FIGURES = {
    "words-128-n_h": Panels("state_tracking", ("S3", "S4", "A5", "S5"), N_H),
    "words-128-layers": Panels("layers", ("S3", "S4", "A5", "S5")),
    "words-512-n_h": Panels("state_tracking_512", ("S3", "S4", "A5", "S5"), N_H),
    "s5-inputs": Panels("s5_inputs", ("only swaps", "swaps and 3-permutations", "4 tokens"), OF_2411),
    "z60": Panels("s5_inputs", ("Z60", "Z60, 2 tokens"), OF_2411),
    "carries-further": Panels("extrapolation", ("S3, n_h = 2", "S3, n_h = 4", "S4, n_h = 2", "S4, n_h = 4")),
}


def draw(panels: Panels, table: Mapping[str, Any], runs: Path, out: Path) -> None:
    """Draw the panels side by side, or in two rows if there are four, into the file `out`."""
    shape = (2, 2) if len(panels.columns) == 4 else (1, len(panels.columns))
    figure = Figure(figsize=(5.5 * shape[1], 3.6 * shape[0] + 0.8), layout="constrained")
    grid = list(figure.subplots(*shape, squeeze=False).flat)
    rows = panels.rows or tuple(table["rows"])
    for axes, column in zip(grid, panels.columns, strict=True):
        lengths = set()
        for number, row in enumerate(rows):
            homes = [Run(panels.table, row, column, seed).folder(runs) for seed in (0, 1, 2)]
            homes = [home for home in homes if (home / "accuracy.json").is_file()]
            # Rows that lie on each other all show: each is thinner than those below it.
            _draw_row(axes, homes, row, color=f"C{number}", width=3.5 - 2 * number / len(rows))
            configs = [yaml.safe_load((home / "config.yaml").read_text()) for home in homes]
            lengths |= {config["task"]["train"]["length"] for config in configs}
        for length in lengths:
            axes.axvline(length, linestyle=":", color="0.5")
        axes.set(
            title=column, xlabel="prefix length [tokens]", ylabel="sequence accuracy", ylim=(-0.05, 1.05)
        )
        axes.grid(alpha=0.3)
    handles = {
        label: line for axes in grid for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))
    figure.savefig(out, dpi=100)


def _draw_row(axes: Axes, homes: Sequence[Path], row: str, *, color: str, width: float) -> None:
    curves = [json.loads((home / "accuracy.json").read_text())["sets"]["longer"] for home in homes]
    best = max(curves, key=lambda curve: (curve["y"][-1], sum(curve["y"])), default=None)
    for curve in curves:
        style = {"linewidth": width, "label": row} if curve is best else {"linewidth": 0.8, "alpha": 0.4}
        axes.plot(curve["x"], curve["y"], color=color, **style)


def main(arguments: Sequence[str]) -> None:
    """Draw all figures."""
    folder = Path(*arguments) if arguments else DOCS / "figures"
    tables = read_tables()
    with (
        tempfile.TemporaryDirectory() as home,
        tarfile.open(DOCS / "reports" / "expressivity-runs.tar.xz") as runs,
    ):
        runs.extractall(home, filter="data")
        for name, panels in FIGURES.items():
            draw(panels, tables[panels.table], Path(home), folder / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
