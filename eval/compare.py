"""Differences of evaluations from the first of them, with standard errors paired by document."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fla_train.eval.intervals import mean
from fla_train.eval.result import EvalResult, Score, Value

COLUMNS = "section data length metric value stderr low high documents sequences chance".split()
DIFFERENCE = ["difference", "difference_stderr", "difference_low", "difference_high", "mark"]
BETTER, WORSE = "▲", "▼"


def long_table(results: Sequence[EvalResult]) -> pd.DataFrame:
    """Return one row for each number of each evaluation.

    Columns are `evaluation`, those of `COLUMNS`, and for all evaluations but the first those of `DIFFERENCE`.
    `mark` is ▲ (better) or ▼ (worse than the first) for a difference of more than two standard errors. The
    difference is missing where the two did not read the same data. Its 95% interval is known for paired
    documents only.
    """
    reference = results[0]
    rows = []
    for result in results:
        for score in result.scores:
            row = {"evaluation": result.name} | {column: getattr(score, column) for column in COLUMNS}
            other = None if result is reference else reference.find(*score.key)
            rows.append(row if other is None else row | difference(result, score, reference, other))
    table = pd.DataFrame(rows, columns=["evaluation", *COLUMNS, *DIFFERENCE])
    return table.astype({"length": "Int64", "sequences": "Int64", "chance": float})


def difference(result: EvalResult, score: Score, reference: EvalResult, other: Score) -> dict[str, Any]:
    """Return the columns of `DIFFERENCE` for `score - other`; none for numbers of different data.

    Differences of the same documents are paired. Where the documents are not known the standard error is the
    root of the summed squares, which is too large if both models fail on the same documents.
    """
    if score.fingerprint != other.fingerprint:
        return {}
    change = score.value - other.value
    error = low = high = None
    documents, others = _documents(result, score), _documents(reference, other)
    if documents.by_document and others.by_document:
        if (paired := paired_mean(documents, others)) is None:
            return {}
        _, error, low, high = paired
        # Documents add to the loss, or to another logarithm of the number: scale to the number's unit.
        if error and paired.value and not math.isclose(paired.value, change, abs_tol=1e-9):
            error, low, high = (x * abs(change / paired.value) for x in (error, low, high))
    elif score.stderr is not None and other.stderr is not None:
        error = math.hypot(score.stderr, other.stderr)
    significant = math.isinf(change) or (error is not None and abs(change) > 2 * error)
    mark = ""
    if score.higher_is_better is not None and significant:
        mark = BETTER if (change > 0) == score.higher_is_better else WORSE
    return dict(zip(DIFFERENCE, (change, error, low, high, mark), strict=True))


def _documents(result: EvalResult, score: Score) -> Score:
    """Return the score that holds the documents of `score`."""
    if score.section != "perplexity":
        return score
    return result.find("perplexity", score.data, "loss", score.length) or score


def paired_mean(score: Score, other: Score) -> Value | None:
    """Return the mean difference over documents; None where they do not match.

    A model with a prefix token predicts one more target of each document than one without it.
    """
    if len(score.by_document) != len(other.by_document) or score.weights != other.weights:
        return None
    weights = np.ones(len(score.by_document)) if score.weights is None else np.array(score.weights, float)
    return mean(np.subtract(score.by_document, other.by_document) * weights, weights)
