"""One style for every figure: fonts, lines, and a colour for each model family."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager

from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FAMILIES = {
    "Gated DeltaProduct": "#d55e00",
    "Gated DeltaNet": "#e69f00",
    "DeltaProduct": "#0072b2",
    "DeltaNet": "#009e73",
    "Transformer": "#6e6e6e",
    "Llama": "#6e6e6e",
    "Mamba": "#a6a6a6",
    "RetNet": "#8b7500",
    "GLA": "#8b7500",
}
OTHER = "#999999"
# Colours of curves that are not model families. Neighbours differ well.
CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#222222", "#8b7500")
STYLE = {
    "font.size": 9,
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=CYCLE),
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.3,
    "legend.columnspacing": 1.0,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 130,
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "fla_train",  # equal figures are equal files
}


def style() -> AbstractContextManager[None]:
    """Return a context in which figures are created and saved in this style."""
    return rc_context(STYLE)


def new_axes(width: float, height: float) -> Axes:
    """Return the axes of a new figure of this size in inches, in this style."""
    with style():
        return Figure(figsize=(width, height)).add_subplot()


def length_axis(panel: Axes, ticks: Sequence[int]) -> None:
    """Use a logarithmic axis of lengths with these ticks, multiples of 1,024 as 1k, 2k, ..."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])


def family_color(name: str) -> str:
    """Return the colour of the family in a name such as `Gated DeltaProduct_2 [-1, 1]`, or grey."""
    text = re.sub(r"[^a-z]", "", name.lower())
    matches = (color for family, color in FAMILIES.items() if family.replace(" ", "").lower() in text)
    return next(matches, OTHER)
