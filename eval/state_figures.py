"""The figure of the states: norm and effective rank along the position, and the gates that write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fla_train.eval.plots import grid, legend, mark_training, meaning, readable_sets, set_title, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_states(file: Path, records: Sequence[dict]) -> bool:
    """A row per set: norm, effective rank, and the histograms of beta and of the decay; False without any.

    For one evaluation a line per layer, and per interval of positions in the histograms (dark: first). For
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


def _by_layer_and_interval(line: Sequence[Axes], states: dict) -> None:
    import matplotlib.pyplot as plt

    colors = plt.get_cmap("viridis")
    layers, positions = states["layers"], states["positions"]
    for panel, key in zip(line, ("norm", "effective_rank"), strict=False):
        for i, column in enumerate(np.array(states[key]).T):  # [positions, layers]
            label = f"layer {layers[i]}" if i in (0, len(layers) - 1) else None
            panel.plot(positions, column, color=colors(i / max(len(layers), 2)), label=label)
    for panel, key in zip(line[2:], ("beta", "decay"), strict=True):
        for i, (x, density) in enumerate(_densities(states, key)):
            label = f"histogram up to {short(positions[i])} tokens" if i in (0, len(positions) - 1) else None
            panel.plot(x, density, color=colors(i / max(len(positions), 2)), label=label)


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
