"""Draw the figures of docs/ as SVG files, from the measurements in docs/reports.

python scripts/reproduce/figures.py                # all of docs/figures
python scripts/reproduce/figures.py decoding       # one of them
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fla_train.utils.figure_style import OTHER, family_color, length_axis, style

REPORTS = Path(__file__).parents[2] / "docs" / "reports"
FIGURES = REPORTS.with_name("figures")
TRAINED = {"color": "0.3", "linestyle": ":", "linewidth": 1.2, "label": "training length"}
# Colours and lines of labels that are not the default of their family. n_h = 1 is DeltaNet.
COLORS = {"n_h = 1": family_color("DeltaNet"), "n_h = 2": "#7fbfe5", "n_h = 3": family_color("DeltaProduct")}
COLORS |= {"n_h = 4": "#00335c", "2 layers": "#a5dcc9", "3 layers": "#54bb99", "5 layers": "#00543d"}
COLORS |= {"4 layers": family_color("DeltaNet"), "n_h = 4, [0, 1]": "#00335c"}
COLORS |= {"heads of 64": family_color("DeltaProduct"), "heads of 128": "#00335c"}
COLORS |= dict.fromkeys(("DeltaNet, 5 layers", "DeltaNet [0, 1], 5 layers"), COLORS["5 layers"])
DASHED = r"DeltaNet, 5 layers|Llama \(|RetNet|sliding windows|passing"
DOTTED = r"\[0, 1\]|global attention|QK-norm|hybrid|contiguous|DeltaProduct_3"
# Accuracy of a random guess: 4,096 values, 8 letters of values, 18 symbols of which two are right on average.
# Then that of guessing the most frequent symbol so far, measured in tests/tasks.
GUESSES = {"width 128": [1 / 4096], "fuzzy recall": [1 / 8, 0.185], "accuracy": [1 / 9, 0.49]}
# Results of the seeds, by row and column of a table.
Cells = dict[str, dict[str, list[dict[str, Any]]]]


def read(name: str) -> Any:
    """Return a report as Python objects."""
    return json.loads((REPORTS / name).read_text())


def look(label: str) -> dict[str, str]:
    """Return the style of a model's line."""
    line = "--" if re.search(DASHED, label) else ":" if re.search(DOTTED, label) else "-"
    return {"label": label, "color": COLORS.get(label) or family_color(label), "linestyle": line}


@contextmanager
def figure(name: str, size: tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[list[Axes]]:
    """Yield the axes of a figure of `size` inches, row by row, and save it at the end."""
    drawing = Figure(figsize=size)
    axes = drawing.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    yield list(axes.flat)
    drawing.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})


def label_all(panels: Sequence[Axes], x: str, y: str, ncols: int) -> None:
    """Label the axes of the whole figure, and explain its lines above it in `ncols` columns."""
    drawing = panels[0].figure
    drawing.supxlabel(x, fontsize=9)
    drawing.supylabel(y, fontsize=9)
    drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=ncols)


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
    ncols: int = 3,
) -> None:
    """Draw sequence accuracy against length: thin lines for the seeds, a thick one for their median.

    Args:
        name: of the figure.
        table: name in `expressivity-tables.json`.
        models: labels of the table's rows to draw.
        columns: training lengths of the table's columns, a panel for each. A row without runs is left out.
        rows: rows of panels.
        size: inches.
        longest: end of the axis of lengths.
        ncols: columns of the legend.
    """
    cells = read("expressivity-tables.json")[table]
    with figure(name, size, rows, len(columns) // rows) as panels:
        for panel, (column, trained) in zip(panels, columns.items(), strict=True):
            for row in (row for row in models if cells[row][column]):
                curves, line = [test["curve"] for test in cells[row][column]], look(models[row])
                x, values = curves[0][0], np.array([y for _, y in curves])
                for seed in values:
                    plot_curve(panel, x, seed, color=line["color"], alpha=0.45, linewidth=0.6)
                plot_curve(panel, x, np.median(values, axis=0), **line)
            panel.axvline(trained, **TRAINED)
            length_axis(panel, [1, 8, 64, 512])
            panel.set(title=column, xlim=(1, longest), ylim=(-0.03, 1.03), yticks=[0, 0.5, 1])
        # The first product is given, and each later one is guessed with 1 / order of the group.
        y = "sequence accuracy (chance: < 0.01 from length 8)"
        label_all(panels, "sequence length (tokens); thick: median of three seeds", y, ncols)


def merged(*tables: str) -> Cells:
    """Return the cells of several tables of `expressivity-tables.json`."""
    cells: Cells = {}
    for table in tables:
        for row, columns in read("expressivity-tables.json")[table].items():
            cells.setdefault(row, {}).update(columns)
    return cells


def seeds(
    name: str,
    cells: Cells,
    models: Mapping[str, str],
    columns: Mapping[str, str],
    label: str,
    size: tuple[float, float],
    rows: int = 1,
) -> None:
    """Draw the result of each seed as a circle, open for eigenvalues in [0, 1], and the paper's as a bar.

    Args:
        name: of the figure.
        cells: results of the seeds.
        models: labels of the rows to draw; rows with the same label share a line.
        columns: titles of the columns to draw, a panel for each.
        label: of the axis.
        size: inches.
        rows: rows of panels.
    """
    papers = {
        (row, column): value
        for table in yaml.safe_load(Path(__file__).with_name("expressivity.yaml").read_text()).values()
        for row, content in table["rows"].items()
        for column, value in zip(table["columns"], content.get("published", ()), strict=False)
    }
    labels = list(dict.fromkeys(models.values()))
    with figure(name, size, rows, len(columns) // rows) as panels:
        for panel, (column, title) in zip(panels, columns.items(), strict=True):
            for row, text in models.items():
                y, color = labels.index(text), family_color(text)
                circle = {"color": color, "markerfacecolor": "none" if "[0, 1]" in row else color}
                for test in cells[row].get(column, ()):
                    panel.plot(test["value"], y, "o", markersize=4.5, alpha=0.8, **circle)
                if isinstance(value := papers.get((row, column)), float):
                    panel.plot(value, y, "|", color="black", markersize=11)
            for value, line in zip(GUESSES.get(column, ()), (":", "--"), strict=False):
                panel.axvline(value, color=OTHER, linestyle=line, linewidth=1)
            panel.set(title=title, xlim=(-0.09, 1.09), ylim=(len(labels) - 0.5, -0.5))
            panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            panel.set_yticks(range(len(labels)), labels)
        panels[0].figure.supxlabel(label, fontsize=9)


def length_extrapolation(name: str) -> None:
    """Draw the accuracy of each seed at length 512, for each change of the recipe."""
    cells = merged("state_tracking", "extrapolation")
    columns = {
        f"{group}, n_h = {n}": (f"DeltaProduct_{n} [-1, 1]", group) for group in GROUPS[:2] for n in (2, 4)
    }
    cells["no change"] = {column: cells[row][group] for column, (row, group) in columns.items()}
    models = {row: row for row in cells if columns.keys() <= cells[row].keys()}
    titles = dict(zip(columns, columns, strict=True))
    label = "sequence accuracy at length 512 (chance: 0)\nof three seeds, trained at length 128"
    seeds(name, cells, models, titles, label, (4.4, 4.0), rows=2)


def formal(name: str) -> None:
    """Draw the scaled accuracy of each seed on the formal languages."""
    families = ["DeltaNet", *(f"DeltaProduct_{n}" for n in (2, 3, 4)), "Mamba"]
    models = {f"{family} {span}": family for family in families for span in ("[-1, 1]", "[0, 1]")}
    models |= {"Transformer": "Transformer", "sLSTM": "sLSTM"}
    columns = {"parity": "parity", "mod. arithmetic": "arithmetic", "with brackets": "brackets"}
    label = "scaled accuracy (chance: 0) of three seeds\nopen: [0, 1]; bars: papers"
    seeds(name, merged("formal"), models, columns, label, (3.8, 2.75))


def recall(name: str) -> None:
    """Draw the accuracy of each seed on MQAR, MAD's fuzzy recall and RegBench."""
    models = {f"DeltaNet [0, 1], no convolutions{m}": f"DeltaNet, no conv.{m}" for m in ("", ", mixture")}
    models |= {f"{row} [0, 1]": row for row in ("DeltaNet", "Gated DeltaNet")}
    models |= {row: row for row in ("Transformer", "Mamba", "GLA", "RetNet", "Mamba-2", "RWKV-7", "mLSTM")}
    columns = {"width 128": "MQAR", "fuzzy recall": "fuzzy recall", "accuracy": "RegBench"}
    label = "accuracy of three seeds; open: [0, 1]; bars: paper\ndotted: chance; dashed: most frequent symbol"
    seeds(name, merged("mqar", "mad", "regbench"), models, columns, label, (4.4, 3.2))


def mqar(name: str) -> None:
    """Draw the accuracy on MQAR against the steps of the whole recipe, by width."""
    widths = {"64": ":", "128": "--", "256": "-", "512": "o-", "128, mixture": "-."}
    with figure(name, (3.8, 2.6)) as (panel,):
        for width, style in widths.items():
            label = f"width {width}"
            tests = read("paper-recipes.json")["runs"][f"MQAR without convolutions, {label}"]["tests"]
            y = [test["train_setting/accuracy"] for test in tests]
            x = [test["step"] for test in tests]
            panel.plot(x, y, style, markersize=3, color=look("DeltaNet")["color"], label=label)
        panel.axvline(5000, color="0.3", linewidth=1.2, label="fast recipe, no mixture")
        panel.set(xlabel="training steps; one seed", ylabel="accuracy (chance: 1/4,096)")
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.legend(handlelength=3)


def differences(
    name: str,
    losses: Mapping[tuple[str, str], Mapping[str, float]],
    bases: Mapping[str, str],
    ticks: Sequence[int],
    label: str,
    size: tuple[float, float] = (3.8, 2.5),
) -> None:
    """Draw differences of losses by context length, a panel for each kind of documents.

    Args:
        name: of the figure.
        losses: losses by length, by documents and model.
        bases: models to draw, and the one whose loss is subtracted.
        ticks: lengths at the ticks.
        label: of the differences.
        size: inches.
    """
    kinds = list(dict.fromkeys(kind for kind, _ in losses))
    with figure(name, size, 1, len(kinds)) as panels:
        for panel, kind in zip(panels, kinds, strict=True):
            for model, base in bases.items():
                loss, subtracted = losses[kind, model], losses[kind, base]
                panel.plot([int(n) for n in loss], [loss[n] - subtracted[n] for n in loss], **look(model))
            panel.axvline(2048, **TRAINED)
            length_axis(panel, ticks)
            panel.set_title(kind)
        label_all(panels, "context length (tokens); one seed", label, 2)


def starting_states(name: str) -> None:
    """Draw losses minus those of DeltaNet from zero, for three kinds of documents and starting states."""
    rows = read("long-52m/losses.json")["rows"]
    losses = {(row["documents"], f"{row['model']}: {row['start']}"): row["loss"] for row in rows}
    bases = dict.fromkeys([model for _, model in losses], "DeltaNet: zero")
    differences(name, losses, bases, (2048, 16384, 131072), "loss difference (nats)", (5.2, 3.0))


def eigenvalues(name: str) -> None:
    """Draw losses with eigenvalues in [-1, 1] minus those with [0, 1], for three kinds of documents."""
    losses = {
        (kind, f"{row['model']} {row['eigenvalues']}".replace(" [-1, 1]", "")): loss
        for row in read("eigenvalues-by-length.json")["rows"]
        for kind, loss in row["loss"].items()
    }
    bases = {model: f"{model} [0, 1]" for model in ("DeltaNet", "DeltaProduct_2", "Gated DeltaNet")}
    differences(name, losses, bases, (512, 2048, 16384), "nats, [-1, 1] minus [0, 1]")


def householder_steps(name: str) -> None:
    """Draw the rise of the loss beyond the training length, minus that of the model with n_h = 1."""
    kinds, rows = ("held-out", "MATH-Hard", "TriviaQA"), read("length-52m.json")["rows"]
    rises = {(row["documents"], row["model"]): row["rise"] for row in rows if row["documents"] in kinds}
    bases = {f"{gate}DeltaProduct_{n}": f"{gate}DeltaNet" for gate in ("", "Gated ") for n in (2, 3)}
    differences(name, rises, bases, (2048, 8192, 32768), "nats relative to n_h = 1")


def labelled_lines(
    name: str,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    size: tuple[float, float],
    form: str,
    trained: int | None = None,
    gap: float = 1.14,
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
            panel.annotate(text, (x[-1], height), va="center", color=look(label)["color"], **offset)
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
        power: 1 or -1; the speedup at a bar is (its value / the first value) ** power.
    """
    count = sum(len(group) for group in groups.values())
    with figure(name, (4.2, 0.25 * count + 0.3 * len(groups) + 0.6)) as (panel,):
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
        panel.set(xlabel=label, ylim=(y - 0.6, -0.6), xlim=(0, 1.55 * longest))
        panel.xaxis.set_major_locator(MaxNLocator(4))
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
    labelled_lines(name, curves, (4.8, 3.8), ".0f", 2048, xlabel="context length (tokens); one seed", **axes)


def loss_by_size(name: str) -> None:
    """Draw by how much models trained at all three sizes beat DeltaNet, against the number of parameters."""
    losses: dict[str, dict[int, float]] = {}
    for run in read("loss-by-size.json")["runs"]:
        losses.setdefault(run["model"], {})[5 * round(run["parameters"] / 5e6)] = run["validation_loss"]
    base = losses.pop("DeltaNet")
    curves = {m: [(n, base[n] - y) for n, y in loss.items()] for m, loss in losses.items() if len(loss) == 3}
    axes = {"yscale": "log", "yticks": [0.01, 0.02, 0.05, 0.1, 0.2, 0.4]}
    axes |= {"xlabel": "parameters (millions); one seed", "ylabel": "validation loss below DeltaNet's (nats)"}
    labelled_lines(name, curves, (4.2, 3.0), ".3f", **axes)


def learning_rates(name: str) -> None:
    """Draw the losses of recipe=best by learning rate, a circle for each seed and a line through medians."""
    losses: dict[str, dict[float, list[float]]] = {}
    for run in read("recipes-50m-seeds.json")["runs"]:
        if run["complete"] and run.get("difference") in (None, "Muon in batches"):
            rates = losses.setdefault(run["model"], {})
            rates.setdefault(run["learning_rate"], []).append(run["validation_loss"])
    with figure(name, (4.4, 3.4)) as (panel,):
        for model, rates in losses.items():
            if len(rates) > 1 and "[0, 1]" not in model:
                points = sorted(rates.items())
                panel.plot([rate for rate, _ in points], [np.median(y) for _, y in points], **look(model))
                for rate, values in points:
                    panel.plot([rate] * len(values), values, "o", markersize=3, color=look(model)["color"])
        panel.set(xscale="log", xlabel="peak learning rate of Muon; line: median of the seeds")
        panel.set(ylim=(2.98, 3.45), ylabel="validation loss (nats)")
        ticks = [7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2]
        panel.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        panel.minorticks_off()
        panel.figure.legend(loc="outside upper center", ncols=2)


def decoding(name: str) -> None:
    """Draw the time per generated token of one sequence against its context."""
    labels = {"llama-compiled": "Llama, compiled", "ours": "Gated DeltaProduct_2"}
    rows = [row for row in read("benchmarks/decoding.json")["rows"] if row["batch"] == 1]
    curves = {
        label: [(row["context"], row["token_ms"]) for row in rows if row["model"] == key]
        for key, label in labels.items()
    }
    axes = {"xlabel": "context length (tokens)", "ylabel": "milliseconds per token", "ylim": (0, 7.2)}
    labelled_lines(name, curves, (4.2, 2.8), ".2f", **axes)


def operator(name: str) -> None:
    """Draw the milliseconds of the operator, forward and backward, compared with flash-linear-attention."""
    names = {(1, False): "DeltaNet", (1, True): "Gated DeltaNet"}
    names |= {(2, False): "DeltaProduct_2", (2, True): "Gated DeltaProduct_2"}
    groups: dict[str, dict[str, float]] = {model: {} for model in names.values()}
    for row in read("benchmarks/operator-h200.json")["rows"]:
        if group := names.get((row["n_h"], row["gate"])):
            groups[group]["fla" if row["kernel"].startswith("fla ") else "ours"] = row["both_ms"]
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
    for file, gpu in {"two-h100": "H100", "scaling-2xh200": "H200", "scaling-h200": "H200"}.items():
        for row in read(f"benchmarks/{file}.json")["rows"]:
            if "gpus" in row:
                group = groups.setdefault(f"Gated DeltaProduct_2, {row['model']}, {gpu}", {})
                group["one GPU" if row["gpus"] == 1 else f"{row['gpus']} GPUs"] = row["tokens_per_second"]
    bars(name, groups, "tokens/s (higher is better)", "{:,.0f}", power=1)


def recurrent_form(name: str) -> None:
    """Draw how many times as long the recurrent form takes as the chunkwise one, by sequence length."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in read("benchmarks/recurrent-form.json")["rows"]:
        ratio = row["recurrent_both_ms"] / row["chunkwise_both_ms"]
        curves.setdefault(f"heads of {row['head_size']}", []).append((row["length"], ratio))
    axes = {"xlabel": "sequence length (tokens)", "ylabel": "time of recurrent / chunkwise", "ylim": (0, 40)}
    labelled_lines(name, curves, (4.2, 2.8), ".0f", **axes)


N_H = {f"DeltaProduct_{n} [-1, 1]": f"n_h = {n}" for n in (1, 2, 3, 4)}
FAILING = {"DeltaProduct_4 [0, 1]": "n_h = 4, [0, 1]", "Transformer": "Transformer", "Mamba [-1, 1]": "Mamba"}
LAYERS = {f"{n} layers": f"{n} layers" for n in (2, 3, 4, 5)}
S5_MODELS = {
    "DeltaNet [-1, 1], 1 layer": "DeltaNet",
    "DeltaNet [-1, 1], 5 layers": "DeltaNet, 5 layers",
    "DeltaNet [0, 1], 1 layer": "DeltaNet [0, 1]",
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
squares = partial(accuracy_by_length, rows=2, size=(3.8, 3.6))
inputs = partial(accuracy_by_length, table="s5_inputs", models=S5_MODELS, longest=512, ncols=2)
# The function that draws each figure. Its argument is the figure's name.
DRAWINGS: dict[str, Callable[[str], None]] = {
    "state-tracking-128": partial(
        squares, table="state_tracking", models=N_H | FAILING, columns=SHORT, longest=512
    ),
    "state-tracking-512": partial(
        squares, table="state_tracking_512", models=N_H, columns=LONG, longest=2048
    ),
    "layers": partial(squares, table="layers", models=LAYERS, columns=SHORT, longest=512),
    "s5-inputs": partial(inputs, columns=S5_INPUTS, rows=3, size=(3.8, 5.2)),
    "z60": partial(inputs, columns=Z60_INPUTS, rows=2, size=(3.8, 4.3)),
    "length-extrapolation": length_extrapolation,
    "formal": formal,
    "recall": recall,
    "mqar": mqar,
    "eigenvalues": eigenvalues,
    "length-52m": householder_steps,
    "starting-states": starting_states,
    "perplexity-50m": perplexity,
    "loss-by-size": loss_by_size,
    "learning-rates": learning_rates,
    "decoding": decoding,
    "operator": operator,
    "recurrent-form": recurrent_form,
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
