"""Contributions of documents to scores by lm-eval's aggregations, with standard errors."""

import math

import numpy as np
import pytest
from lm_eval.api.metrics import bits_per_byte, mean, perplexity, weighted_perplexity

from fla_train.eval.scores import per_document_scores

DRAW = np.random.default_rng(0)
RIGHT = DRAW.integers(0, 2, 60).tolist()
LOSSES = (-DRAW.gamma(2.0, 1.5, 60)).tolist()
PAGES = list(zip((-DRAW.gamma(9.0, 30.0, 60)).tolist(), DRAW.integers(20, 900, 60).tolist(), strict=True))


def jackknife(aggregate, items: list) -> float:
    """Standard error from the scores without one document each."""
    left = np.array([aggregate([*items[:i], *items[i + 1 :]]) for i in range(len(items))])
    return math.sqrt((len(items) - 1) / len(items) * ((left - left.mean()) ** 2).sum())


@pytest.mark.parametrize(
    ("aggregate", "items", "back"),
    [
        (mean, RIGHT, float),
        (np.mean, [bool(value) for value in RIGHT], float),
        (perplexity, LOSSES, math.exp),
        (weighted_perplexity, PAGES, math.exp),
        (bits_per_byte, PAGES, float),
    ],
)
def test_their_mean_is_the_score_and_their_spread_its_error(aggregate, items: list, back) -> None:
    score = aggregate(items)
    values, error = per_document_scores(aggregate, items)
    assert len(values) == len(items) and back(np.mean(values)) == pytest.approx(score, rel=1e-9)
    assert error == pytest.approx(jackknife(aggregate, items), rel=0.1)


def test_differences_of_two_models_on_the_same_pages() -> None:
    """By the logarithm of both perplexities; the pages' weights fall out of no difference."""
    other = [(loss - 0.01 * words, words) for loss, words in PAGES]  # 0.01 nats a word more on each page
    mine, theirs = (per_document_scores(weighted_perplexity, items)[0] for items in (PAGES, other))
    assert np.mean(np.subtract(theirs, mine)) == pytest.approx(0.01)
    assert np.std(np.subtract(theirs, mine)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("aggregate", "items"),
    [
        (max, RIGHT),  # no sum over documents,
        (lambda items: sum(items) / len(items), RIGHT),  # or not known to be one
        (mean, ["a", "b"]),
        (mean, PAGES),
        (perplexity, [-math.inf, -1.0]),
        (mean, [1.0]),
        (weighted_perplexity, [(1.0, 0.0), (2.0, 0.0)]),
    ],
)
def test_other_scores_are_not_split(aggregate, items: list) -> None:
    assert per_document_scores(aggregate, items) is None
