"""The figures of a report, each as png and pdf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fla_train.eval.paper import ZERO_SHOT, published
from fla_train.eval.sets import PAPER_SETS
from fla_train.eval.tables import TABLE_1

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINED = {"color": "0.4", "linestyle": "--", "linewidth": 1}


def draw_figures(folder: Path, records: Sequence[dict]) -> list[str]:
    """Draw what the evaluations hold into `folder`; the names of the figures, without ending.

    `perplexity` (against length and position), `length_extrapolation` (a row per length of
    `suite.perplexity.panels`, a column per set, a line per evaluation), `states` and `tasks`.
    """
    drawn = []
    if any(_sets([record]) for record in records):
        _perplexity(folder / "perplexity", records)
        drawn.append("perplexity")
    if panels := _panels(records):
        _extrapolation(folder / "length_extrapolation", records, panels)
        drawn.append("length_extrapolation")
    if any(result["states"] for record in records for result in _sets([record]).values()):
        _states(folder / "states", records)
        drawn.append("states")
    if any(column.head in record["paper_row"] for record in records for column in ZERO_SHOT):
        _tasks(folder / "tasks", records)
        drawn.append("tasks")
    return drawn


def set_title(name: str) -> str:
    """What figures call a set: the papers' name for theirs."""
    return PAPER_SETS[name].title if name in PAPER_SETS else name


@contextmanager
def _grid(file: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[np.ndarray]:
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


def _sets(records: Sequence[dict]) -> dict[str, dict]:
    """The sets that any of the evaluations could read, with one of the results."""
    return {
        name: result
        for record in records
        for name, result in record["perplexity"].items()
        if "error" not in result
    }


def _panels(records: Sequence[dict]) -> list[int]:
    """The lengths of the panels that some curve reaches beyond the panel before."""
    wanted = sorted(
        {n for r in records if r["suite"]["perplexity"] for n in r["suite"]["perplexity"]["panels"]}
    )
    ends = [result["positions"][-1]["end"] for record in records for result in _sets([record]).values()]
    return [n for i, n in enumerate(wanted) if max(ends, default=0) > (wanted[i - 1] if i else 0)]


def _mark_training(axes: Axes, records: Sequence[dict], label: bool) -> None:
    for i, length in enumerate(sorted({record["trained_length"] for record in records})):
        axes.axvline(length, label="training length" if label and i == 0 else None, **TRAINED)


def _curve(
    axes: Axes, x: Sequence[float], rows: Sequence[dict], name: str, color: str, **style: object
) -> None:
    """Perplexity with its 95% interval as a band."""
    axes.plot(x, [row["perplexity"] for row in rows], label=name, color=color, **style)
    if all(row["low"] is not None for row in rows):
        low, high = ([row[key] for row in rows] for key in ("low", "high"))
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _legend(axes: np.ndarray) -> None:
    """One legend below all panels, since not every line is in each of them."""
    found = {}
    for panel in axes.flat:
        found |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure = axes.flat[0].figure
    # A letter of 8 points is about 0.062 inches wide, a line with its gaps 0.5: what does not fit is cut off.
    fitting = figure.get_figwidth() / (0.5 + 0.062 * max(map(len, found)))
    place = {"loc": "outside lower center", "ncols": max(1, min(len(found), int(fitting)))}
    figure.legend(found.values(), found.keys(), frameon=False, fontsize=8, **place)


def _middles(rows: Sequence[dict]) -> list[float]:
    return [(row["start"] + row["end"]) / 2 for row in rows]


def _perplexity(file: Path, records: Sequence[dict]) -> None:
    """Against context length: a panel per set, and for a single evaluation a panel over positions besides."""
    names = list(_sets(records))
    alone = len(records) == 1
    with _grid(file, 1, 2 if alone else len(names), (5.2, 3.8)) as axes:
        for i, name in enumerate(names):
            for j, record in enumerate(records):
                result = record["perplexity"].get(name, {"error": ""})
                if "error" in result:
                    continue
                panel = axes[0, 0 if alone else i]
                label = set_title(name) if alone else record["name"]
                color = f"C{i if alone else j}"
                rows = result["lengths"]
                _curve(panel, [row["length"] for row in rows], rows, label, color, marker="o", markersize=3)
                if alone:
                    rows = result["positions"]
                    _curve(axes[0, 1], _middles(rows), rows, label, color)
            if not alone:
                axes[0, i].set_title(set_title(name), fontsize=10)
        lengths = sorted(
            {row["length"] for r in records for s in _sets([r]).values() for row in s["lengths"]}
        )
        for panel in axes[0, : 1 if alone else None]:
            panel.set_xscale("log", base=2)
            panel.set_xticks(lengths, [_short(length) for length in lengths])
            panel.set_xlabel("context length (tokens)")
        axes[0, 0].set_ylabel("perplexity up to the length")
        if alone:
            axes[0, 1].set(xlabel="position (tokens)", ylabel="perplexity in the bucket", xlim=(0, None))
        for panel in axes[0]:
            _mark_training(panel, records, label=panel is axes[0, 0])
            panel.grid(alpha=0.3)
        _legend(axes)


def _extrapolation(file: Path, records: Sequence[dict], panels: Sequence[int]) -> None:
    names = list(_sets(records))
    with _grid(file, len(panels), len(names), (3.3, 2.5)) as axes:
        for row, length in enumerate(panels):
            for column, name in enumerate(names):
                panel = axes[row, column]
                counts = set()
                for i, record in enumerate(records):
                    if points := _panel(record["perplexity"].get(name, {}), length):
                        _curve(panel, _middles(points), points, record["name"], f"C{i}")
                        counts.add(points[0]["documents"])
                if counts:
                    _note_count(panel, counts)
                _mark_training(panel, records, label=True)
                panel.set_xlim(0, length)
                panel.set_xticks([0, length // 2, length], ["0", _short(length // 2), _short(length)])
                panel.grid(alpha=0.3)
                if row == 0:
                    panel.set_title(set_title(name), fontsize=10)
            axes[row, 0].set_ylabel("perplexity")
        for panel in axes[-1]:
            panel.set_xlabel("position (tokens)")
        _legend(axes)


def _panel(result: dict, length: int) -> list[dict]:
    """The curve of a panel; of an evaluation without it, what its curve over all positions has of it."""
    points = result.get("panels", {}).get(str(length)) or result.get("positions", [])
    return [point for point in points if point["end"] <= length]


def _note_count(panel: Axes, counts: set[int]) -> None:
    """How many sequences stand behind the curves."""
    few, many = min(counts), max(counts)
    text = f"n = {few}" if few == many else f"n = {few} to {many}"
    panel.text(0.97, 0.95, text, ha="right", va="top", fontsize=7, color="0.4", transform=panel.transAxes)


def _states(file: Path, records: Sequence[dict]) -> None:
    """A row per set: norm, effective rank, and for a single evaluation the gates' histograms.

    For one evaluation a line per layer (dark: first) and per position (dark: early); for several the mean
    over the layers of each.
    """
    import matplotlib.pyplot as plt

    names = [name for name in _sets(records) if any(_state(record, name) for record in records)]
    alone = len(records) == 1
    colors = plt.get_cmap("viridis")
    with _grid(file, len(names), 4 if alone else 2, (3.4, 2.6)) as axes:
        for line, name in zip(axes, names, strict=True):
            for j, record in enumerate(records):
                if not (states := _state(record, name)):
                    continue
                for panel, key in zip(line, ("norm", "effective_rank"), strict=False):
                    values = np.array(states[key])  # [positions, layers]
                    if alone:
                        layers = states["layers"]
                        for i, column in enumerate(values.T):
                            label = f"layer {layers[i]}" if i in (0, len(layers) - 1) else None
                            color = colors(i / max(len(layers), 2))
                            panel.plot(states["positions"], column, color=color, label=label)
                    else:
                        panel.plot(states["positions"], values.mean(1), label=record["name"], color=f"C{j}")
                if alone:
                    line[0].legend(frameon=False, fontsize=7)
                    _gates(line[2:], states, colors)
            line[0].set_ylabel(f"{set_title(name)}\nnorm of the state")
            line[1].set_ylabel("effective rank")
            for panel in line[:2]:
                panel.set_xscale("log", base=2)
                panel.set_xlabel("position (tokens)")
                _mark_training(panel, records, label=False)
            for panel in line:
                panel.grid(alpha=0.3)
        if not alone:
            _legend(axes)


def _gates(panels: Sequence[Axes], states: dict, colors: object) -> None:
    """Shares of beta and of the decay per bin, all layers together, a line per interval of positions."""
    for panel, key, top in zip(panels, ("beta", "decay"), (states["beta_max"], 1.0), strict=True):
        panel.set(xlabel="beta" if key == "beta" else "decay exp(g)", ylabel="share of values", xlim=(0, top))
        if states[key] is None:
            panel.text(0.5, 0.5, "no forget gate", ha="center", transform=panel.transAxes, color="0.4")
            continue
        shares = np.array(states[key]).mean(1)  # [positions, bins]
        middles = (np.arange(shares.shape[1]) + 0.5) * top / shares.shape[1]
        for i, share in enumerate(shares):
            label = _short(states["positions"][i]) if i in (0, len(shares) - 1) else None
            panel.plot(middles, share, color=colors(i / max(len(shares), 2)), label=label)
        panel.legend(frameon=False, fontsize=7, title="up to", title_fontsize=7)


def _state(record: dict, name: str) -> dict | None:
    return record["perplexity"].get(name, {}).get("states")


def _tasks(file: Path, records: Sequence[dict]) -> None:
    """Accuracies with standard errors beside the published rows of Table 1 (grey dots)."""
    columns = [column for column in ZERO_SHOT if column.percent]
    rows = [row for group in published() if group.paper == TABLE_1 for row in group.rows.values()]
    with _grid(file, 1, 1, (8.0, 3.6)) as axes:
        panel = axes[0, 0]
        width = 0.7 / len(records)
        for i, record in enumerate(records):
            x = np.arange(len(columns)) - 0.4 + (i + 0.5) * width
            values = [record["paper_row"].get(column.head) for column in columns]
            heights = [np.nan if value is None else value for value in values]
            errors = [
                100 * (_scores(record, column.task).get(f"{column.metric}_stderr") or 0) for column in columns
            ]
            panel.bar(x, heights, 0.9 * width, yerr=errors, label=record["name"], capsize=2)
        for j, column in enumerate(columns):
            values = [float(row[column.head]) for row in rows]
            label = "published, Table 1" if j == 0 else None
            panel.scatter([j + 0.38] * len(values), values, s=10, color="0.35", zorder=3, label=label)
        panel.set_xticks(range(len(columns)), [column.head.removesuffix(" ↑") for column in columns])
        panel.set(ylabel="percent", xlim=(-0.6, len(columns) - 0.4))
        panel.grid(alpha=0.3, axis="y")
        panel.legend(frameon=False, fontsize=8)


def _scores(record: dict, task: str) -> dict:
    return record["tasks"].get(task, {}).get("scores", {}).get(task, {})


def _short(length: int) -> str:
    """2048 -> 2k."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
