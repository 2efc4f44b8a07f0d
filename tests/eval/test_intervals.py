"""Clustered standard errors and intervals against plain statistics."""

import math
import statistics

import numpy as np
import pytest

from fla_train.eval.intervals import Estimate, degrees_of_freedom, mean, proportion_interval


def test_documents_of_equal_length_have_the_error_of_a_mean_and_the_quantile_of_t() -> None:
    value, stderr, low, high = mean(np.array([2.0, 4.0, 6.0]), np.array([2.0, 2.0, 2.0]))
    assert value == 2.0 and stderr == pytest.approx(statistics.stdev([1, 2, 3]) / math.sqrt(3))
    assert high - 2.0 == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4) == pytest.approx(2.0 - low, rel=1e-4)
    wide = mean(np.arange(1000.0), np.ones(1000))  # 1.9623 of the normal's 1.9600
    assert wide.high - wide.value == pytest.approx(1.9623 * wide.stderr, rel=1e-4)


def test_documents_of_unequal_length_by_leaving_each_out() -> None:
    sums, weights = np.array([3.0, 40.0, 5.0, 90.0, 7.0]), np.array([1.0, 10.0, 2.0, 30.0, 2.0])
    found = mean(sums, weights)
    left = [np.delete(sums, i).sum() / np.delete(weights, i).sum() for i in range(5)]
    expected = math.sqrt(4 / 5 * sum((value - found.value) ** 2 for value in left))
    assert found.value == pytest.approx(145 / 45) and found.stderr == pytest.approx(expected)
    assert mean(np.append(sums, 0), np.append(weights, 0)) == found  # a document without targets


@pytest.mark.parametrize("weights", [[1, 10, 2, 30, 2], [7, 7, 7, 7], [1, 1000], list(range(1, 60))])
def test_degrees_of_freedom_from_the_eigenvalues_of_the_error(weights: list) -> None:
    """The squared error is a quadratic form of independent sums; and by drawing them."""
    share = np.array(weights) / np.sum(weights)
    count = len(share)
    left = np.eye(count) - share[:, None]  # a document's residual
    form = np.diag(share) @ left.T @ np.diag((1 - share) ** -2.0) @ left @ np.diag(share)
    values = np.linalg.eigvalsh(form)
    found = degrees_of_freedom(share)
    assert found == pytest.approx(values.sum() ** 2 / (values**2).sum())
    if len(set(weights)) == 1:
        assert found == pytest.approx(count - 1)
    draw = np.random.default_rng(0)
    errors = np.array([mean(share * row, share).stderr ** 2 for row in draw.normal(size=(2000, count))])
    assert 2 * errors.mean() ** 2 / errors.var() == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize(
    ("sums", "weights"), [([4.0], [2.0]), ([4.0, 0.0], [2.0, 0.0]), ([4.0, math.inf], [2.0, 2.0])]
)
def test_no_interval_rather_than_a_wrong_one(sums: list, weights: list) -> None:
    """One document, or an infinite loss."""
    values = Estimate.of(np.array(sums), np.array(weights), np.zeros(len(sums)), 1).values()
    assert values.keys() == {"loss", "perplexity"} and math.isfinite(values["perplexity"].value)
    assert all(v.low is None and v.stderr is None for v in values.values())


def test_interval_of_a_proportion() -> None:
    """Wilson (1927) by hand: z^2 / (n + z^2) for no success; symmetric."""
    square = 1.959963984540054**2
    assert proportion_interval(0, 10) == pytest.approx((0.0, square / (10 + square)))
    assert proportion_interval(10, 10) == pytest.approx((10 / (10 + square), 1.0))
    low, high = proportion_interval(5, 10)
    assert low + high == pytest.approx(1.0)
    assert high - 0.5 == pytest.approx(0.5 * (square / (10 + square)) ** 0.5)


def test_bits_per_byte() -> None:
    """800 bits over 400 bytes and 300 over 100 are 2.2 bits per byte, whatever the tokens."""
    nats = np.array([800.0, 300.0]) * math.log(2)
    for targets in ([100, 25], [10, 90]):
        estimate = Estimate.of(nats, np.array(targets), np.array([400, 100]), 2)
        assert estimate.bits.value == pytest.approx(1100 / 500)
        loss, shown = estimate.mean, estimate.values()["perplexity"]
        assert shown.stderr == pytest.approx(loss.stderr * math.exp(loss.value))  # of a small change


@pytest.mark.parametrize("count", [16, 128])
@pytest.mark.parametrize("skewed", [False, True])
def test_intervals_cover_the_mean_of_a_population(count: int, skewed: bool) -> None:
    """2,000 draws from documents of lognormal length (median 450 tokens, sigma 1.1), with losses that differ
    (standard deviation 0.45 nats, lower by 0.15 per e-fold of length): at least 93% are to hold the mean.
    """
    draw, size = np.random.default_rng(0), 100_000
    tokens = np.clip(np.exp(draw.normal(math.log(450), 1.1, size)), 16, 60_000).round()
    spread = draw.gamma(4.0, 0.5, size) - 2.0 if skewed else draw.normal(size=size)
    losses = 3.0 + 0.45 * spread - 0.15 * (np.log(tokens) - math.log(450))
    losses += 3.9 * draw.normal(size=size) / np.sqrt(tokens)
    truth = (losses * tokens).sum() / tokens.sum()
    chosen = draw.integers(0, size, (2000, count))
    bounds = [mean(losses[rows] * tokens[rows], tokens[rows])[2:] for rows in chosen]
    assert np.mean([low <= truth <= high for low, high in bounds]) > 0.93
