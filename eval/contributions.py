"""What each document adds to a task's score, so that two models can be compared document by document."""

import math
from collections.abc import Sequence

import numpy as np

EQUAL = 1e-9  # relative, between lm-eval's sums and ours


def contributions(score: float, items: Sequence[object]) -> tuple[list[float], float] | None:
    """Split a score over its documents.

    The contributions' mean is the score, or its logarithm if it is a perplexity, and their spread gives the
    standard error. Where documents weigh differently (a perplexity by words) they are linear: what the
    quotient of the sums would change by if a document were counted once more. Which kind of score it is shows
    in its value, which must come out of `items` again.

    Args:
        score: of the task.
        items: of each document, as lm-eval aggregates them: numbers, or pairs of a sum and its weight.

    Returns:
        The contributions, and the standard error of `score`; None for any other kind of score, and where a
        value is not finite or there is only one document.
    """
    try:
        values = np.array(items, dtype=float)  # [D], or [D, 2] with weights
    except (TypeError, ValueError):
        return None
    if len(values) < 2 or not np.isfinite(values).all() or values.ndim > 2:
        return None
    if values.ndim == 2:
        if values.shape[1] != 2 or not values[:, 1].sum():
            return None
        sums, weights = values.T
        mean = sums.sum() / weights.sum()
        values = mean + (sums - mean * weights) / weights.mean()
    mean, spread = values.mean(), values.std(ddof=1) / math.sqrt(len(values))
    for found, factor, slope in (
        (mean, 1.0, 1.0),
        (-mean / math.log(2), -1 / math.log(2), 1.0),  # bits per byte
        (math.exp(min(-mean, 700.0)), -1.0, score),  # a perplexity
    ):
        if math.isclose(found, score, rel_tol=EQUAL):
            return (values * factor).tolist(), abs(factor * slope) * spread
    return None
