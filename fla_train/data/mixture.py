"""Mixture of datasets: each has its share of the sequences, in a periodic, even order."""

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

import numpy as np
import torch

from fla_train.data.dataset import TokenDataset

LONGEST_PERIOD = 100_000


class MixtureDataset:
    """Read several datasets in turn. Sequence i is a pure function of i.

    `turns` gives the dataset at position `i % period`, and each dataset is read in its order.

    Args:
        datasets: the datasets; a dataset that has been read once begins its next epoch.
        shares: turns of each dataset in a period.
    """

    def __init__(self, datasets: list[TokenDataset], shares: list[int]):
        self.datasets = datasets
        self._shares = np.asarray(shares, dtype=np.int64)
        self._turns = turns(shares)
        self._rank = np.empty_like(self._turns)  # earlier turns of the same dataset in the period
        for dataset in range(len(datasets)):
            mine = self._turns == dataset
            self._rank[mine] = np.arange(mine.sum())

    def __len__(self) -> int:
        """Return the number of sequences until one dataset has been read once."""
        return min(
            len(dataset) * len(self._turns) // int(share)
            for dataset, share in zip(self.datasets, self._shares, strict=True)
        )

    def sequences(self, indices: np.ndarray) -> torch.Tensor:
        """Return the sequences `indices` (int64, >= 0) as [n, seq_len] int64."""
        rows = zip(*self.places(indices), strict=True)
        return torch.cat([self.datasets[dataset].sequences(np.array([index])) for dataset, index in rows])

    def boundaries(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return for each sequence where in (0, seq_len) documents begin: ascending int64."""
        rows = zip(*self.places(indices), strict=True)
        return [self.datasets[dataset].boundaries(np.array([index]))[0] for dataset, index in rows]

    def places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each index, and the index within that dataset: both [n] int64."""
        periods, place = np.divmod(np.asarray(indices, dtype=np.int64), len(self._turns))
        dataset = self._turns[place]
        return dataset, periods * self._shares[dataset] + self._rank[place]


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


def turns(shares: list[int]) -> np.ndarray:
    """Return the dataset whose turn it is at each position of the period: [sum of shares] int64.

    The turns of each dataset are spread evenly: turn j of s is due after (j + 1/2) / s of the period.
    """
    datasets = np.repeat(np.arange(len(shares)), shares)
    due = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
    return datasets[np.argsort(due, kind="stable")]
