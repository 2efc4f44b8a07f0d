"""Mixture of datasets: each has its share of the sequences, in a periodic, even order."""

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

import numpy as np
import torch

from fla_train.data.dataset import TokenDataset

LONGEST_PERIOD = 100_000


class MixtureDataset:
    """Sequence i is a pure function of i: `turns` gives the part at position `i % period`, and each part is
    read in its order.

    Args:
        parts: the datasets; a part that has been read once begins its next epoch.
        shares: turns of each part in a period.
    """

    def __init__(self, parts: list[TokenDataset], shares: list[int]):
        self.parts = parts
        self._shares = np.asarray(shares, dtype=np.int64)
        self._turns = turns(shares)
        self._rank = np.empty_like(self._turns)  # earlier turns of the same part in the period
        for part in range(len(parts)):
            mine = self._turns == part
            self._rank[mine] = np.arange(mine.sum())

    def __len__(self) -> int:
        """Return the number of sequences until one part has been read once."""
        return min(
            len(part) * len(self._turns) // int(share)
            for part, share in zip(self.parts, self._shares, strict=True)
        )

    def sequences(self, indices: np.ndarray) -> torch.Tensor:
        """Return the sequences `indices` (int64, >= 0) as [n, seq_len] int64."""
        rows = zip(*self.places(indices), strict=True)
        return torch.cat([self.parts[part].sequences(np.array([index])) for part, index in rows])

    def boundaries(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return for each sequence where in (0, seq_len) documents begin: ascending int64."""
        rows = zip(*self.places(indices), strict=True)
        return [self.parts[part].boundaries(np.array([index]))[0] for part, index in rows]

    def places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each index, and the index within that part: both [n] int64."""
        periods, place = np.divmod(np.asarray(indices, dtype=np.int64), len(self._turns))
        part = self._turns[place]
        return part, periods * self._shares[part] + self._rank[place]


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
    """Return the part whose turn it is at each position of the period: [sum of shares] int64.

    The turns of each part are spread evenly: turn j of a part with s turns is due after (j + 1/2) / s of the
    period.
    """
    parts = np.repeat(np.arange(len(shares)), shares)
    due = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
    return parts[np.argsort(due, kind="stable")]
