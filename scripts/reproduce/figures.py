"""Draw the figures of docs/ as SVG files, from the measurements in docs/reports.

python scripts/reproduce/figures.py                # all of docs/figures
python scripts/reproduce/figures.py decoding       # one of them
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fla_train.utils.figure_style import OTHER, family_color, style

REPORTS = Path(__file__).parents[2] / "docs" / "reports"
FIGURES = REPORTS.with_name("figures")
TRAINED = {"color": "0.3", "linestyle": ":", "linewidth": 1.2, "label": "training length"}
# Colours and lines of labels that are not the default of their family. n_h = 1 is DeltaNet.
COLORS = {"n_h = 1": family_color("DeltaNet"), "n_h = 2": "#7fbfe5", "n_h = 3": family_color("DeltaProduct")}
COLORS |= {"n_h = 4": "#00335c", "2 layers": "#a5dcc9", "3 layers": "#54bb99", "5 layers": "#00543d"}
COLORS |= {"4 layers": family_color("DeltaNet")}
LINES = {"DeltaNet, 5 layers": "--", "DeltaNet [0, 1], 5 layers": ":", "DeltaNet + 2 attention layers": ":"}
LINES |= dict.fromkeys(("Llama", "DeltaNet + sliding windows", "RetNet"), "--")


def read(name: str) -> Any:
    """Return a report as Python objects."""
    return json.loads((REPORTS / name).read_text())


def look(label: str) -> dict[str, str]:
    """Return the style of a model's line."""
    color = COLORS.get(label) or family_color(label)
    return {"label": label, "color": color, "linestyle": LINES.get(label, "-")}


@contextmanager
def figure(name: str, size: tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[list[Axes]]:
    """Yield the axes of a figure of `size` inches, row by row, and save it at the end."""
    drawing = Figure(figsize=size)
    axes = drawing.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    yield list(axes.flat)
    drawing.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})


def length_axis(panel: Axes, ticks: Sequence[int]) -> None:
    """Use a logarithmic axis of lengths with these ticks."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])


def plot_curve(panel: Axes, x: Sequence[float], y: np.ndarray, **line: Any) -> None:
    """Plot a curve without the points inside its horizontal stretches, which would double the file."""
    flat = (y[1:-1] == y[:-2]) & (y[1:-1] == y[2:])
    kept = np.r_[True, ~flat, True]
    panel.plot(np.array(x)[kept], y[kept], **line)


def accuracy_by_length(
    name: str,
    table: str,
    models: Mapping[str, str],
    columns: Mapping[str, int],
    *,
    rows: int = 1,
    size: tuple[float, float],
    longest: int,
) -> None:
    """Draw sequence accuracy against length: thin lines for the seeds, a thick one for their median.

    Args:
        name: of the figure.
        table: name in `expressivity-tables.json`.
        models: labels of the table's rows to draw.
        columns: training lengths of the table's columns, a panel for each.
        rows: rows of panels.
        size: inches.
        longest: end of the axis of lengths.
    """
    cells = read("expressivity-tables.json")[table]
    with figure(name, size, rows, len(columns) // rows) as panels:
        for panel, (column, trained) in zip(panels, columns.items(), strict=True):
            for row, label in models.items():
                curves = [test["curve"] for test in cells[row][column]]
                x, values = curves[0][0], np.array([y for _, y in curves])
                for seed in values:
                    plot_curve(panel, x, seed, color=look(label)["color"], alpha=0.45, linewidth=0.6)
                plot_curve(panel, x, np.median(values, axis=0), **look(label))
            panel.axvline(trained, **TRAINED)
            length_axis(panel, [1, 8, 64, 512])
            panel.set(title=column, xlim=(1, longest), ylim=(-0.03, 1.03), yticks=[0, 0.5, 1])
        drawing = panels[0].figure
        drawing.supxlabel("sequence length (tokens); thick: median of three seeds", fontsize=9)
        drawing.supylabel("sequence accuracy", fontsize=9)
        handles, labels = panels[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside upper center", ncols=4)


def length_extrapolation(name: str) -> None:
    """Draw the accuracy of each seed at length 512, for each change of the recipe."""
    tables = read("expressivity-tables.json")
    unchanged = {
        f"{group}, n_h = {n}": tables["state_tracking"][f"DeltaProduct_{n} [-1, 1]"][group]
        for group in ("S3", "S4")
        for n in (2, 4)
    }
    rows = {"no change": unchanged} | tables["extrapolation"]
    with figure(name, (7.5, 2.6), 1, 4) as panels:
        for panel, column in zip(panels, unchanged, strict=True):
            for i, row in enumerate(rows.values()):
                values = [test["value"] for test in row[column]]
                color = family_color("DeltaProduct")
                panel.plot([min(values), max(values)], [i, i], color=color, alpha=0.3)
                panel.plot(values, [i] * len(values), "o", color=color, markersize=4.5, alpha=0.8)
            panel.set(title=column, xlim=(-0.06, 1.06), ylim=(len(rows) - 0.5, -0.5))
            panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            panel.set_yticks(range(len(rows)), rows)
        panels[0].figure.supxlabel("sequence accuracy at length 512, three seeds", fontsize=9)


def starting_states(name: str) -> None:
    """Draw losses minus those of DeltaNet from zero, for three kinds of documents and starting states."""
    losses: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for row in read("long-52m/losses.json")["rows"]:
        losses.setdefault(row["documents"], {})[row["model"], row["start"]] = row["loss"]
    lines = {"zero": "-", "passing": "--", "contiguous": ":"}
    with figure(name, (7.5, 2.8), 1, 3) as panels:
        for panel, (documents, curves) in zip(panels, losses.items(), strict=True):
            base = curves["DeltaNet", "zero"]
            for (model, start), loss in curves.items():
                line = {"color": family_color(model), "linestyle": lines[start], "label": f"{model}: {start}"}
                panel.plot([int(n) for n in loss], [loss[n] - base[n] for n in loss], **line)
            panel.axvline(2048, **TRAINED)
            length_axis(panel, [2048, 8192, 32768, 131072])
            panel.set_title(documents)
        drawing = panels[0].figure
        drawing.supxlabel("context length (tokens)", fontsize=9)
        drawing.supylabel("loss difference (nats)", fontsize=9)
        drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)


def labelled_lines(
    name: str,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    size: tuple[float, float],
    form: str,
    trained: int | None = None,
    gap: float = 1.12,
    **axes: Any,
) -> None:
    """Draw numbers against lengths or sizes, with the model and its last number at the end of each line.

    Args:
        name: of the figure.
        curves: points (length, number) by model.
        size: inches.
        form: format of a number.
        trained: training length, marked by a line.
        gap: smallest ratio of the heights of two labels, which must not overlap.
        axes: properties of the axes.
    """
    with figure(name, size) as (panel,):
        height = 0.0
        for label, points in sorted(curves.items(), key=lambda item: item[1][-1][1]):
            x, y = zip(*points, strict=True)
            panel.plot(x, y, marker="o", markersize=3, **look(label))
            height = max(y[-1], gap * height)
            text, offset = f"{label}: {y[-1]:{form}}", {"xytext": (6, 0), "textcoords": "offset points"}
            panel.annotate(text, (x[-1], height), va="center", color=family_color(label), **offset)
        length_axis(panel, x)
        if trained is not None:
            panel.legend(handles=[panel.axvline(trained, **TRAINED)])
        panel.set(**axes)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()


def bars(name: str, groups: Mapping[str, Mapping[str, float]], label: str, number: str, power: int) -> None:
    """Draw horizontal bars in groups, with the speedup relative to the first at each other bar.

    Args:
        name: of the figure.
        groups: for each group, the values by name. If one is `ours`, it is the first.
        label: of the axis of values.
        number: format of a value.
        power: 1 for times, -1 for speeds.
    """
    count = sum(len(group) for group in groups.values())
    with figure(name, (5.6, 0.25 * count + 0.3 * len(groups) + 0.6)) as (panel,):
        y, ticks = 0.0, {}
        for group, values in groups.items():
            panel.text(0, y, group, fontweight="bold", va="center")
            first = next(iter(values))
            for row, value in values.items():
                y += 1
                peer, text = first == "ours" and row != first, number.format(value)
                panel.barh(y, value, 0.8, color=OTHER if peer else family_color(group))
                if row != first:
                    text += f" ({'ours ' * peer}{(value / values[first]) ** power:.2f}x)"
                panel.annotate(text, (value, y), (4, 0), textcoords="offset points", va="center")
                ticks[y] = row
            y += 1.3
        panel.set_yticks(list(ticks), list(ticks.values()))
        longest = max(value for values in groups.values() for value in values.values())
        panel.set(xlabel=label, ylim=(y - 0.6, -0.6), xlim=(0, 1.3 * longest))
        panel.xaxis.set_major_locator(MaxNLocator(5))
        panel.xaxis.set_major_formatter("{x:,g}")
        panel.grid(axis="y", visible=False)
        panel.tick_params(axis="y", length=0)
        panel.spines["left"].set_visible(False)


def perplexity(name: str) -> None:
    """Draw the perplexity of ten models of 50M parameters against context length."""
    curves = {
        model["name"]: [(row["length"], row["perplexity"]) for row in model["length"]["lengths"]]
        for model in read("lm-50m/comparison.json").values()
    }
    axes = {"yscale": "log", "yticks": [40, 60, 100, 200, 400], "ylabel": "perplexity"}
    labelled_lines(name, curves, (5.9, 3.6), ".0f", 2048, xlabel="context length (tokens)", **axes)


def loss_by_size(name: str) -> None:
    """Draw the validation loss against the number of parameters, of models trained at all three sizes."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for run in read("loss-by-size.json")["runs"]:
        size = 5 * round(run["parameters"] / 5e6)
        curves.setdefault(run["model"], []).append((size, run["validation_loss"]))
    curves = {model: points for model, points in curves.items() if len(points) == 3}
    axes = {"xlabel": "parameters (millions)", "ylabel": "validation loss (nats)"}
    labelled_lines(name, curves, (6.2, 3.4), ".3f", gap=1.035, **axes)


def decoding(name: str) -> None:
    """Draw the time per generated token of one sequence against its context."""
    labels = {"llama-compiled": "Llama, compiled", "ours": "Gated DeltaProduct_2"}
    rows = [row for row in read("benchmarks/decoding.json")["rows"] if row["batch"] == 1]
    curves = {
        label: [(row["context"], row["token_ms"]) for row in rows if row["model"] == key]
        for key, label in labels.items()
    }
    axes = {"xlabel": "context length (tokens)", "ylabel": "milliseconds per token", "ylim": (0, 7.2)}
    labelled_lines(name, curves, (5.4, 3.2), ".2f", **axes)


def operator(name: str) -> None:
    """Draw the milliseconds of the operator, forward and backward, compared with flash-linear-attention."""
    names = {(1, True): "Gated DeltaNet", (2, True): "Gated DeltaProduct_2", (1, False): "DeltaNet"}
    groups: dict[str, dict[str, float]] = {model: {} for model in names.values()}
    for row in read("benchmarks/operator-peers.json")["rows"]:
        peer = "fla" if row["kernel"].startswith("fla ") else "ours"
        groups[names[row["num_householder"], row["gated"]]][peer] = row["both_ms"]
    bars(name, groups, "milliseconds, forward and backward (lower is better)", "{:.2f}", power=1)


def training(name: str) -> None:
    """Draw the training speed on one GPU, compared with other models in the same engine."""
    reports = {
        "Gated DeltaProduct_2, 340m preset": "peers-gated-delta-product",
        "DeltaNet, 340m preset": "peers-delta-net",
        "DeltaNet, 1.3b preset, 16,384 tokens": "peers-delta-net-16k",
    }
    names = {"transformer": "Transformer++", "llama-compiled": "Llama, compiled"}
    groups = {
        group: {
            names.get(row["model"], row["model"]): row["tokens_per_second"]
            for row in read(f"benchmarks/{file}.json")["rows"]
        }
        for group, file in reports.items()
    }
    bars(name, groups, "tokens/s (higher is better)", "{:,.0f}", power=-1)


def scaling(name: str) -> None:
    """Draw the training speed on one and on several GPUs of one host."""
    groups: dict[str, dict[str, float]] = {}
    for file, gpu in {"two-h100": "H100", "train-2xh200": "H200", "scaling-h200": "H200"}.items():
        for row in read(f"benchmarks/{file}.json")["rows"]:
            if "gpus" in row:
                group = groups.setdefault(f"Gated DeltaProduct_2, {row['model']}, {gpu}", {})
                group["one GPU" if row["gpus"] == 1 else f"{row['gpus']} GPUs"] = row["tokens_per_second"]
    bars(name, groups, "tokens/s (higher is better)", "{:,.0f}", power=1)


N_H = {f"DeltaProduct_{n} [-1, 1]": f"n_h = {n}" for n in (1, 2, 3, 4)}
BASELINES = {"Transformer": "Transformer", "Mamba [-1, 1]": "Mamba"}
LAYERS = {f"{n} layers": f"{n} layers" for n in (2, 3, 4, 5)}
S5_MODELS = {
    "DeltaNet [-1, 1], 1 layer": "DeltaNet",
    "DeltaNet [-1, 1], 5 layers": "DeltaNet, 5 layers",
    "DeltaNet [0, 1], 5 layers": "DeltaNet [0, 1], 5 layers",
    "DeltaProduct_4 [-1, 1], 1 layer": "DeltaProduct_4",
    "Gated DeltaNet [-1, 1], 1 layer": "Gated DeltaNet",
    "Mamba [-1, 1], 1 layer": "Mamba",
    "Transformer": "Transformer",
}
GROUPS = ("S3", "S4", "A5", "S5")
SHORT, LONG = dict.fromkeys(GROUPS, 128), dict.fromkeys(GROUPS, 512)
S5_INPUTS = {"only swaps": 32, "swaps and 3-permutations": 32, "4 tokens": 64}
Z60_INPUTS = {"Z60": 32, "Z60, 2 tokens": 64}
squares = partial(accuracy_by_length, rows=2, size=(4.8, 4.0))
inputs = partial(accuracy_by_length, table="s5_inputs", models=S5_MODELS, longest=512)
# The function that draws each figure. Its argument is the figure's name.
DRAWINGS: dict[str, Callable[[str], None]] = {
    "state-tracking-128": partial(
        squares, table="state_tracking", models=N_H | BASELINES, columns=SHORT, longest=512
    ),
    "state-tracking-512": partial(
        squares, table="state_tracking_512", models=N_H, columns=LONG, longest=2048
    ),
    "layers": partial(squares, table="layers", models=LAYERS, columns=SHORT, longest=512),
    "s5-inputs": partial(inputs, columns=S5_INPUTS, size=(7.5, 2.8)),
    "z60": partial(inputs, columns=Z60_INPUTS, size=(6.6, 2.8)),
    "length-extrapolation": length_extrapolation,
    "starting-states": starting_states,
    "perplexity-50m": perplexity,
    "loss-by-size": loss_by_size,
    "decoding": decoding,
    "operator": operator,
    "training": training,
    "scaling": scaling,
}


def main(names: Sequence[str]) -> None:
    """Draw the figures with these names; all, if there are none."""
    with style():
        for name in names or DRAWINGS:
            DRAWINGS[name](name)


if __name__ == "__main__":
    main(sys.argv[1:])
