"""Mixture of datasets: interleave their sequences in fixed proportions, in an even order that repeats."""

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

import numpy as np
import torch

from fla_train.data.dataset import TokenDataset

LONGEST_PERIOD = 100_000


class MixtureDataset:
    """Interleave the sequences of several datasets. Sequence i is a pure function of i.

    The order repeats after a period of sum(shares) sequences: `interleave` gives the dataset at position
    `i % period`. Each dataset is read in its own order.

    Args:
        datasets: the datasets; a dataset that has been read once begins its next epoch.
        shares: sequences of each dataset in a period.
    """

    def __init__(self, datasets: list[TokenDataset], shares: list[int]):
        self.datasets = datasets
        self._shares = np.asarray(shares, dtype=np.int64)
        self._order = interleave(shares)
        # For each position of the period, how many earlier positions are of the same dataset.
        self._earlier = np.empty_like(self._order)
        for dataset, share in enumerate(shares):
            self._earlier[self._order == dataset] = np.arange(share)

    def sequences(self, indices: np.ndarray) -> torch.Tensor:
        """Return the sequences `indices` (int64, >= 0) as [n, seq_len] int64."""
        located = zip(*self.locate(indices), strict=True)
        return torch.cat([self.datasets[dataset].sequences(np.array([index])) for dataset, index in located])

    def boundaries(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return for each sequence where in (0, seq_len) documents begin: ascending int64."""
        located = zip(*self.locate(indices), strict=True)
        return [self.datasets[dataset].boundaries(np.array([index]))[0] for dataset, index in located]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each index, and the index within that dataset: both [n] int64."""
        periods, positions = np.divmod(np.asarray(indices, dtype=np.int64), len(self._order))
        datasets = self._order[positions]
        return datasets, periods * self._shares[datasets] + self._earlier[positions]


# Map-style datasets. Sequence i is the same on any rank, in any batch and after any resume.
Dataset = TokenDataset | MixtureDataset


def integer_shares(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the smallest whole numbers in the proportion of the positive weights, read as decimals.

    Raises:
        ValueError: the weights have no small common denominator.
    """
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    whole = sum(exact.values())
    shares = {name: weight / whole for name, weight in exact.items()}
    period = lcm(*(share.denominator for share in shares.values()))
    if period > LONGEST_PERIOD:
        raise ValueError(f"the mixture weights {dict(weights)} have a period of {period:,}: use fewer digits")
    return {name: int(share * period) for name, share in shares.items()}


def interleave(shares: list[int]) -> np.ndarray:
    """Return the dataset at each position of a period: [sum of shares] int64.

    The sequences of each dataset are spread evenly: sequence j of s is due after (j + 1/2) / s of the period.
    """
    datasets = np.repeat(np.arange(len(shares)), shares)
    due = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
    return datasets[np.argsort(due, kind="stable")]
