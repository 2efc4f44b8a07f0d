"""What is in the report's figures, beyond that they are drawn."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from test_report import record, row

from fla_train.eval.figures import MEANING, draw_figures, draw_states, set_title
from fla_train.eval.paper import paper_row
from fla_train.eval.tables import COUNTS

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
    _, _, beta, decay = figures[0].axes
    names = ["training length", "layer 0", "layer 1", *(f"histogram up to {n} tokens" for n in (64, 128))]
    assert texts(figures[0].legends[0]) == names  # below the panels: within them it would cover curves
    assert not any(axes.get_legend() for axes in figures[0].axes)
    assert curves(beta) == [([0.5, 1.5], [0.5, 0.5])] * 2
    assert not decay.lines and decay.texts[0].get_text() == "no forget gate"


def test_no_states_no_figure(tmp_path: Path) -> None:
    one = record("one", [2.0, 3.0])
    one["perplexity"]["web"]["states"] = None
    assert not draw_states(tmp_path / "states", [one]) and not list(tmp_path.iterdir())


def test_every_panel_says_how_many_sequences_it_is_of(figures: list[Figure], tmp_path: Path) -> None:
    assert "length_extrapolation" in draw_figures(tmp_path, [record("a", [2.0] * 3), record("b", [2.0] * 5)])
    panels = next(figure for figure in figures if any(axes.texts for axes in figure.axes)).axes
    assert [axes.texts[0].get_text() for axes in panels] == ["n = 3 to 5"] * 2


def test_a_set_whose_data_have_a_note_is_marked(figures: list[Figure], tmp_path: Path) -> None:
    one, two = record("one", [2.0, 3.0]), record("two", [2.0, 3.0])
    two["perplexity"]["web"]["note"] = "only easy ones"
    draw_figures(tmp_path, [one, two])
    lengths, differences, positions, states, _ = figures
    panels = (lengths, differences, positions)
    assert {figure.axes[0].get_title() for figure in panels} == {"web †"}
    assert states.axes[0].get_ylabel() == "web †\nnorm of the state"
    assert {below(figure) for figure in (*panels, states)} == {MEANING}
    del two["perplexity"]["web"]["note"]
    draw_figures(tmp_path, [one, two])
    assert {below(figure) for figure in figures[5:]} == {""}


def below(figure: Figure) -> str:
    return figure.legends[0].get_title().get_text().replace("\n", " ")


def test_points_of_different_documents_are_not_joined(figures: list[Figure], tmp_path: Path) -> None:
    """64 and 128 tokens of three documents, 256 of two, 512 of one, which has no interval."""
    rows = [row(64, [2.0] * 3), row(128, [2.0] * 3), row(256, [3.0] * 2)]
    rows.append(row(512, [4.0]) | {"low": None, "high": None})
    one, two = record("one", [2.0]), record("two", [2.0])
    for found in (one, two):
        found["perplexity"]["web"]["lengths"] = rows
    for records in ([one], [one, two]):
        draw_figures(tmp_path, records)
        panel = figures[0].axes[0]
        drawn = [line.get_xdata().tolist() for line in panel.lines if line.get_linestyle() == "-"]
        assert drawn == [[64, 128], [256], [512]] * len(records)
        counts = [(text.get_text(), text.xy[0]) for text in panel.texts]
        assert counts == [("n = 3", 64), ("n = 3", 128), ("n = 2", 256), ("n = 1", 512)]
        assert below(figures[0]) == COUNTS
        figures.clear()


def test_loss_along_positions_of_several_models(figures: list[Figure], tmp_path: Path) -> None:
    """A column per set with the positions below: lines, bands, training lengths; one model diverges."""
    one, two = record("before", [2.0, 3.0]), record("after", [2.0, 3.0])
    one["trained_length"] = 128
    one["perplexity"]["web"]["positions"][1] |= {"perplexity": 1e4, "low": 9e3, "high": 2e4}
    for found in (one, two):
        found["perplexity"]["books"] = found["perplexity"]["web"]
    draw_figures(tmp_path, [one, two])
    first, second, *positions = figures[0].axes
    assert [first.get_title(), second.get_title()] == ["web", "books"] and len(positions) == 2
    for panel in positions:
        assert [x for x, _ in curves(panel)] == [[32, 96], [32, 96], [64, 64], [128, 128]]
        diverging, flat = panel.collections
        assert [round(y) for y in diverging.get_datalim(panel.transData).intervaly] == [4, 20000]
        assert flat.get_datalim(panel.transData).intervaly == pytest.approx(np.exp([1.5, 3.5]))
        assert panel.get_xscale() == panel.get_yscale() == "log" and first.get_yscale() == "linear"
    assert texts(figures[0].legends[0]) == ["before", "after", "training length"]


def test_losses_beside_the_first_models(figures: list[Figure], tmp_path: Path) -> None:
    """Documents that differ much, and of which each model has the same loss more or less than the first."""
    base, better = record("base", [1.0, 9.0]), record("better", [0.5, 8.5])
    other = record("other", [2.0, 3.0])
    better["perplexity"]["web"]["lengths"][1]["losses"] = [0.5, 7.5]
    other["perplexity"]["web"]["data"]["fingerprint"] = "of another tokenizer"
    drawn = draw_figures(tmp_path, [base, better, other])
    panel = figures[drawn.index("loss_difference")].axes[0]
    assert [found for found in curves(panel) if found[0] == [64, 128]] == [([64, 128], [-0.5, -1.0])]
    reach = 12.706 * 0.5  # Student's t with one degree of freedom; the standard error of -0.5 and -1.5
    assert panel.collections[0].get_datalim(panel.transData).intervaly == pytest.approx(
        [-1 - reach, -1 + reach], rel=1e-3
    )
    assert texts(figures[drawn.index("loss_difference")].legends[0])[:2] == ["base", "better"]
    for records in ([base, other], [base]):
        assert "loss_difference" not in draw_figures(tmp_path, records)


def test_needles(figures: list[Figure], tmp_path: Path) -> None:
    """A row per prompt, a column per task; of one model also a cell for each length and depth."""
    records = [record("one", [2.0]), record("two", [2.0])]
    for found, share in zip(records, (0.5, 0.75), strict=True):
        rows = [
            {
                "length": n,
                "accuracy": share,
                "low": 0.25,
                "high": 1.0,
                "samples": 4,
                "depths": {"0": 1.0, "9": 0.5},
            }
            for n in (64, 128)
        ]
        tasks = {
            "niah_single_1": {"ruler": rows, "continuation": rows[:1]},
            "niah_single_2": {"error": "lost"},
        }
        found |= {"perplexity": {}, "tasks": {}, "paper_row": {}, "needle": tasks}
    assert draw_figures(tmp_path, records) == ["needle"]
    first, second = figures[0].axes
    assert curves(first)[:2] == [([64, 128], [50.0, 50.0]), ([64, 128], [75.0, 75.0])]
    assert curves(second)[:2] == [([64], [50.0]), ([64], [75.0])]
    assert first.collections[0].get_datalim(first.transData).intervaly.tolist() == [25.0, 100.0]
    assert texts(figures[0].legends[0]) == ["one", "two", "training length"]
    figures.clear()
    assert draw_figures(tmp_path, records[:1]) == ["needle", "needle_depths"]
    cells = [axes.images[0].get_array().tolist() for axes in figures[1].axes[:2]]
    assert cells == [[[100.0, 100.0], [50.0, 50.0]], [[100.0], [50.0]]]


def test_no_line_at_a_training_length_that_nobody_recorded(figures: list[Figure], tmp_path: Path) -> None:
    one = record("one", [2.0, 3.0])
    one["trained_length"] = None
    draw_figures(tmp_path, [one])
    labels = [line.get_label() for figure in figures for axes in figure.axes for line in axes.lines]
    assert labels and "training length" not in labels


def test_a_file_of_ones_own_keeps_its_name() -> None:
    one = record("one", [2.0])
    one["perplexity"]["slimpajama"] = one["perplexity"]["web"]
    assert set_title("slimpajama", [one]) == "SlimPajama"
    one["perplexity"]["slimpajama"] = one["perplexity"]["web"] | {"own_file": True}
    assert set_title("slimpajama", [one]) == "slimpajama"


def bars(axes: object) -> list[list[float]]:
    return [
        [round(float(bar.get_height()), 6) for bar in group]
        for group in axes.containers
        if hasattr(group, "errorbar")
    ]


def test_recall_is_drawn_beside_the_published_rows(figures: list[Figure], tmp_path: Path) -> None:
    """A task without data has no column; one whose data have a note is marked and stands alone."""
    one = record("one", [2.0])
    scores = {"contains": 0.25, "contains_stderr": 0.05, "examples": 4, "num_fewshot": 0}
    tasks = {name: {"scores": {name: scores}} for name in ("squad_completion", "fda")}
    tasks["fda"] = tasks["fda"] | {"note": "a stand-in"}
    one |= {"tasks": tasks | {"swde": {"error": "lost"}}, "perplexity": {}}
    one["paper_row"] = paper_row(one["tasks"])
    assert draw_figures(tmp_path, [one]) == ["tasks"]
    (panel,) = figures[0].axes
    labels = [label.get_text() for label in panel.get_xticklabels()]
    assert labels == ["SQUAD cont.", "FDA cont. †"] and bars(panel) == [[25.0, 25.0]]
    places = panel.collections[-1].get_offsets()[:, 0]
    assert len(places) == 10 and set(places) == {0.38}  # the rows of Table 1, in the first column only
    assert below(figures[0]) == MEANING
    one["suite"] |= {"limit": 20}
    draw_figures(tmp_path, [one])
    assert below(figures[1]) == f"{MEANING} Only the first 20 examples of each task (suite.limit): one."


def test_any_other_task_is_drawn_too(figures: list[Figure], tmp_path: Path) -> None:
    """What lies between 0 and 1, subtasks of a group as well; no published row belongs to it."""
    one, two = record("one", [2.0]), record("two", [2.0])
    kept = {"examples": 4, "num_fewshot": 0, "fingerprint": "f", "higher_is_better": {}, "by_document": {}}
    group = {
        "all": {"acc": 0.5},
        "part": {"acc": 0.25, "acc_stderr": 0.1, "word_perplexity": 0.5, "bits": 3.0},
    }
    for found in (one, two):
        found |= {"perplexity": {}, "paper_row": {}}
    one["tasks"] = {"all": {"scores": {name: scores | kept for name, scores in group.items()}}}
    two["tasks"] = {"all": {"scores": {"all": {"acc": 0.75} | kept}}, "lost": {"error": "no data"}}
    assert draw_figures(tmp_path, [one, two]) == ["tasks"]
    (panel,) = figures[0].axes
    assert [label.get_text() for label in panel.get_xticklabels()] == ["all\nacc", "part\nacc"]
    assert str(bars(panel)) == "[[50.0, 25.0], [75.0, nan]]"
    assert texts(figures[0].legends[0]) == ["one", "two"]
    one["tasks"] = two["tasks"] = {"lost": {"error": "no data"}}
    assert draw_figures(tmp_path, [one, two]) == []
