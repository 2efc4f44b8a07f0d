"""Differences of evaluations from the first of them, with standard errors paired by document."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from fla_train.eval.intervals import Mean
from fla_train.eval.result import Curve, EvalResult, Score

COLUMNS = "section data length metric value stderr low high documents sequences chance".split()
DIFFERENCE = ["difference", "difference_stderr", "mark"]
BETTER, WORSE = "▲", "▼"


def long_table(results: Sequence[EvalResult]) -> pd.DataFrame:
    """Return one row for each number of each evaluation.

    Columns are `evaluation`, those of `COLUMNS`, and for all evaluations but the first `difference`,
    `difference_stderr` and `mark`: ▲ (better) or ▼ (worse than the first) for a difference of more than two
    standard errors. The difference is missing where the two did not read the same data.
    """
    reference = results[0]
    rows = []
    for result in results:
        for score in result.scores:
            row = {"evaluation": result.name} | {column: getattr(score, column) for column in COLUMNS}
            other = None if result is reference else reference.find(*score.key)
            if other is not None and (found := difference(result, score, reference, other)) is not None:
                row |= dict(zip(DIFFERENCE, found, strict=True))
            rows.append(row)
    columns = ["evaluation", *COLUMNS, *DIFFERENCE]
    return pd.DataFrame(rows, columns=columns).astype({"length": "Int64", "sequences": "Int64"})


def difference(
    result: EvalResult, score: Score, reference: EvalResult, other: Score
) -> tuple[float, float | None, str] | None:
    """Return `score - other`, its standard error and its mark; None for numbers of different data.

    Differences of the same documents are paired. Where the documents are not known the standard error is the
    root of the summed squares, which is too large if both models fail on the same documents.
    """
    if score.fingerprint != other.fingerprint:
        return None
    change = tested = score.value - other.value
    error = None
    documents, others = _documents(result, score), _documents(reference, other)
    if documents.by_document and others.by_document:
        if (paired := paired_mean(documents, others)) is None:
            return None
        # Documents add to the loss, or to another logarithm of the number: scale to the number's unit.
        tested, error = paired.value, paired.stderr
        if error and tested and not math.isclose(tested, change, abs_tol=1e-9):
            error *= abs(change / tested)
    elif score.stderr is not None and other.stderr is not None:
        error = math.hypot(score.stderr, other.stderr)
    significant = math.isinf(change) or (error is not None and abs(change) > 2 * error)
    if score.higher_is_better is None or not significant:
        return change, error, ""
    return change, error, BETTER if (change > 0) == score.higher_is_better else WORSE


def _documents(result: EvalResult, score: Score) -> Score:
    """Return the score that holds the documents of `score`."""
    if score.section != "perplexity":
        return score
    return result.find("perplexity", score.data, "loss", score.length) or score


def paired_mean(score: Score, other: Score) -> Mean | None:
    """Return the mean difference over documents; None where they do not match.

    A model with a prefix token predicts one more target of each document than one without it.
    """
    if len(score.by_document) != len(other.by_document) or score.weights != other.weights:
        return None
    weights = np.ones(len(score.by_document)) if score.weights is None else np.array(score.weights, float)
    return Mean.of(np.subtract(score.by_document, other.by_document) * weights, weights)


def loss_differences(result: EvalResult, reference: EvalResult, data: str) -> Curve | None:
    """Return loss minus the reference's loss (nats) at each context length that both have; None without any.

    `edges` holds the lengths. `sequences` is 0: it differs by length.
    """
    rows = []
    for score in result.of("perplexity"):
        other = reference.find(*score.key)
        if score.data != data or score.metric != "loss" or other is None:
            continue
        if score.fingerprint == other.fingerprint and (mean := paired_mean(score, other)) is not None:
            rows.append((score.length, mean.value, *(mean.interval or (None, None))))
    if not rows:
        return None
    lengths, values, low, high = zip(*rows, strict=True)
    return Curve(data, "loss", lengths[-1], 0, lengths, values, low, high)
