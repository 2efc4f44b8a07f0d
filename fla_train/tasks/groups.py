"""Finite groups by name, as multiplication tables: S5, A5, Z60, D7 and direct products such as Z2xS3."""

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from math import factorial

import numpy as np

from fla_train.tasks.draws import draw, stream_keys, without_replacement

MAX_ORDER = 1000  # a table holds order^2 numbers; S6 has order 720


@dataclass(frozen=True, eq=False)
class Group:
    """A group whose elements are 0 .. order - 1; element 0 is the identity.

    Attributes:
        name: as given to `make_group`.
        table: [order, order] int64, read-only; table[a, b] is the product a b, "first a, then b".
        moved: [order] int64, read-only, how many points each element moves; None for Z, D and products.
    """

    name: str
    table: np.ndarray
    moved: np.ndarray | None = None

    @property
    def order(self) -> int:
        return len(self.table)


@lru_cache(maxsize=32)
def make_group(name: str) -> Group:
    """Build the group called `name`; "x" joins the factors of a direct product.

    The elements are numbered as follows:
        S<n>, A<n>: the (even) permutations of n points in lexicographic order; a b maps i to b[a[i]].
        Z<n>: the residues mod n under addition.
        D<n>: symmetries of the n-gon, order 2n; r^i is i and r^i s is n + i, where s r s = r^-1.
        GxH: (g, h) is g |H| + h.

    Raises:
        ValueError: the name is unknown, a number is 0, or the order is above MAX_ORDER.
    """
    factors = name.split("x")
    if not all(re.fullmatch(r"[SAZD][1-9][0-9]{0,5}", factor) for factor in factors):
        raise ValueError(f"unknown group '{name}': use S<n>, A<n>, Z<n>, D<n>, or a product such as Z2xS3")
    order = 1
    for factor in factors:
        n = int(factor[1:])
        permutations_of_n = factorial(min(n, 9))  # 9 points have too many already
        orders = {"S": permutations_of_n, "A": max(1, permutations_of_n // 2), "Z": n, "D": 2 * n}
        order *= orders[factor[0]]
        if order > MAX_ORDER:
            raise ValueError(f"group '{name}' has more than {MAX_ORDER} elements; choose a smaller one")
    groups = [_factor(factor) for factor in factors]
    table = groups[0][0]
    for other, _ in groups[1:]:
        table = _direct_product(table, other)
    moved = groups[0][1] if len(groups) == 1 else None
    for array in (table, moved):
        if array is not None:
            array.flags.writeable = False  # the cache gives one group to all
    return Group(name, table, moved)


def generators_first(group: Group, elements: np.ndarray) -> np.ndarray:
    """Shuffle `elements` in a fixed order, then put those first that the elements before do not generate.

    The first few then generate the same subgroup as all of them. For A5 or S5 the first two are enough.
    """
    n = len(elements)
    shuffled = elements[without_replacement(draw(stream_keys(0, [0]), n), n)[0]]
    reached, early = np.array([0]), []
    for element in shuffled:
        if element not in reached:
            early.append(element)
            reached = _generated(group, early)
    return np.concatenate([early, shuffled[~np.isin(shuffled, early)]]).astype(np.int64)


def _generated(group: Group, elements: list[int]) -> np.ndarray:
    """Return the subgroup that `elements` generate. Products are enough, since inverses are powers."""
    reached = np.array([0])
    while len(larger := np.union1d(reached, group.table[reached][:, elements])) > len(reached):
        reached = larger
    return reached


def _factor(factor: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return `table` and `moved` of a group without "x" in its name."""
    kind, n = factor[0], int(factor[1:])
    if kind in "SA":
        return _permutation_group(n, even_only=kind == "A")
    i = np.arange(n)
    total = (i[:, None] + i) % n
    if kind == "Z":
        return total, None
    # r^i (r^j s^b) = r^(i+j) s^b, and (r^i s)(r^j s^b) = r^(i-j) s^(1+b)
    difference = (i[:, None] - i) % n
    return np.block([[total, total + n], [difference + n, difference]]), None


def _permutation_group(n: int, even_only: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return `table` and `moved` of S<n>, or of A<n> with `even_only`."""
    elements = np.array(list(permutations(range(n))))  # [order, n], lexicographic
    if even_only:
        inversions = sum((elements[:, i, None] > elements[:, i + 1 :]).sum(1) for i in range(n))
        elements = elements[inversions % 2 == 0]
    moved = (elements != np.arange(n)).sum(1)
    place = n ** np.arange(n)[::-1]
    # The code of a permutation in base n sorts lexicographically, so a product is found by bisection.
    codes = elements @ place
    products = elements[:, elements] @ place  # [b, a]: the code of i -> b[a[i]]
    return np.ascontiguousarray(np.searchsorted(codes, products).T), moved


def _direct_product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    m, n = len(left), len(right)
    paired = left[:, None, :, None] * n + right[None, :, None, :]
    return paired.reshape(m * n, m * n)
