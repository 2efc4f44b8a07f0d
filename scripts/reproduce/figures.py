"""Draw the figures of docs/ as SVG files, from the measurements in docs/reports.

python scripts/reproduce/figures.py                # all of docs/figures
python scripts/reproduce/figures.py decoding       # one of them
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fla_train.utils.figure_style import OTHER, family_color, style

REPORTS = Path(__file__).parents[2] / "docs" / "reports"
FIGURES = REPORTS.with_name("figures")
TRAINED = {"color": "0.3", "linestyle": ":", "linewidth": 1.2}
# DeltaProduct with 2, 3 and 4 Householder steps; n_h = 1 is DeltaNet.
STEPS = {1: family_color("DeltaNet"), 2: "#7fbfe5", 3: family_color("DeltaProduct"), 4: "#00335c"}
N_H = {f"DeltaProduct_{n} [-1, 1]": {"label": f"n_h = {n}", "color": color} for n, color in STEPS.items()}
GREY = {"color": OTHER, "linewidth": 1.2}


def read(name: str) -> Any:
    """Return a report as Python objects."""
    return json.loads((REPORTS / name).read_text())


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
    *,
    table: str,
    columns: Sequence[str],
    models: Mapping[str, Mapping[str, Any]],
    rows: int,
    size: tuple[float, float],
    trained: int | Sequence[int],
    longest: int,
) -> None:
    """Draw sequence accuracy against length: thin lines for the seeds, a thick one for their median.

    Args:
        name: of the figure.
        table: name in `expressivity-tables.json`.
        columns: the table's columns, a panel for each.
        models: for each of the table's rows that is drawn, its label and line style.
        rows: rows of panels.
        size: inches.
        trained: training length, of each column if they differ.
        longest: end of the axis of lengths.
    """
    cells = read("expressivity-tables.json")[table]
    lengths = [trained] * len(columns) if isinstance(trained, int) else trained
    with figure(name, size, rows, len(columns) // rows) as panels:
        for panel, column, length in zip(panels, columns, lengths, strict=True):
            for model, look in models.items():
                curves = [test["curve"] for test in cells[model][column]]
                x, values = curves[0][0], np.array([y for _, y in curves])
                for seed in values:
                    plot_curve(panel, x, seed, color=look["color"], alpha=0.45, linewidth=0.6)
                plot_curve(panel, x, np.median(values, axis=0), **look)
            panel.axvline(length, **TRAINED, label="training length")
            length_axis(panel, [1, 8, 64, 512])
            panel.set(title=column, xlim=(1, longest), ylim=(-0.03, 1.03), yticks=[0, 0.5, 1])
        drawing = panels[0].figure
        drawing.supxlabel("sequence length (tokens); thick: median of three seeds", fontsize=9)
        drawing.supylabel("sequence accuracy", fontsize=9)
        handles, labels = panels[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside upper center", ncols=4)


def length_extrapolation() -> None:
    """Draw the accuracy of each seed at length 512, for each change of the recipe."""
    tables = read("expressivity-tables.json")
    changes = tables["extrapolation"]
    unchanged = {
        f"{group}, n_h = {n}": tables["state_tracking"][f"DeltaProduct_{n} [-1, 1]"][group]
        for group in ("S3", "S4")
        for n in (2, 4)
    }
    rows = {"no change": unchanged} | changes
    with figure("length-extrapolation", (7.5, 2.6), 1, 4) as panels:
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


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Return positions for labels of values that are at least `gap` apart, in the order of the values."""
    order = np.argsort(values)
    positions = np.array(values, dtype=float)
    for _ in range(100):
        for low, high in pairwise(order):
            if (missing := gap - (positions[high] - positions[low])) > 1e-9:
                positions[low] -= missing / 2
                positions[high] += missing / 2
    return list(positions)


def perplexity() -> None:
    """Draw the perplexity of ten models of 50M parameters against context length."""
    names = {
        "llama": "Llama",
        "transformer": "Transformer++",
        "delta_net": "DeltaNet",
        "hybrid_global2": "DeltaNet + 2 attention layers",
        "delta_product": "DeltaProduct_2",
        "hybrid_swa": "DeltaNet + sliding windows",
        "gated_delta_net": "Gated DeltaNet",
        "gla": "GLA",
        "retnet": "RetNet",
        "gated_delta_product": "Gated DeltaProduct_2",
    }
    dashed = {"llama", "hybrid_swa", "retnet"}  # the second of a family
    models = read("lm-50m/comparison.json")
    with figure("perplexity-50m", (5.6, 3.6)) as (panel,):
        last = []
        for key, name in names.items():
            x, y = zip(
                *((s["length"], s["perplexity"]) for s in models[key]["length"]["lengths"]), strict=True
            )
            line = "--" if key in dashed else ":" if key == "hybrid_global2" else "-"
            panel.plot(x, y, line, color=family_color(name), marker="o", markersize=3)
            last.append(y[-1])
        panel.set_yscale("log")
        heights = np.exp(spread(np.log(last), 0.088))
        for name, height in zip(names.values(), heights, strict=True):
            panel.annotate(
                name,
                (32768, height),
                (6, 0),
                textcoords="offset points",
                va="center",
                color=family_color(name),
            )
        length_axis(panel, x)
        panel.set_yticks([40, 60, 100, 200, 400], ["40", "60", "100", "200", "400"])
        panel.minorticks_off()
        panel.axvline(2048, **TRAINED)
        panel.annotate(
            "training length", (2048, 400), (5, 0), textcoords="offset points", va="top", color="0.3"
        )
        panel.set(xlabel="context length (tokens)", ylabel="perplexity")


def decoding() -> None:
    """Draw the time per generated token of one sequence against its context."""
    rows = [row for row in read("benchmarks/decoding.json")["rows"] if row["batch"] == 1]
    names = {"llama-compiled": "Llama, compiled", "ours": "Gated DeltaProduct_2"}
    with figure("decoding", (4.6, 3.4)) as (panel,):
        for key, name in names.items():
            x, y = zip(*((r["context"], r["milliseconds"]) for r in rows if r["model"] == key), strict=True)
            panel.plot(x, y, color=family_color(name), marker="o", markersize=4, linewidth=2)
            for i in (0, -1):
                panel.annotate(f"{y[i]:.2f}", (x[i], y[i]), (0, 7), textcoords="offset points", ha="center")
            panel.annotate(name, (x[1], y[2] + 0.5), color=family_color(name), fontsize=10, fontweight="bold")
        length_axis(panel, x)
        panel.set(xlabel="context length (tokens)", ylabel="milliseconds per token", ylim=(0, 7.2))
        panel.set_xlim(1600, 170_000)


def bars(name: str, groups: Mapping[str, Mapping[str, float]], label: str, number: str, power: int) -> None:
    """Draw horizontal bars in groups, with our speedup at each bar of another implementation.

    Args:
        name: of the figure.
        groups: for each group, the values by name. The first is `ours`.
        label: of the axis of values.
        number: format of a value.
        power: 1 for times, -1 for speeds.
    """
    count = sum(len(group) for group in groups.values())
    with figure(name, (5.6, 0.25 * count + 0.3 * len(groups) + 0.6)) as (panel,):
        y, ticks = 0.0, {}
        for group, values in groups.items():
            panel.text(0, y, group, fontweight="bold", va="center")
            for i, (row, value) in enumerate(values.items()):
                y += 1
                panel.barh(y, value, 0.8, color=family_color(group) if i == 0 else OTHER)
                speedup = "" if i == 0 else f" (ours {(value / values['ours']) ** power:.2f}x)"
                text = number.format(value) + speedup
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


def operator() -> None:
    """Draw the milliseconds of the operator, forward and backward, compared with flash-linear-attention."""
    names = {
        (1, True): "Gated DeltaNet",
        (2, True): "Gated DeltaProduct_2",
        (1, False): "DeltaNet",
    }
    groups: dict[str, dict[str, float]] = {name: {} for name in names.values()}
    for row in read("benchmarks/operator-peers.json")["rows"]:
        peer = "fla" if row["kernel"].startswith("fla ") else "ours"
        groups[names[row["num_householder"], row["gated"]]][peer] = row["both_ms"]
    bars("operator", groups, "milliseconds, forward and backward (lower is better)", "{:.2f}", power=1)


def training() -> None:
    """Draw the training speed on one GPU, compared with other models in the same engine."""
    reports = {
        "Gated DeltaProduct_2, 340m preset": "peers-gated-delta-product",
        "DeltaNet, 340m preset, vocabulary 4,096": "peers-delta-net",
        "DeltaNet, 340m preset": "peers-delta-net-fla",
    }
    names = {
        "ours": "ours",
        "transformer": "Transformer++",
        "llama-compiled": "Llama, compiled",
        "llama": "Llama",
        "fla": "fla",
    }
    groups = {
        group: {
            names[row["model"]]: row["tokens_per_second"] for row in read(f"benchmarks/{file}.json")["rows"]
        }
        for group, file in reports.items()
    }
    bars("training", groups, "tokens/s (higher is better)", "{:,.0f}", power=-1)


def line(label: str, linestyle: str = "-") -> dict[str, Any]:
    """Return the style of a model's line, in the colour of its family."""
    return {"label": label, "color": family_color(label), "linestyle": linestyle}


S5_MODELS = {
    "DeltaNet [-1, 1], 1 layer": line("DeltaNet"),
    "DeltaNet [-1, 1], 5 layers": line("DeltaNet, 5 layers", "--"),
    "DeltaNet [0, 1], 5 layers": line("DeltaNet [0, 1], 5 layers", ":"),
    "DeltaProduct_4 [-1, 1], 1 layer": line("DeltaProduct_4"),
    "Gated DeltaNet [-1, 1], 1 layer": line("Gated DeltaNet"),
    "Mamba [-1, 1], 1 layer": line("Mamba"),
    "Transformer": line("Transformer"),
}
LAYERS = {
    f"{n} layers": {"label": f"{n} layers", "color": color}
    for n, color in {2: "#a5dcc9", 3: "#54bb99", 4: family_color("DeltaNet"), 5: "#00543d"}.items()
}
BASELINES = {
    "Transformer": GREY | {"label": "Transformer", "linestyle": "--"},
    "Mamba [-1, 1]": GREY | {"label": "Mamba"},
}


def figures() -> dict[str, Callable[[], None]]:
    """Return the function that draws each figure, by name."""
    groups = partial(accuracy_by_length, columns=("S3", "S4", "A5", "S5"), rows=2, size=(4.8, 4.0))
    inputs = partial(accuracy_by_length, table="s5_inputs", models=S5_MODELS, rows=1, longest=512)
    s5, z60 = ("only swaps", "swaps and 3-permutations", "4 tokens"), ("Z60", "Z60, 2 tokens")
    short = {"trained": 128, "longest": 512}
    curves = {
        "state-tracking-128": partial(groups, table="state_tracking", models=N_H | BASELINES, **short),
        "state-tracking-512": partial(
            groups, table="state_tracking_512", models=N_H, trained=512, longest=2048
        ),
        "layers": partial(groups, table="layers", models=LAYERS, **short),
        "s5-inputs": partial(inputs, columns=s5, size=(7.5, 2.8), trained=(32, 32, 64)),
        "z60": partial(inputs, columns=z60, size=(6.6, 2.8), trained=(32, 64)),
    }
    return {name: partial(draw, name) for name, draw in curves.items()} | {
        "length-extrapolation": length_extrapolation,
        "perplexity-50m": perplexity,
        "decoding": decoding,
        "operator": operator,
        "training": training,
    }


def main(names: Sequence[str]) -> None:
    """Draw the figures with these names; all, if there are none."""
    drawings = figures()
    with style():
        for name in names or drawings:
            drawings[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
