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
    rows = published(paper)[1].values()
    sums = [sum(Decimal(row[head]) for row in rows) for head in UNAVERAGED]
    assert " ".join(map(str, sums)) == SUMS[paper]


def test_published_rows_average_as_printed() -> None:
    """A digit copied wrongly would show: the papers print the mean of six accuracies."""
    accuracies = [column.head for column in ZERO_SHOT if column.percent]
    rows = [row for paper in SUMS for row in published(paper)[1].values()]
    assert len(rows) == 36
    off = [
        row
        for row in rows
        if abs(sum(float(row[h]) for h in accuracies) / 6 - float(row[AVERAGE]))
        > 0.101  # the accuracies are rounded, and so is their mean
    ]
    assert not off
