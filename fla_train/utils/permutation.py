"""Permute a range by seed without memory, and mix bits for this package's random draws."""

import hashlib
from functools import lru_cache

import numpy as np

_ROUNDS = 8  # rounds of the Feistel network


def mix(x: np.ndarray) -> np.ndarray:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood, 2014) of uint64s.

    Each input bit affects all bits of the output.
    """
    shifted = x >> np.uint64(30)
    x = x ^ shifted
    x *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x *= np.uint64(0x94D049BB133111EB)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    return x


def permute(index: np.ndarray, n: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Return the positions of `index` (int64, each in [0, n)) in a seeded pseudo-random order of one epoch.

    It takes O(1) time per index and no memory: a Feistel network on pairs (left, right) in Z_a x Z_b with
    a b >= n. Each round adds to one half a keyed hash of the other, which is invertible, so the whole is a
    bijection of range(a b). Cycle walking (repeat until the value is below n) restricts it to range(n);
    a b < n + sqrt(n) + 1, so it hardly ever repeats.
    """
    a = int(np.ceil(np.sqrt(n)))
    b = -(-n // a)
    keys = _keys(seed, epoch)
    out = np.asarray(index, dtype=np.uint64).copy()
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        out[outside] = _feistel(out[outside], np.uint64(a), np.uint64(b), keys)
        outside = out >= n
    return out.astype(np.int64)


def _feistel(x: np.ndarray, a: np.uint64, b: np.uint64, keys: tuple[np.uint64, ...]) -> np.ndarray:
    left, right = x // b, x % b
    for r, key in enumerate(keys):
        if r % 2:
            right = (right + mix(left ^ key) % b) % b
        else:
            left = (left + mix(right ^ key) % a) % a
    return left * b + right


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(np.frombuffer(digest, dtype="<u8"))
