"""Random draws that are a pure function of (seed, sequence index, draw number), vectorised over sequences.

Each sequence has a separate SplitMix64 stream (Steele, Lea and Flood, 2014), so any sequence can be drawn
alone, in any order and on any rank, with a few array operations per draw.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from fla_train.utils.permutation import mix

_STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment: 2^64 over the golden ratio, odd


def stream_keys(seed: int, indices: np.ndarray | Sequence[int]) -> np.ndarray:
    """Return the first state of each sequence's stream: [n] uint64. `indices` are >= 0."""
    digest = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
    origin = np.frombuffer(digest, dtype="<u8")[0]
    # Mix twice, so that an index does not become a shift along another sequence's stream.
    return mix(mix(np.asarray(indices).astype(np.uint64) * _STEP + origin) ^ origin)


def draw(keys: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` draws of the n streams `keys`: [count, n] uint32, uniform and independent.

    Draw i > 0 depends on `count` too, since each 64-bit word gives one draw to either half of the result.
    """
    words = -(-count // 2)
    state = keys[None, :] + (np.arange(1, words + 1, dtype=np.uint64) * _STEP)[:, None]
    mixed = mix(state)
    out = np.empty((2 * words, len(keys)), dtype=np.uint32)
    np.copyto(out[:words], mixed, casting="unsafe")  # the low halves
    mixed >>= np.uint64(32)
    np.copyto(out[words:], mixed, casting="unsafe")
    return out[:count]


def below(draws: np.ndarray, bound: int | np.ndarray) -> np.ndarray:
    """Map uint32 draws to int64 in [0, bound), by multiply and shift; the bias is below bound / 2^32."""
    scaled = draws.astype(np.uint64)
    scaled *= np.asarray(bound, dtype=np.uint64)
    scaled >>= np.uint64(32)
    return scaled.view(np.int64)


def without_replacement(draws: np.ndarray, population: int) -> np.ndarray:
    """Draw ordered samples without replacement from range(population), all orders equally likely.

    Args:
        draws: [k, n] uint32, k <= population; one draw per item.

    Returns:
        [n, k] int64, by the first k steps of a Fisher-Yates shuffle per row.
    """
    k, n = draws.shape
    assert k <= population
    deck = np.tile(np.arange(population, dtype=np.int32), (n, 1))
    rows = np.arange(n)
    for i in range(k):
        chosen = i + below(draws[i], population - i)
        held = deck[:, i].copy()
        deck[:, i] = deck[rows, chosen]
        deck[rows, chosen] = held
    return deck[:, :k].astype(np.int64)


def weighted_without_replacement(draws: np.ndarray, weights: np.ndarray, k: int) -> np.ndarray:
    """Draw k indices per row without replacement, each in proportion to the weights that are left.

    Exponential clocks of rates `weights` ring in the order of such draws (Efraimidis and Spirakis, 2006).

    Args:
        draws: [m, n] uint32.
        weights: [m], > 0.

    Returns:
        [n, k] int64 in [0, m).
    """
    uniform = (draws.astype(np.float64) + 0.5) / 2.0**32
    rings = -np.log(uniform) / weights[:, None]
    return np.argsort(rings, axis=0)[:k].T
