"""The rows that the papers publish, as shipped: proof-read, and guarded by sums over the papers' own text."""

from decimal import Decimal

import pytest

from fla_train.eval.paper import AVERAGE, HEADS, ZERO_SHOT, average, published
from fla_train.eval.tables import paper_markdown

UNAVERAGED = ("Wiki. ppl ↓", "LMB. ppl ↓", "SWDE cont. ↑", "SQUAD cont. ↑", "FDA cont. ↑")
SUMS = {  # of these columns over the rows taken from each paper, added up from its text by a program
    "delta_product": "271.44 369.25 267.3 263.3 67.48",
    "delta_net": "484.02 629.32 736.8 629.3 288.7",
    "negative_eigenvalues": "136.19 139.09 212.8 183.3 44.6",
}
# The DeltaProduct paper, Table 1: LAMBADA, PIQA, HellaSwag, Winogrande, ARC-e, ARC-c, and the mean.
PUBLISHED = [
    ([31.0, 63.3, 34.0, 50.4, 44.5, 24.2], 41.2),  # Transformer++, SlimPajama
    ([32.1, 64.8, 34.3, 52.2, 45.8, 23.5], 42.1),  # DeltaNet, SlimPajama
    ([29.8, 69.0, 41.0, 50.9, 46.6, 24.5], 43.6),  # DeltaNet [-1, 1], FineWeb
    ([34.2, 69.9, 43.2, 51.9, 48.2, 24.1], 45.2),  # DeltaProduct_3 [-1, 1]
    ([34.2, 69.1, 44.6, 55.3, 49.8, 25.3], 46.4),  # Gated DeltaProduct_2 [-1, 1]
]


@pytest.mark.parametrize(("accuracies", "printed"), PUBLISHED)
def test_the_average_is_that_of_the_papers(accuracies: list[float], printed: float) -> None:
    assert average(accuracies) == pytest.approx(printed, abs=0.0501)


@pytest.mark.parametrize("paper", SUMS)
def test_columns_that_no_average_checks_add_up(paper: str) -> None:
    rows = [row for group in published() if group.paper == paper for row in group.rows.values()]
    sums = [sum(Decimal(row[head]) for row in rows) for head in UNAVERAGED]
    assert " ".join(map(str, sums)) == SUMS[paper]


def test_rows_that_two_papers_print_are_the_same() -> None:
    """Four models of the DeltaNet paper stand in the DeltaProduct paper's table too, under other names."""
    (mine,) = (g.rows for g in published() if g.paper == "delta_product" and "15B" in g.title)
    theirs = next(g.rows for g in published() if g.paper == "delta_net" and "340M" in g.title)
    for name, row in mine.items():
        kind = name.removesuffix(" [0,1]")
        assert row == theirs[kind if kind in theirs else f"{kind} (w. conv)"]
    assert len(mine) == 4


def test_differences_that_a_paper_names() -> None:
    """Negative eigenvalues, section 5.3: SWDE +2 and SQuAD +4.4 points for the DeltaNet of 340M."""
    rows = next(g.rows for g in published() if g.paper == "negative_eigenvalues" and "340M" in g.title)
    wide, narrow = rows["DeltaNet [-1,1]"], rows["DeltaNet [0,1]"]
    gains = [Decimal(wide[head]) - Decimal(narrow[head]) for head in ("SWDE cont. ↑", "SQUAD cont. ↑")]
    assert gains == [Decimal("2.0"), Decimal("4.4")]


def test_published_rows_average_as_printed() -> None:
    """A digit copied wrongly would show: the mean of six accuracies is printed beside them."""
    accuracies = [column.head for column in ZERO_SHOT if column.percent]
    rows = [row for group in published() for row in group.rows.values()]
    assert len(rows) == 36
    off = [
        row
        for row in rows
        if abs(average([float(row[h]) for h in accuracies]) - float(row[AVERAGE]))
        > 0.101  # the accuracies are rounded, and so is their mean
    ]
    assert not off


def test_published_rows_stand_beside_ours_digit_by_digit() -> None:
    record = {"name": "ours", "paper_row": dict.fromkeys(HEADS, 1.0), "tasks": {}}
    text = paper_markdown([record], HEADS)
    assert (
        "| DeltaNet [-1,1] 12 heads, 392M (35B tokens of FineWeb) | 26.57 | 36.76 | 31.8 | 69.2 | 42.3 "
        "| 50.9 | 47.2 | 24.4 | 44.3 | 15.8 | 11.0 | 0.18 |"
    ) in text
    assert "Products of Householders (Siems et al.), Table 1" in text
