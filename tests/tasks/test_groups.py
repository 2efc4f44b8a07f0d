"""The multiplication tables: group axioms, orders, numbering, and arithmetic done another way."""

import itertools
from math import factorial

import numpy as np
import pytest

from fla_train.tasks.groups import make_group

ORDERS = {
    "S1": 1, "S3": 6, "S4": 24, "S5": 120, "A1": 1, "A3": 3, "A4": 12, "A5": 60, "Z1": 1, "Z2": 2, "Z60": 60,
    "D1": 2, "D2": 4, "D7": 14, "Z2xS3": 12, "A4xZ5": 60,
}  # fmt: skip


@pytest.mark.parametrize(("name", "order"), ORDERS.items())
def test_tables_are_groups_with_element_0_the_identity(name: str, order: int) -> None:
    table = make_group(name).table
    everything = np.arange(order)
    assert table.shape == (order, order)
    assert (table[0] == everything).all() and (table[:, 0] == everything).all()
    assert (np.sort(table, 0) == everything[:, None]).all()  # a x = b and x a = b each have one solution
    assert (np.sort(table, 1) == everything).all()
    # (a b) c = a (b c) for all triples
    assert (table[table] == table[everything[:, None, None], table[None]]).all()


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("even_only", [False, True])
def test_permutations_are_numbered_lexicographically_and_compose_first_a_then_b(n, even_only):
    def is_even(p: tuple[int, ...]) -> bool:
        return sum(p[i] > p[j] for i, j in itertools.combinations(range(n), 2)) % 2 == 0

    elements = [p for p in itertools.permutations(range(n)) if is_even(p) or not even_only]
    group = make_group(f"{'A' if even_only else 'S'}{n}")
    assert group.order == len(elements) == max(1, factorial(n) // (2 if even_only else 1))
    for (a, p), (b, q) in itertools.product(enumerate(elements), repeat=2):
        assert elements[group.table[a, b]] == tuple(q[p[i]] for i in range(n))
    assert group.moved.tolist() == [sum(i != v for i, v in enumerate(p)) for p in elements]


def test_dihedral_products_are_those_of_the_symmetries_of_a_polygon() -> None:
    n = 7
    table = make_group(f"D{n}").table

    def matrix(element: int) -> np.ndarray:
        angle = 2 * np.pi * (element % n) / n
        rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        return rotation @ np.diag([1.0, -1.0]) if element >= n else rotation

    for a, b in itertools.product(range(2 * n), repeat=2):
        np.testing.assert_allclose(matrix(table[a, b]), matrix(a) @ matrix(b), atol=1e-12)


def test_cyclic_groups_and_direct_products() -> None:
    z60, z2, s3, product = (make_group(name).table for name in ("Z60", "Z2", "S3", "Z2xS3"))
    assert z60[59, 2] == 1
    for g, h, i, j in itertools.product(range(2), range(6), range(2), range(6)):
        assert product[6 * g + h, 6 * i + j] == 6 * z2[g, i] + s3[h, j]


@pytest.mark.parametrize("name", ["", "Q8", "S", "S0", "s3", "Z-2", "Z2x", "Z2*S3", "S3 ", "Z2xQ3"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown group"):
        make_group(name)
