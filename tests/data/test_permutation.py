import numpy as np
import pytest

from fla_train.data.dataset import permute


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 97, 100, 101, 1023, 1024, 1025, 4099])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_a_bijection(n, seed):
    assert sorted(permute(np.arange(n), n, seed)) == list(range(n))


def test_it_is_a_function_of_the_position_alone():
    n = 1000
    whole = permute(np.arange(n), n, seed=3, epoch=2)
    assert [int(permute(np.array([i]), n, 3, 2)[0]) for i in (0, 17, 999)] == whole[[0, 17, 999]].tolist()


def test_seed_and_epoch_change_it():
    n = 1000
    orders = [
        permute(np.arange(n), n, seed, epoch).tolist() for seed, epoch in [(0, 0), (1, 0), (0, 1), (1, 1)]
    ]
    assert len({tuple(order) for order in orders}) == 4
    # Independent orders agree in about one place, as a random permutation has one fixed point on average.
    agreements = [sum(a == b for a, b in zip(orders[0], other, strict=True)) for other in orders[1:]]
    assert max(agreements) < 12


def test_it_looks_random():
    """Over many seeds each position lands anywhere equally often (chi-square); steps are not regular."""
    n, seeds = 12, 6000
    counts = np.zeros((n, n))
    for seed in range(seeds):
        counts[np.arange(n), permute(np.arange(n), n, seed)] += 1
    expected = seeds / n
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)
    big = permute(np.arange(10_000), 10_000, seed=5)
    assert abs(np.corrcoef(np.arange(10_000), big)[0, 1]) < 0.05
    assert len(np.unique(np.diff(big))) > 5000


def test_large_domains_need_no_memory():
    n = 10**12 + 39
    out = permute(np.array([0, 1, n - 1]), n, seed=0)
    assert len(set(out.tolist())) == 3
    assert ((out >= 0) & (out < n)).all()
