"""In which order the parts of a mixture take turns: a periodic sequence as even as the weights allow."""

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

import numpy as np

LONGEST_PERIOD = 100_000


def integer_shares(weights: Mapping[str, float]) -> dict[str, int]:
    """The smallest whole numbers in the proportion of the weights, which are taken as the decimals they show.

    Raises:
        ValueError: a weight is not positive, or the weights have no small common denominator.
    """
    if bad := {name: weight for name, weight in weights.items() if not 0 < weight < float("inf")}:
        raise ValueError(f"mixture weights must be positive numbers, not {bad}")
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    whole = sum(exact.values())
    shares = {name: weight / whole for name, weight in exact.items()}
    period = lcm(*(share.denominator for share in shares.values()))
    if period > LONGEST_PERIOD:
        raise ValueError(
            f"the mixture weights {dict(weights)} repeat only after {period:,} sequences; round them to "
            "fewer digits"
        )
    return {name: int(share * period) for name, share in shares.items()}


def turns(shares: list[int]) -> np.ndarray:
    """[sum of shares] int64: whose turn it is at each place of the period.

    Tijdeman's solution of the chairman assignment problem (1980): at every place, each of k parts has had its
    exact share to within 1 - 1 / (2k - 2) turns. So any window holds each part's share to within 2 turns, and
    any window of whole periods exactly. With P the period, part i should have had n s_i / P turns after n
    places. Of the parts that lag by at least 1 / (2k - 2) once the next place is counted, that one has its
    turn which would be too late soonest.
    """
    count, period = len(shares), sum(shares)
    if count == 1:
        return np.zeros(period, dtype=np.int64)
    share = np.asarray(shares, dtype=np.int64)
    slack = 2 * count - 2
    never = np.iinfo(np.int64).max
    had = np.zeros(count, dtype=np.int64)
    out = np.empty(period, dtype=np.int64)
    for n in range(period):
        due = slack * ((n + 1) * share - period * had) >= period
        # Having had x turns, a part must have its next by place ceil((x + 1 - 1 / slack) P / s).
        deadline = -(-((had + 1) * slack - 1) * period // (share * slack))
        out[n] = np.argmin(np.where(due, deadline, never))
        had[out[n]] += 1
    assert (had == share).all()
    return out
