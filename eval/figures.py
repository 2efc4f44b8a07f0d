"""Figures of reports, as png and pdf: perplexity, differences, extrapolation, states, needles, scores."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fla_train.eval.compare import is_metric, loss_differences, needle_rows
from fla_train.eval.paper import NOTED, RECALL, ZERO_SHOT, Column
from fla_train.eval.sets import PAPER_SETS
from fla_train.eval.tables import COUNTS, restrictions, sequences, table_1, varied

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINED = {"color": "0.4", "linestyle": "--", "linewidth": 1}
MEANING = f"{NOTED.strip()} not the papers' own data, as the report's notes say"


def set_title(name: str, records: Sequence[dict]) -> str:
    """Title of a data set in figures, with `NOTED` if its data have a note.

    A set of the papers has the papers' name; a user's file keeps its own, even if it is called like one.
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


def draw_figures(folder: Path, records: Sequence[dict]) -> list[str]:
    """Draw what the evaluations hold into `folder`; the names of the figures, without ending.

    `perplexity` and `bits_per_byte` (against length and position), `loss_difference` (to the first of several
    evaluations), `length_extrapolation` (a row per length of `suite.perplexity.panels`, a column per set, a
    line per evaluation), `states`, `remembrance`, `needle` (against length), `needle_depths` (of a single
    evaluation) and `tasks`.
    """
    drawn = []
    if any(readable_sets([record]) for record in records):
        _perplexity(folder / "perplexity", records, "perplexity")
        drawn.append("perplexity")
    if counted := [record | {"perplexity": _with_bits(record)} for record in records if _with_bits(record)]:
        _perplexity(folder / "bits_per_byte", counted, "bits_per_byte")
        drawn.append("bits_per_byte")
    if _loss_differences(folder / "loss_difference", records):
        drawn.append("loss_difference")
    if panels := _panels(records):
        _extrapolation(folder / "length_extrapolation", records, panels)
        drawn.append("length_extrapolation")
    if draw_states(folder / "states", records):
        drawn.append("states")
    if draw_remembrance(folder / "remembrance", records):
        drawn.append("remembrance")
    if any(any(needle_rows(record)) for record in records):
        _needles(folder / "needle", records)
        drawn.append("needle")
        if len(records) == 1:
            _needle_depths(folder / "needle_depths", records[0])
            drawn.append("needle_depths")
    if columns := _columns(records):
        _tasks(folder / "tasks", records, columns)
        drawn.append("tasks")
    return drawn


def _with_bits(record: dict) -> dict[str, dict]:
    """The sets of an evaluation whose bytes are known at each length."""
    return {
        name: result
        for name, result in readable_sets([record]).items()
        if all(row.get("bits_per_byte") is not None for row in [*result["lengths"], *result["positions"]])
    }


def _points(rows: Sequence[dict], quantity: str = "perplexity") -> list[dict]:
    """`rows` with `value`, `low` and `high` of the perplexity or of the bits per byte."""
    before = "" if quantity == "perplexity" else f"{quantity}_"
    return [
        row | {"value": row[quantity], "low": row[f"{before}low"], "high": row[f"{before}high"]}
        for row in rows
    ]


def _panels(records: Sequence[dict]) -> list[int]:
    """The lengths of the panels that some curve reaches beyond the panel before."""
    wanted = sorted(
        {n for r in records if r["suite"]["perplexity"] for n in r["suite"]["perplexity"]["panels"]}
    )
    ends = [
        result["positions"][-1]["end"] for record in records for result in readable_sets([record]).values()
    ]
    return [n for i, n in enumerate(wanted) if max(ends, default=0) > (wanted[i - 1] if i else 0)]


def _curve(
    axes: Axes, x: Sequence[float], rows: Sequence[dict], name: str, color: str, **style: object
) -> None:
    """Plot values with their 95% intervals as a band; as a bar at a single point."""
    for i, part in enumerate(_same_documents(rows)):
        kept, places = rows[part], x[part]
        label = None if i else name
        axes.plot(places, [row["value"] for row in kept], label=label, color=color, **style)
        if all(row["low"] is not None for row in kept):
            low, high = ([row[key] for row in kept] for key in ("low", "high"))
            if len(kept) == 1:
                axes.vlines(places, low, high, color=color, alpha=0.4)
            else:
                axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)


def _bound(panel: Axes) -> None:
    """Limit the y-axis: the band of few documents may reach far beyond all values. Beside a curve that grows
    tenfold the others would be one flat line: then the axis is logarithmic.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    curves = [line for line in panel.lines if line.get_transform() == panel.transData]
    values = [y for line in curves for y in line.get_ydata()]
    if values and max(values) > 10 * min(values) > 0:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
    if values and panel.get_ylim()[1] > (top := 2 * max(values)):
        panel.set_ylim(top=top)


def _same_documents(rows: Sequence[dict]) -> list[slice]:
    """Slices of a curve to draw as lines: points of different documents are not joined."""
    breaks = [i for i in range(1, len(rows)) if sequences(rows[i]) != sequences(rows[i - 1])]
    return [slice(a, b) for a, b in zip([0, *breaks], [*breaks, len(rows)], strict=True)]


def _middles(rows: Sequence[dict]) -> list[float]:
    return [(row["start"] + row["end"]) / 2 for row in rows]


def _perplexity(file: Path, records: Sequence[dict], quantity: str) -> None:
    """Against context length and along the positions.

    Several evaluations have a column for each set; a single one has all sets in the same two panels.
    """
    names = list(readable_sets(records))
    alone = len(records) == 1
    titles = [set_title(name, records) for name in names]
    lines = meaning(titles)
    with grid(file, *((1, 2) if alone else (2, len(names))), (5.2, 3.8)) as axes:
        pairs = axes if alone else axes.T  # [pairs, 2]: over lengths, along positions
        for i, name in enumerate(names):
            (panel, along), curves = pairs[0 if alone else i], []
            for j, record in enumerate(records):
                result = record["perplexity"].get(name, {"error": ""})
                if "error" in result:
                    continue
                label = titles[i] if alone else record["name"]
                color = f"C{i if alone else j}"
                curves.append(rows := _points(result["lengths"], quantity))
                _curve(panel, [row["length"] for row in rows], rows, label, color, marker="o", markersize=3)
                rows = _points(result["positions"], quantity)
                _curve(along, _middles(rows), rows, label, color)
            if any(map(varied, curves)):
                _write_counts(panel, curves, f"C{i}" if alone else "0.4")
                lines = [*meaning(titles), COUNTS]
            if not alone:
                panel.set_title(titles[i], fontsize=10)
        results = [result for record in records for result in readable_sets([record]).values()]
        lengths = sorted({row["length"] for result in results for row in result["lengths"]})
        what = quantity.replace("_", " ")
        for panel, along in pairs:
            _length_axis(panel, lengths, "context length (tokens)")
            _length_axis(along, lengths, "position (tokens)")
        pairs[0, 0].set_ylabel(f"{what} up to the length")
        pairs[0, 1].set_ylabel(f"{what} in the bucket")
        for panel in axes.flat:
            mark_training(panel, records, label=panel is axes[0, 0])
            panel.grid(alpha=0.3)
            _bound(panel)
        legend(axes, lines)


def _loss_differences(file: Path, records: Sequence[dict]) -> bool:
    """Losses up to each length minus those of the first evaluation, which is the line at 0.

    A column for each set that another one read, too; False without any. The bands are of paired documents:
    they leave out what makes a document hard for all models.
    """
    reference, *others = records
    found = {
        name: [loss_differences(record, reference, name) for record in others]
        for name in readable_sets([reference])
    }
    found = {name: curves for name, curves in found.items() if any(curves)}
    if not found:
        return False
    titles = [set_title(name, records) for name in found]
    with grid(file, 1, len(found), (5.2, 3.8)) as axes:
        for panel, title, curves in zip(axes[0], titles, found.values(), strict=True):
            panel.axhline(0, color="C0", label=reference["name"])
            for i, (record, rows) in enumerate(zip(others, curves, strict=True), 1):
                places = [row["length"] for row in rows]
                _curve(panel, places, rows, record["name"], f"C{i}", marker="o", markersize=3)
            lengths = sorted({row["length"] for rows in curves for row in rows})
            _length_axis(panel, lengths, "context length (tokens)")
            mark_training(panel, records, label=panel is axes[0, 0])
            panel.set_title(title, fontsize=10)
            panel.grid(alpha=0.3)
        axes[0, 0].set_ylabel("loss minus the first model's (nats)")
        legend(axes, meaning(titles))
    return True


def _length_axis(panel: Axes, lengths: Sequence[int], label: str) -> None:
    """A logarithmic axis of tokens, with every second of more than eight `lengths` named."""
    shown = lengths if len(lengths) <= 8 else lengths[::-2][::-1]
    panel.set_xscale("log", base=2)
    panel.set_xticks(shown, [short(length) for length in shown])
    panel.set_xlabel(label)


def _needles(file: Path, records: Sequence[dict]) -> None:
    """Accuracy against length: a row per prompt, a column per task, a line with its band per evaluation."""
    found = [list(needle_rows(record)) for record in records]
    tasks, prompts, lengths = _needle_keys(found)
    with grid(file, len(prompts), len(tasks), (3.6, 2.8)) as axes:
        for panel, (prompt, task) in zip(axes.flat, product(prompts, tasks), strict=True):
            for i, (record, rows) in enumerate(zip(records, found, strict=True)):
                asked = [row for *key, row in rows if key == [task, prompt]]
                points = [
                    {"value": 100 * row["accuracy"], "low": 100 * row["low"], "high": 100 * row["high"]}
                    | {"documents": row["samples"]}
                    for row in asked
                ]
                x = [row["length"] for row in asked]
                _curve(panel, x, points, record["name"], f"C{i}", marker="o", markersize=3)
            _length_axis(panel, lengths, "length (tokens)")
            mark_training(panel, records, label=True)
            panel.set(ylim=(-3, 103), title=f"{task}, {prompt}")
            panel.title.set_fontsize(10)
            panel.grid(alpha=0.3)
        for panel in axes[:, 0]:
            panel.set_ylabel("right answers (percent)")
        legend(axes)


def _needle_depths(file: Path, record: dict) -> None:
    """Accuracy by length and depth of the needle: a row per prompt, a column per task, a cell per pair."""
    found = [list(needle_rows(record))]
    tasks, prompts, _ = _needle_keys(found)
    with grid(file, len(prompts), len(tasks), (3.6, 2.4)) as axes:
        for panel, (prompt, task) in zip(axes.flat, product(prompts, tasks), strict=True):
            rows = [row for *key, row in found[0] if key == [task, prompt]]
            depths = [row["depths"] for row in rows]
            if rows:
                cells = 100 * np.array([list(depth.values()) for depth in depths]).T  # [depths, lengths]
                image = panel.imshow(cells, vmin=0, vmax=100, cmap="viridis", aspect="auto")
                panel.set_yticks(range(len(cells)), [f"{depth}%" for depth in depths[0]])
            panel.set_xticks(range(len(rows)), [short(row["length"]) for row in rows])
            panel.set(title=f"{task}, {prompt}", xlabel="length (tokens)")
            panel.title.set_fontsize(10)
        for panel in axes[:, 0]:
            panel.set_ylabel("depth of the needle")
        axes[0, 0].figure.colorbar(image, ax=axes, label="right answers (percent)")


def _needle_keys(found: Sequence[list[tuple[str, str, dict]]]) -> tuple[list[str], list[str], list[int]]:
    """Tasks, prompts and lengths of several evaluations' `needle_rows`."""
    rows = [row for each in found for row in each]
    tasks, prompts = (list(dict.fromkeys(row[i] for row in rows)) for i in (0, 1))
    return tasks, prompts, sorted({row["length"] for *_, row in rows})


def _write_counts(panel: Axes, curves: Sequence[Sequence[dict]], color: str) -> None:
    """How many sequences stand behind each point, once where several curves have the same."""
    tops: dict[tuple[int, int], float] = {}
    for row in (row for rows in curves for row in rows):
        key = row["length"], sequences(row)
        tops[key] = max(tops.get(key, 0.0), row["high"] or row["value"])
    style = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 7}
    style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    for (length, count), top in tops.items():
        panel.annotate(f"n = {count}", (length, top), color=color, **style)
    panel.margins(x=0.08, y=0.1)  # the text lies above its point


def _extrapolation(file: Path, records: Sequence[dict], panels: Sequence[int]) -> None:
    names = list(readable_sets(records))
    titles = [set_title(name, records) for name in names]
    shortest = min((r["trained_length"] for r in records if r["trained_length"]), default=None)
    with grid(file, len(panels), len(names), (3.3, 2.5)) as axes:
        for row, length in enumerate(panels):
            for column, name in enumerate(names):
                panel = axes[row, column]
                counts = set()
                for i, record in enumerate(records):
                    if points := _panel(record["perplexity"].get(name, {}), length):
                        _curve(panel, _middles(points), _points(points), record["name"], f"C{i}")
                        counts.add(sequences(points[0]))
                if counts:
                    text = f"n = {' to '.join(map(str, sorted({min(counts), max(counts)})))}"
                    place = {"ha": "right", "va": "top", "transform": panel.transAxes}
                    panel.text(0.97, 0.95, text, fontsize=7, color="0.4", **place)
                mark_training(panel, records, label=True)
                _bound(panel)
                if shortest and 16 * shortest <= length:  # on a linear axis it would be at the very left
                    _length_axis(panel, [shortest, 8 * shortest, length], "")
                else:
                    panel.set_xlim(0, length)
                    panel.set_xticks([0, length // 2, length], ["0", short(length // 2), short(length)])
                panel.grid(alpha=0.3)
                if row == 0:
                    panel.set_title(titles[column], fontsize=10)
            axes[row, 0].set_ylabel("perplexity")
        for panel in axes[-1]:
            panel.set_xlabel("position (tokens)")
        legend(axes, meaning(titles))


def _panel(result: dict, length: int) -> list[dict]:
    """The curve of a panel; of an evaluation without it, what its curve over all positions has of it."""
    points = result.get("panels", {}).get(str(length)) or result.get("positions", [])
    return [point for point in points if point["end"] <= length]


def _columns(records: Sequence[dict]) -> list[Column]:
    """The papers' columns in percent that any evaluation has; without one every score between 0 and 1."""
    papers = [column for column in (*ZERO_SHOT, *RECALL) if column.percent]
    if found := [c for c in papers if any(r["paper_row"].get(c.head) is not None for r in records)]:
        return found
    return list(
        dict.fromkeys(
            Column(f"{task}\n{metric}", task, metric)
            for record in records
            for task, scores in _scores(record).items()
            for metric, value in scores.items()
            if is_metric(metric) and "perplexity" not in metric and 0 <= value <= 1
        )
    )


def _tasks(file: Path, records: Sequence[dict], columns: Sequence[Column]) -> None:
    """Scores in percent with standard errors; beside those that Table 1 has, and on its data, its rows (grey
    dots).
    """
    rows = [row for group in table_1() for row in group.rows.values()]
    with grid(file, 1, 1, (max(8.0, 0.9 * len(columns)), 3.6)) as axes:
        panel = axes[0, 0]
        width = 0.7 / len(records)
        for i, record in enumerate(records):
            x = np.arange(len(columns)) - 0.4 + (i + 0.5) * width
            scores = [_scores(record).get(column.task, {}) for column in columns]
            heights = [100 * found.get(c.metric, np.nan) for found, c in zip(scores, columns, strict=True)]
            errors = [
                100 * found.get(f"{c.metric}_stderr", 0.0) for found, c in zip(scores, columns, strict=True)
            ]
            panel.bar(x, heights, 0.9 * width, yerr=errors, label=record["name"], capsize=2)
        for j, c in enumerate(columns):
            levels = {_scores(r).get(c.task, {}).get("chance", {}).get(c.metric) for r in records}
            for level in levels - {None, 0.0}:
                panel.plot([j - 0.4, j + 0.35], [100 * level] * 2, "k:", label="chance")
        noted = {name for record in records for name, result in record["tasks"].items() if "note" in result}
        theirs = [(j, c.head) for j, c in enumerate(columns) if c.task not in noted]
        shown = [(j, float(row[head])) for j, head in theirs for row in rows if head in row]
        if shown:
            places, values = zip(*shown, strict=True)
            dots = {"s": 10, "color": "0.35", "zorder": 3, "label": "published, Table 1"}
            panel.scatter(np.add(places, 0.38), values, **dots)
        heads = [c.head.removesuffix(" ↑") + NOTED * (c.task in noted) for c in columns]
        panel.set_xticks(range(len(columns)), heads)
        panel.tick_params(axis="x", labelsize=8)
        panel.set(ylabel="percent", xlim=(-0.6, len(columns) - 0.4), ylim=(0, None))
        panel.grid(alpha=0.3, axis="y")
        legend(axes, [*meaning(heads), *restrictions(records)])


def _scores(record: dict) -> dict[str, dict]:
    """By task the scores, those within groups too."""
    found: dict[str, dict] = {}
    for result in record["tasks"].values():
        found |= result.get("scores", {})
    return found


def draw_states(file: Path, records: Sequence[dict]) -> bool:
    """A row per set: norm, effective rank, and the histograms of beta and of the decay; False without any.

    For one evaluation a line per layer, and per interval of positions in the histograms (red: first). For
    several the mean over the layers of each, and the histograms of its first and last interval.
    """
    names = [name for name in readable_sets(records) if any(_states(record, name) for record in records)]
    if not names:
        return False
    titles = [set_title(name, records) for name in names]
    with grid(file, len(names), 4, (3.4, 2.6)) as axes:
        for line, name, title in zip(axes, names, titles, strict=True):
            for panel in line[:2]:
                panel.set_xscale("log", base=2)
                panel.set_xlabel("position (tokens)")
                mark_training(panel, records, label=True)
            line[0].set_ylabel(f"{title}\nnorm of the state")
            line[1].set_ylabel("effective rank")
            line[2].set(xlabel="beta", ylabel="density")
            line[3].set(xlabel="decay exp(g)", yscale="log")  # most of it lies near 1
            found = [(i, record["name"], _states(record, name)) for i, record in enumerate(records)]
            if len(records) == 1:
                _by_layer_and_interval(line, found[0][2])
            else:
                _by_evaluation(line, [item for item in found if item[2]])
            for panel in line:
                panel.grid(alpha=0.3)
            if not line[3].lines:
                line[3].text(
                    0.5, 0.5, "no forget gate", ha="center", transform=line[3].transAxes, color="0.4"
                )
        legend(axes, meaning(titles))
    return True


def draw_remembrance(file: Path, records: Sequence[dict]) -> bool:
    """A column per set, a line per evaluation with one standard error around it; False without any."""
    found = {
        name: [
            (i, r["name"], r["perplexity"].get(name, {}).get("remembrance")) for i, r in enumerate(records)
        ]
        for name in readable_sets(records)
    }
    found = {name: lines for name, lines in found.items() if any(values for *_, values in lines)}
    if not found:
        return False
    titles = [set_title(name, records) for name in found]
    with grid(file, 1, len(found), (4.0, 3.2)) as axes:
        for panel, title, lines in zip(axes[0], titles, found.values(), strict=True):
            mark_training(panel, records, label=True)
            for i, label, values in lines:
                if values:
                    mean = np.array(values["distance"])
                    panel.plot(
                        values["sizes"], mean, color=f"C{i}", label=f"{label}, of {short(values['length'])}"
                    )
                    if values["stderr"]:
                        error = np.array(values["stderr"])
                        panel.fill_between(
                            values["sizes"], mean - error, mean + error, color=f"C{i}", alpha=0.2
                        )
            panel.set_xscale("log", base=2)
            panel.set(title=title, xlabel="last part (tokens)", ylim=(0, 1))
            panel.grid(alpha=0.3)
        axes[0, 0].set_ylabel("effective remembrance")
        legend(axes, meaning(titles))
    return True


def _by_layer_and_interval(line: Sequence[Axes], states: dict) -> None:
    import matplotlib.pyplot as plt

    by_layer, by_interval = plt.get_cmap("winter"), plt.get_cmap("autumn")
    layers, positions = states["layers"], states["positions"]
    for panel, key in zip(line, ("norm", "effective_rank"), strict=False):
        for i, column in enumerate(np.array(states[key]).T):  # [positions, layers]
            label = f"layer {layers[i]}" if i in (0, len(layers) - 1) else None
            panel.plot(positions, column, color=by_layer(i / max(len(layers) - 1, 1)), label=label)
    for panel, key in zip(line[2:], ("beta", "decay"), strict=True):
        for i, (x, density) in enumerate(_densities(states, key)):
            label = f"histogram up to {short(positions[i])} tokens" if i in (0, len(positions) - 1) else None
            panel.plot(x, density, color=by_interval(i / max(len(positions), 2)), label=label)


def _by_evaluation(line: Sequence[Axes], found: Sequence[tuple[int, str, dict]]) -> None:
    """`found`: of each evaluation its number, name and states."""
    for i, name, states in found:
        for panel, key in zip(line, ("norm", "effective_rank"), strict=False):
            panel.plot(states["positions"], np.mean(states[key], 1), label=name, color=f"C{i}")
        for panel, key in zip(line[2:], ("beta", "decay"), strict=True):
            if curves := _densities(states, key):
                panel.plot(*curves[-1], color=f"C{i}")
                panel.plot(*curves[0], ":", color=f"C{i}")
    first = {short(states["positions"][0]) for *_, states in found}
    line[2].plot([], [], ":", color="0.4", label=f"histogram of the first {' or '.join(first)} tokens")


def _densities(states: dict, key: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """By interval of positions the bins' middles and the density in each, all layers together.

    Densities, since the bins of models with and without negative eigenvalues are not equally wide.
    """
    if states[key] is None:
        return []
    shares = np.mean(states[key], 1)  # [positions, bins]
    width = (states["beta_max"] if key == "beta" else 1.0) / shares.shape[1]
    return [((np.arange(len(share)) + 0.5) * width, share / width) for share in shares]


def _states(record: dict, name: str) -> dict | None:
    return record["perplexity"].get(name, {}).get("states")
