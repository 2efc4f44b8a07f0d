"""Figures of evaluations as png and pdf: perplexity, loss differences, needles and scores of tasks."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, product
from operator import attrgetter
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fla_train.eval.compare import long_table
from fla_train.eval.paper import RECALL, ZERO_SHOT, Column, published_rows
from fla_train.eval.result import EvalResult, Score, unique
from fla_train.eval.sets import PAPER_SETS
from fla_train.tasks.plots import plot_accuracy
from fla_train.utils.figure_style import length_axis, style

MARKERS = {"marker": "o", "markersize": 3}


def draw_figures(folder: Path, results: Sequence[EvalResult]) -> None:
    """Draw the figures for which the evaluations have numbers.

    - `perplexity`: against context length, and along the positions. One column per set, one curve per
      evaluation. Bits per byte instead where models with different tokenizers read the same set.
    - `loss_difference`: loss minus that of the first evaluation, with intervals paired by document.
    - `needle`: accuracy against length.
    - `tasks`: scores of lm-eval's tasks in percent, with the published ones.
    - `accuracy`: accuracy on a synthetic task against length.
    """
    drawings = {"perplexity": _perplexity, "loss_difference": _loss_differences}
    drawings |= {"needle": _needles, "tasks": _tasks, "accuracy": _accuracy}
    for name, draw in drawings.items():
        draw(folder / name, results)


@contextmanager
def grid(file: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[np.ndarray]:
    """Yield axes [rows, columns] of `size` inches each; add one legend, and write png and pdf at the end."""
    with style():
        figure = Figure(figsize=(size[0] * columns, size[1] * rows))
        yield figure.subplots(rows, columns, squeeze=False)
        lines: dict[str, object] = {}
        for panel in figure.axes:
            handles, labels = panel.get_legend_handles_labels()
            lines |= dict(zip(labels, handles, strict=True))
        if lines:
            width = 0.5 + 0.062 * max(map(len, lines))  # inches of an entry in letters of 8 points
            fitting = max(1, min(len(lines), int(figure.get_figwidth() / width)))
            figure.legend(lines.values(), lines.keys(), fontsize=8, loc="outside lower center", ncols=fitting)
        figure.savefig(file.with_suffix(".png"))
        figure.savefig(file.with_suffix(".pdf"))


def _perplexity(file: Path, results: Sequence[EvalResult]) -> None:
    """Draw a column for each set: losses by context length above, along the positions below."""
    sets = unique(score.data for result in results for score in result.in_section("perplexity"))
    if not sets:
        return
    metric = _metric(results)
    panels = unique(sorted(curve.length for result in results for curve in result.curves))
    lengths = _lengths(results, "perplexity")
    with grid(file, 1 + len(panels), len(sets), (4.2, 3.0)) as axes:
        for data, (by_length, *by_position) in zip(sets, axes.T, strict=True):
            for i, result in enumerate(results):
                scores = [s for s in result.in_section("perplexity") if (s.data, s.metric) == (data, metric)]
                # Lengths with different sequences average different text, so no line joins them.
                for j, (_, group) in enumerate(groupby(scores, key=attrgetter("sequences"))):
                    _line(by_length, i, None if j else result.name, _points(group), **MARKERS)
            by_length.set_title(PAPER_SETS[data].title if data in PAPER_SETS else data)
            _length_axis(by_length, lengths, "context length (tokens)")
            for panel, length in zip(by_position, panels, strict=True):
                _draw_positions(panel, results, (data, metric, length))
        for panel in axes.flat:
            _fit_y_axis(panel)
            panel.set_ylabel(metric.replace("_", " "))
            _mark_training(panel, results)


def _draw_positions(panel: Axes, results: Sequence[EvalResult], key: tuple[str, str, int]) -> None:
    """Plot the curves of (data, metric, length) along the positions. Hide the panel if there are none."""
    for i, result in enumerate(results):
        for curve in result.curves:
            if (curve.data, curve.metric, curve.length) == key:
                middles = np.convolve(curve.edges, [0.5, 0.5], "valid")
                _line(panel, i, result.name, (middles, curve.value, curve.low, curve.high))
                corner = {"ha": "right", "va": "top", "transform": panel.transAxes}
                panel.text(0.97, 0.95, f"n = {curve.sequences}", fontsize=7, color="0.4", **corner)
    panel.set_xlabel("position (tokens)")
    if any(16 * (result.trained_length or key[2]) <= key[2] for result in results):
        panel.set_xscale("log", base=2)
    panel.set_visible(bool(panel.lines))


def _metric(results: Sequence[EvalResult]) -> str:
    """Return `bits_per_byte` if models tokenize a set differently and bytes are known, else `perplexity`."""
    scores = [(result, score) for result in results for score in result.in_section("perplexity")]
    prints = {(score.data, score.fingerprint) for _, score in scores}
    same_tokens = len(prints) == len({data for data, _ in prints})
    bytes_known = all(r.find("perplexity", s.data, "bits_per_byte", s.length) for r, s in scores)
    return "perplexity" if same_tokens or not bytes_known else "bits_per_byte"


def _points(scores: Sequence[Score]) -> Iterator[tuple]:
    """Return lengths, values, and lower and upper ends of the intervals."""
    return zip(*((s.length, s.value, s.low, s.high) for s in scores), strict=True)


def _line(panel: Axes, i: int, label: str | None, points: Iterable[Sequence], **style: object) -> None:
    """Plot values of evaluation `i` and their 95% intervals, as a band or, for a single point, as a bar.

    Args:
        points: x, y, and the lower and upper ends of the intervals, which may be None or NaN.
    """
    x, y, low, high = (np.array(values, float) for values in points)
    panel.plot(x, y, color=f"C{i}", label=label, **style)
    if not np.isnan(low).any():
        if len(x) == 1:
            panel.vlines(x, low, high, color=f"C{i}", alpha=0.4)
        else:
            panel.fill_between(x, low, high, color=f"C{i}", alpha=0.15, linewidth=0)


def _fit_y_axis(panel: Axes) -> None:
    """Use a logarithmic axis if values differ by more than ten times; cut bands far above all values."""
    values = [y for line in panel.lines for y in line.get_ydata()]
    if values and max(values) > 10 * min(values) > 0:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
    if values and np.isfinite(max(values)) and panel.get_ylim()[1] > 2 * max(values):
        panel.set_ylim(top=2 * max(values))


def _mark_training(panel: Axes, results: Sequence[EvalResult]) -> None:
    for length in unique(result.trained_length for result in results if result.trained_length):
        panel.axvline(length, label="training length", color="0.4", linestyle="--", linewidth=1)


def _lengths(results: Sequence[EvalResult], section: str) -> list[int]:
    return sorted({score.length for result in results for score in result.in_section(section)})


def _length_axis(panel: Axes, lengths: Sequence[int], label: str) -> None:
    every_second = lengths[(len(lengths) + 1) % 2 :: 2]  # the longest is among them
    length_axis(panel, lengths if len(lengths) <= 8 else every_second)
    panel.set_xlabel(label)


def _loss_differences(file: Path, results: Sequence[EvalResult]) -> None:
    """Draw the differences from the first evaluation by context length, a panel for each set."""
    table, names = long_table(results), [result.name for result in results]
    table = table[(table.section == "perplexity") & (table.metric == "loss") & table.difference.notna()]
    if table.empty:
        return
    with grid(file, 1, table.data.nunique(), (4.2, 3.4)) as axes:
        for panel, (data, rows) in zip(axes[0], table.groupby("data", sort=False), strict=True):
            panel.axhline(0, color="C0", label=names[0])
            for name, group in rows.groupby("evaluation", sort=False):
                columns = group[["length", "difference", "difference_low", "difference_high"]]
                _line(panel, names.index(name), name, columns.to_numpy(float).T, **MARKERS)
            _length_axis(panel, sorted(rows.length.unique()), "context length (tokens)")
            _mark_training(panel, results)
            panel.set_title(PAPER_SETS[data].title if data in PAPER_SETS else data)
        axes[0, 0].set_ylabel(f"loss minus that of {names[0]} (nats per token)")


def _needles(file: Path, results: Sequence[EvalResult]) -> None:
    """Draw accuracy by length: a row for each prompt, a column for each task."""
    names = [score.data.split("/") for result in results for score in result.in_section("needle")]
    if not names:
        return
    tasks, prompts = (unique(name[i] for name in names) for i in (0, 1))
    with grid(file, len(prompts), len(tasks), (3.6, 2.8)) as axes:
        for panel, (prompt, task) in zip(axes.flat, product(prompts, tasks), strict=True):
            for i, result in enumerate(results):
                scores = [s for s in result.in_section("needle") if s.data == f"{task}/{prompt}"]
                if scores:
                    _line(panel, i, result.name, _points(scores), **MARKERS)
            _length_axis(panel, _lengths(results, "needle"), "length (tokens)")
            _mark_training(panel, results)
            panel.set(ylim=(-0.03, 1.03), title=f"{task}, {prompt}")
        for panel in axes[:, 0]:
            panel.set_ylabel("accuracy")


def _columns(results: Sequence[EvalResult]) -> list[Column]:
    """Return the papers' columns in percent that an evaluation has; without any, every score from 0 to 1."""
    columns = [c for c in (*ZERO_SHOT, *RECALL) if c.percent]
    columns = [c for c in columns if any(r.find("tasks", c.task, c.metric) for r in results)]
    return columns or unique(
        Column(f"{score.data}\n{score.metric}", score.data, score.metric)
        for result in results
        for score in result.in_section("tasks")
        if "perplexity" not in score.metric and 0 <= score.value <= 1
    )


def _tasks(file: Path, results: Sequence[EvalResult]) -> None:
    """Draw bars of scores with standard errors; dotted lines at chance; grey dots for the rows of Table 1."""
    columns = _columns(results)
    if not columns:
        return
    rows = published_rows().values()
    width = 0.7 / len(results)
    with grid(file, 1, 1, (max(8.0, 0.9 * len(columns)), 3.6)) as axes:
        panel = axes[0, 0]
        for i, result in enumerate(results):
            scores = [result.find("tasks", c.task, c.metric) for c in columns]
            heights = [np.nan if s is None else 100 * s.value for s in scores]
            errors = [100 * (s.stderr or 0.0) if s else 0.0 for s in scores]
            x = np.arange(len(columns)) - 0.4 + (i + 0.5) * width
            panel.bar(x, heights, 0.9 * width, yerr=errors, label=result.name, capsize=2)
            for j, score in enumerate(scores):
                if score and score.chance:
                    panel.plot([j - 0.4, j + 0.35], [100 * score.chance] * 2, "k:", label="chance")
        dots = [(j, float(row[c.head])) for j, c in enumerate(columns) for row in rows if c.head in row]
        if dots:
            x, y = np.array(dots).T
            panel.scatter(x + 0.38, y, s=10, color="0.35", zorder=3, label="published, Table 1")
        panel.set_xticks(range(len(columns)), [c.head.removesuffix(" ↑") for c in columns])
        panel.tick_params(axis="x", labelsize=8)
        panel.set(ylabel="percent", xlim=(-0.6, len(columns) - 0.4), ylim=(0, None))


def _accuracy(file: Path, results: Sequence[EvalResult]) -> None:
    names = {result.name: "" if len(results) == 1 else f"{result.name}: " for result in results}
    curves = {names[r.name] + test: curve for r in results for test, curve in r.accuracy.items()}
    if curves:
        plot_accuracy(curves, ", ".join(names), file.with_suffix(".png"))
