"""The rows that the paper publishes, as shipped: proof-read, and guarded by sums over its text."""

from decimal import Decimal

from fla_train.eval.paper import AVERAGE, ZERO_SHOT, published_rows

UNAVERAGED = ("Wiki. ppl ↓", "LMB. ppl ↓", "SWDE cont. ↑", "SQUAD cont. ↑", "FDA cont. ↑")
# Of these columns, added up from the paper's text by a program.
SUMS = "271.44 369.25 267.3 263.3 67.48"


def test_columns_that_no_average_checks_add_up() -> None:
    sums = [sum(Decimal(row[head]) for row in published_rows().values()) for head in UNAVERAGED]
    assert " ".join(map(str, sums)) == SUMS


def test_published_rows_average_as_printed() -> None:
    """A digit copied wrongly would show: the paper prints the mean of six accuracies."""
    accuracies = [column.head for column in ZERO_SHOT if column.percent]
    rows = published_rows().values()
    assert len(rows) == 10
    for row in rows:
        # The accuracies are rounded, and so is their mean.
        assert abs(sum(float(row[h]) for h in accuracies) / 6 - float(row[AVERAGE])) <= 0.101
