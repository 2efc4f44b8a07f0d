"""Standard errors and 95% intervals of a mean over documents, clustered by document.

Tokens of one document are alike, so a document counts as one observation, whatever its length and however
many sequences it is cut into. The mean is a ratio of sums: losses by targets, or losses by bytes.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit
from scipy.stats import binomtest

from fla_train.eval.result import Value

LEVEL = 0.95


def degrees_of_freedom(shares: np.ndarray) -> float:
    """Return the degrees of freedom of the squared jackknife error.

    They are those of the scaled chi-squared with the same mean and variance (Bell and McCaffrey, 2002), if
    the variance of a document's sum is proportional to its weight squared: D - 1 for equal documents, fewer
    where a few hold most of the weight.

    Args:
        shares: fraction of the weight that each document has, [D], all below 1.
    """
    # The squared error is sum_i a_i (sum_j c_ij s_j)^2 with c = identity - shares 1^T, for sums s of variance
    # v; its mean is tr(M), its variance 2 tr(M^2), M = a^1/2 c v c^T a^1/2. Below without a matrix [D, D].
    h, a, v = shares, (1 - shares) ** -2.0, shares**2
    total = v.sum()
    diagonal = total * h**2 - 2 * h * v
    hh, hv, vv = (a * h * h).sum(), (a * h * v).sum(), (a * v * v).sum()
    mean = (a * (v + diagonal)).sum()
    square = (a**2 * (v**2 + 2 * v * diagonal)).sum()
    square += 2 * hh * vv + (total * hh) ** 2 + 2 * hv**2 - 4 * total * hh * hv
    return float(np.clip(mean**2 / square, 1.0, len(h) - 1.0))  # rounding, where a share is nearly 1


def mean(sums: np.ndarray, weights: np.ndarray) -> Value:
    """Return the mean per unit of weight over documents, with its standard error and 95% interval.

    The error is the jackknife's, a document left out at a time. The interval is by the quantile of Student's
    t: with the number of documents as degrees of freedom it would be too narrow where lengths differ, and
    tests/eval/test_intervals.py measures the coverage. One document and an infinite value have neither.

    Args:
        sums: of each document, [D].
        weights: of each document, [D]; the total is positive.
    """
    sums, weights = np.asarray(sums, float), np.asarray(weights, float)
    value = float(sums.sum() / weights.sum())
    if (weights > 0).sum() < 2 or not math.isfinite(value):
        return Value(value)
    counted = (weights > 0) | (sums != 0)
    sums, weights = sums[counted], weights[counted]
    left_out = (sums.sum() - sums) / (weights.sum() - weights)  # the mean without each document
    error = math.sqrt((1 - 1 / len(sums)) * float(((left_out - value) ** 2).sum()))
    reach = float(stdtrit(degrees_of_freedom(weights / weights.sum()), (1 + LEVEL) / 2)) * error
    return Value(value, error, value - reach, value + reach)


@dataclass(frozen=True)
class Estimate:
    """Loss per target over documents.

    Attributes:
        mean: loss in nats per target.
        bits: loss in bits per UTF-8 byte of text; None where the bytes are not known.
        sequences: how many were read.
        losses: mean loss of each document, [D]; 0 for one without targets.
        targets: of each document, [D].
    """

    mean: Value
    bits: Value | None
    sequences: int
    losses: tuple[float, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, sums: np.ndarray, targets: np.ndarray, sizes: np.ndarray, sequences: int) -> "Estimate":
        """Return the estimate from each document's summed loss (nats), targets and bytes, [D] each.

        The bytes are zero where they are not known.
        """
        losses = np.divide(sums, targets, out=np.zeros(len(sums)), where=targets > 0)
        bits = mean(sums / math.log(2), sizes) if sizes.any() else None
        counts = tuple(map(int, targets.tolist()))
        return cls(mean(sums, targets), bits, sequences, tuple(losses.tolist()), counts)

    def values(self) -> dict[str, Value]:
        """Return `loss`, `perplexity` and, where bytes are known, `bits_per_byte`."""
        loss = self.mean
        value, low, high = (None if x is None else perplexity(x) for x in (loss.value, loss.low, loss.high))
        error = None if loss.stderr is None else loss.stderr * value
        values = {"loss": loss, "perplexity": Value(value, error, low, high)}
        return values | ({} if self.bits is None else {"bits_per_byte": self.bits})


def proportion_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a probability, which has a width even where all trials agree."""
    interval = binomtest(successes, trials).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def perplexity(loss: float) -> float:
    """Return exp(loss), at most the largest float: the perplexity of a model that diverged overflows."""
    return math.exp(min(loss, 700.0))
