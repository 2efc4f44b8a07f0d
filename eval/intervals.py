"""Standard errors and 95% intervals of a mean over documents, clustered by document.

Tokens of one document are alike, so a document counts as one observation, whatever its length and however
many sequences it is cut into. The mean is a ratio of sums: losses by targets, or losses by bytes.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95


def leave_one_out(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The mean sum(sums) / sum(weights) without each of the documents: [D] -> [D]."""
    return (sums.sum() - sums) / (weights.sum() - weights)


def jackknife_error(left_out: np.ndarray, value: float) -> float:
    """Standard error of `value` from what it is without each of the documents, `left_out` [D]."""
    return math.sqrt((1 - 1 / len(left_out)) * float(((left_out - value) ** 2).sum()))


def degrees_of_freedom(shares: np.ndarray) -> float:
    """Of the squared `jackknife_error`: those of the scaled chi-squared with its mean and variance.

    Bell and McCaffrey (2002), for losses that differ by document: the variance of a document's sum is
    proportional to its weight squared. D - 1 for equal documents, fewer where a few hold most of the weight.

    Args:
        shares: of each document in the weight, [D], all below 1.
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


@dataclass(frozen=True)
class Mean:
    """A mean per unit of weight over documents, and what their spread says of it.

    Attributes:
        value: sum of the documents' sums by the sum of their weights.
        stderr: jackknife error, a document left out at a time; None for one document or an infinite value.
        freedom: degrees of freedom of `stderr`; 0 without it.
        documents: how many have weight.
    """

    value: float
    stderr: float | None
    freedom: float
    documents: int

    @classmethod
    def of(cls, sums: np.ndarray, weights: np.ndarray) -> "Mean":
        """From each document's sum and weight, both [D]; the weights' sum is positive."""
        sums, weights = np.asarray(sums, float), np.asarray(weights, float)
        value = float(sums.sum() / weights.sum())
        documents = int((weights > 0).sum())
        if documents < 2 or not math.isfinite(value):
            return cls(value, None, 0.0, documents)
        counted = (weights > 0) | (sums != 0)
        sums, weights = sums[counted], weights[counted]
        error = jackknife_error(leave_one_out(sums, weights), value)
        return cls(value, error, degrees_of_freedom(weights / weights.sum()), documents)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval by the quantile of Student's t; None without `stderr`.

        With the plain number of documents for degrees of freedom it would be too narrow where lengths differ:
        tests/eval/test_intervals.py counts how often it holds the mean.
        """
        if self.stderr is None:
            return None
        reach = float(stdtrit(self.freedom, (1 + LEVEL) / 2)) * self.stderr
        return self.value - reach, self.value + reach

    @property
    def no_interval(self) -> str | None:
        """Why there is no interval; None if there is one."""
        if self.stderr is not None:
            return None
        return "one document" if math.isfinite(self.value) else "infinite loss"


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

    mean: Mean
    bits: Mean | None
    sequences: int
    losses: tuple[float, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(
        cls, sums: np.ndarray, targets: np.ndarray, sizes: np.ndarray | None, sequences: int
    ) -> "Estimate":
        """From each document's summed loss (nats), targets and bytes (None: not known), [D] each."""
        losses = np.divide(sums, targets, out=np.zeros(len(sums)), where=targets > 0)
        bits = Mean.of(sums / math.log(2), sizes) if sizes is not None and sizes.any() else None
        return cls(
            Mean.of(sums, targets), bits, sequences, tuple(losses.tolist()), tuple(map(int, targets.tolist()))
        )

    def numbers(self) -> dict:
        """What results.json holds of it: plain numbers; `low` and `high` bound the perplexity."""
        low, high = self.mean.interval or (None, None)
        bits_low, bits_high = (self.bits and self.bits.interval) or (None, None)
        found = {
            "loss": self.mean.value,
            "stderr": self.mean.stderr,
            "sequences": self.sequences,
            "documents": self.mean.documents,
            "degrees_of_freedom": round(self.mean.freedom, 2),
            "perplexity": perplexity(self.mean.value),
            "low": None if low is None else perplexity(low),
            "high": None if high is None else perplexity(high),
            "bits_per_byte": self.bits and self.bits.value,
            "bits_per_byte_stderr": self.bits and self.bits.stderr,
            "bits_per_byte_low": bits_low,
            "bits_per_byte_high": bits_high,
        }
        return found | ({"no_interval": self.mean.no_interval} if self.mean.no_interval else {})


def proportion_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95% interval of a probability. Unlike the one above it has a width where all trials agree."""
    from scipy.stats import binomtest  # slow to import

    interval = binomtest(successes, trials).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def perplexity(loss: float) -> float:
    """exp, at most the largest float: a model that diverges has a perplexity beyond all numbers."""
    return math.exp(min(loss, 700.0))
