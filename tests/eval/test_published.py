"""The rows that the papers publish, as shipped: proof-read, and guarded by sums over the papers' own text."""

from decimal import Decimal

import pytest

from fla_train.eval.paper import AVERAGE, ZERO_SHOT, published

UNAVERAGED = ("Wiki. ppl ↓", "LMB. ppl ↓", "SWDE cont. ↑", "SQUAD cont. ↑", "FDA cont. ↑")
SUMS = {  # of these columns over the rows taken from each paper, added up from its text by a program
    "delta_product": "271.44 369.25 267.3 263.3 67.48",
    "delta_net": "484.02 629.32 736.8 629.3 288.7",
    "negative_eigenvalues": "136.19 139.09 212.8 183.3 44.6",
}


@pytest.mark.parametrize("paper", SUMS)
def test_columns_that_no_average_checks_add_up(paper: str) -> None:
    rows = [row for group in published() if group.paper == paper for row in group.rows.values()]
    sums = [sum(Decimal(row[head]) for row in rows) for head in UNAVERAGED]
    assert " ".join(map(str, sums)) == SUMS[paper]


def test_rows_that_two_papers_print_are_the_same() -> None:
    """The DeltaProduct paper's table repeats four models of the DeltaNet paper under other names."""
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
    """A digit copied wrongly would show: the papers print the mean of six accuracies."""
    accuracies = [column.head for column in ZERO_SHOT if column.percent]
    rows = [row for group in published() for row in group.rows.values()]
    assert len(rows) == 36
    off = [
        row
        for row in rows
        if abs(sum(float(row[h]) for h in accuracies) / 6 - float(row[AVERAGE]))
        > 0.101  # the accuracies are rounded, and so is their mean
    ]
    assert not off
