"""Figures of word problems: betas, keys and eigenvalues of each layer; the spread ratio by length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fla_train.eval.figures import grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fla_train.eval.transitions import Transitions


def draw_transitions(layer: Transitions, name: str, folder: Path) -> list[Path]:
    """Write betas-NAME.png, keys-NAME.png and eigenvalues-NAME.png."""
    files = []
    for kind, draw in (("betas", _betas), ("keys", _components), ("eigenvalues", _eigenvalues)):
        files.append(folder / f"{kind}-{name}.png")
        draw(layer, name).savefig(files[-1], dpi=120)
    return files


def draw_spread_ratio(reports: Mapping[str, Mapping], folder: Path) -> None:
    """`spread_ratio.png` and `.pdf`: ratio, threshold and accuracy against the length; none without reports.

    Args:
        reports: by test set, see `fla_train.eval.separation.SpreadTable.report`.
        folder: that exists.
    """
    if not reports:
        return
    with grid(folder / "spread_ratio", 1, 2, (4.5, 3.4)) as axes:
        ratio, accuracy = axes[0]
        for i, (name, report) in enumerate(reports.items()):
            ratio.plot(report["lengths"], report["ratio"], color=f"C{i}", label=name)
            accuracy.plot(report["lengths"], report["accuracy"], color=f"C{i}")
            if report["threshold"] is not None:
                ratio.axhline(report["threshold"], color=f"C{i}", ls=":", label=f"{name}: threshold")
            if report["predicted_length"] is not None:
                accuracy.axvline(report["predicted_length"], color=f"C{i}", ls=":")
        ratio.set(xscale="log", xlabel="word length [tokens]", ylabel="spread ratio")
        if any(value for report in reports.values() for value in report["ratio"]):
            ratio.set_yscale("log", nonpositive="mask")  # 0, as for words of one element, is not drawn
        accuracy.set(xscale="log", xlabel="word length [tokens]", ylabel="token accuracy", ylim=(-0.05, 1.05))
        ratio.legend(fontsize="small")


def _head_panels(heads: int, title: str, *, square: bool):
    """A figure with one panel for each head."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    columns = min(heads, 4)
    rows = -(-heads // columns)
    height = 2.4 if square else 1.9
    figure = Figure(figsize=(2.5 * columns + 0.6, height * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    figure.suptitle(title)
    for panel in panels[heads:]:
        panel.set_visible(False)
    return figure, panels[:heads]


def _betas(layer: Transitions, name: str) -> Figure:
    _, steps, heads = layer.beta.shape
    figure, panels = _head_panels(heads, f"{name}: beta of each Householder step, by token", square=False)
    for head, panel in enumerate(panels):
        for j in range(steps):
            panel.plot(layer.tokens, layer.beta[:, j, head], ".", ms=4, label=f"Householder step {j + 1}")
        panel.set_title(f"head {head}", fontsize="small")
        panel.set_ylim(-0.1, 2.1)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="x-small", loc="lower left")
    figure.supxlabel("token id")
    figure.supylabel("beta")
    return figure


def _components(layer: Transitions, name: str) -> Figure:
    from matplotlib.figure import Figure

    shares = layer.explained_variance().cumsum(-1)[:, :10]
    reflecting = int(layer.beta.mean(0).amin(0).argmax())
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for head, line in enumerate(shares):
        chosen = head == reflecting
        axes.plot(
            range(1, len(line) + 1), line, marker="o", ms=3, lw=2 if chosen else 0.8,
            color="C1" if chosen else "0.6", zorder=3 if chosen else 1,
            label=f"head {head}, the largest beta" if chosen else None,
        )  # fmt: skip
    axes.axhline(0.95, color="black", ls="--", lw=0.8)
    axes.set(
        xlabel="principal components of the keys",
        ylabel="share of their variance",
        ylim=(0, 1.05),
        title=f"{name}: head {reflecting} has dimension {layer.effective_dimension()[reflecting]:.2f}",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
    return figure


def _eigenvalues(layer: Transitions, name: str) -> Figure:
    values = layer.eigenvalues()  # [E, H, K]
    figure, panels = _head_panels(
        values.shape[1], f"{name}: eigenvalues of the tokens' transitions", square=True
    )
    circle = np.exp(2j * np.pi * np.linspace(0, 1, 200))
    for head, panel in enumerate(panels):
        panel.plot(circle.real, circle.imag, color="0.8", lw=0.8)
        points = values[:, head].flatten()
        panel.plot(points.real, points.imag, ".", ms=4, alpha=0.6)
        panel.set_title(f"head {head}", fontsize="small")
        panel.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal")
    figure.supxlabel("real part")
    figure.supylabel("imaginary part")
    return figure
