"""Standard errors and 95% intervals of a mean over documents, clustered by document.

Tokens of one document are alike, so a document counts as one observation, whatever its length and however many
sequences it is cut into. The mean is a ratio of sums: losses by targets, or losses by bytes.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95
LEAST_DOCUMENTS = 2.0  # effective ones, from which an interval is given


def leave_one_out(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The mean sum(sums) / sum(weights) without each of the documents: [D] -> [D]."""
    return (sums.sum() - sums) / (weights.sum() - weights)


def jackknife_error(left_out: np.ndarray, value: float) -> float:
    """Standard error of `value` from what it is without each of the documents, `left_out` [D]."""
    return math.sqrt((1 - 1 / len(left_out)) * float(((left_out - value) ** 2).sum()))


@dataclass(frozen=True)
class Mean:
    """A mean per unit of weight over documents, and what their spread says of it.

    Attributes:
        value: sum of the documents' sums by the sum of their weights.
        stderr: jackknife error, a document left out at a time; None where there is no interval.
        documents: how many have weight.
        effective: sum(weights)^2 / sum(weights^2), the equal documents that would tell as much (Kish, 1965).
    """

    value: float
    stderr: float | None
    documents: int
    effective: float

    @classmethod
    def of(cls, sums: np.ndarray, weights: np.ndarray) -> "Mean":
        """From each document's sum and weight, both [D]; the weights' sum is positive."""
        sums, weights = np.asarray(sums, float), np.asarray(weights, float)
        value = float(sums.sum() / weights.sum())
        documents = int((weights > 0).sum())
        effective = float(weights.sum() ** 2 / (weights**2).sum())
        error = None
        if documents > 1 and effective > LEAST_DOCUMENTS - 1e-9 and math.isfinite(value):
            counted = (weights > 0) | (sums != 0)
            error = jackknife_error(leave_one_out(sums[counted], weights[counted]), value)
        return cls(value, error, documents, effective)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval with the quantile of Student's t for the effective documents - 1; None without error.

        The plain number of documents would be too many degrees of freedom where a few long ones hold most
        tokens: scripts/check_interval_coverage.py measures both.
        """
        if self.stderr is None:
            return None
        reach = float(stdtrit(max(self.effective - 1, 1.0), (1 + LEVEL) / 2)) * self.stderr
        return self.value - reach, self.value + reach

    @property
    def no_interval(self) -> str | None:
        """Why there is no interval; None if there is one."""
        if self.stderr is not None:
            return None
        if self.documents == 1:
            return "one document"
        return "infinite loss" if not math.isfinite(self.value) else "one document holds most tokens"


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
            "effective_documents": round(self.mean.effective, 1),
            "perplexity": perplexity(self.mean.value),
            "low": None if low is None else perplexity(low),
            "high": None if high is None else perplexity(high),
            "bits_per_byte": self.bits and self.bits.value,
            "bits_per_byte_stderr": self.bits and self.bits.stderr,
            "bits_per_byte_low": bits_low,
            "bits_per_byte_high": bits_high,
        }
        return found | ({"no_interval": self.mean.no_interval} if self.mean.no_interval else {})


def perplexity(loss: float) -> float:
    """exp, at most the largest float: a model that diverges has a perplexity beyond all numbers."""
    return math.exp(min(loss, 700.0))
