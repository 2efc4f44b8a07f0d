"""What is in the report's figures, beyond that they are drawn."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from test_report import record

from fla_train.eval.figures import draw_figures
from fla_train.eval.state_figures import draw_states

FIRST = "histogram of the first 64 tokens"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """Those that were drawn, which would be closed by then."""
    drawn: list[Figure] = []
    with monkeypatch.context() as patch:
        patch.setattr(plt, "close", drawn.append)
        yield drawn
    for figure in drawn:
        plt.close(figure)


def texts(legend: object) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def curves(axes: object) -> list[tuple[list[float], list[float]]]:
    found = [(np.round(line.get_xdata(), 6).tolist(), line.get_ydata()) for line in axes.lines]
    return [(x, np.round(y, 6).tolist()) for x, y in found if len(x)]


def test_states_of_several_models_with_their_gates(figures: list[Figure], tmp_path: Path) -> None:
    """The second model's beta ends at 1, so its bins are half as wide; only the second has a decay."""
    one, two = record("one", [2.0, 3.0]), record("two", [2.0, 3.0])
    states = two["perplexity"]["web"]["states"]
    states |= {"beta_max": 1.0, "decay": [[[0.2, 0.8], [0.4, 0.6]], [[0.1, 0.9], [0.1, 0.9]]]}
    assert draw_states(tmp_path / "states", [one, two])
    (figure,) = figures
    assert texts(figure.legends[0]) == ["training length", "one", "two", FIRST]
    _, _, beta, decay = figure.axes
    assert curves(beta) == [([0.5, 1.5], [0.5, 0.5])] * 2 + [([0.25, 0.75], [1.0, 1.0])] * 2
    assert curves(decay) == [
        ([0.25, 0.75], [0.2, 1.8]),
        ([0.25, 0.75], [0.6, 1.4]),
    ]  # the last, then the first


def test_states_of_one_model(figures: list[Figure], tmp_path: Path) -> None:
    assert draw_states(tmp_path / "states", [record("one", [2.0, 3.0])])
    norm, _, beta, decay = figures[0].axes
    assert texts(norm.get_legend()) == ["training length", "layer 0", "layer 1"]
    assert texts(beta.get_legend()) == ["64", "128"] and curves(beta) == [([0.5, 1.5], [0.5, 0.5])] * 2
    assert not decay.lines and decay.texts[0].get_text() == "no forget gate"


def test_no_states_no_figure(tmp_path: Path) -> None:
    one = record("one", [2.0, 3.0])
    one["perplexity"]["web"]["states"] = None
    assert not draw_states(tmp_path / "states", [one]) and not list(tmp_path.iterdir())


def test_every_panel_says_how_many_sequences_it_is_of(figures: list[Figure], tmp_path: Path) -> None:
    assert "length_extrapolation" in draw_figures(tmp_path, [record("a", [2.0] * 3), record("b", [2.0] * 5)])
    panels = next(figure for figure in figures if any(axes.texts for axes in figure.axes)).axes
    assert [axes.texts[0].get_text() for axes in panels] == ["n = 3 to 5"] * 2
