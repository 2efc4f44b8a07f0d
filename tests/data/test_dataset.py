import os

import numpy as np
import pytest
import torch

from fla_train.data.dataset import TokenDataset
from fla_train.data.sampler import BatchSampler, PrefetchLoader, sequential_batches
from fla_train.utils.permutation import permute
from tests.data.test_prepare import read


@pytest.mark.parametrize("seq_len", [1, 7, 64, 6000])  # 6000: longer than a shard
def test_sequences_are_slices_of_the_stream(prepared, seq_len):
    stream = torch.tensor(read(prepared, "train")[0])
    dataset = TokenDataset(prepared.folder, "train", seq_len)
    assert len(dataset) == len(stream) // seq_len
    assert len(prepared.manifest["shards"]) > 2
    whole = dataset.sequences(np.arange(len(dataset)))
    assert whole.dtype == torch.int64
    assert torch.equal(whole, stream[: len(dataset) * seq_len].view(-1, seq_len))


def test_no_shard_stays_open(prepared):
    """A large corpus has more shards than a process may have open files."""
    dataset = TokenDataset(prepared.folder, "train", 16)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):  # compared with its checksums, and read again
        dataset.sequences(np.arange(len(dataset)))
        dataset.boundaries(np.arange(len(dataset)))
        assert len(os.listdir("/proc/self/fd")) == before


def test_shuffled_epochs_hold_each_sequence_once(prepared):
    ordered = TokenDataset(prepared.folder, "train", 64)
    shuffled = TokenDataset(prepared.folder, "train", 64, seed=1)
    n = len(shuffled)
    epochs = [shuffled.positions(np.arange(e * n, (e + 1) * n)) for e in range(3)]
    for positions in epochs:
        assert sorted(positions) == list(range(n))
    assert len({tuple(p) for p in epochs}) == 3
    across = np.array([n - 1, n, 3 * n - 1, 0])  # several epochs in one request, in any order
    expected = [epochs[0][-1], epochs[1][0], epochs[2][-1], epochs[0][0]]
    assert torch.equal(shuffled.sequences(across), ordered.sequences(np.array(expected)))
    assert not np.array_equal(
        TokenDataset(prepared.folder, "train", 64, seed=2).positions(np.arange(n)), epochs[0]
    )


def test_a_step_is_the_same_set_however_it_is_cut():
    for step in (0, 3):
        expected = list(range(step * 24, (step + 1) * 24))
        for world, micro in [(1, 24), (1, 1), (2, 3), (4, 6), (3, 2)]:
            plans = [BatchSampler(24, micro, rank, world) for rank in range(world)]
            assert all(p.indices(step).shape == (p.accumulation, micro) for p in plans)
            # In order of micro-batch, then rank: the order of the stream.
            assert np.stack([p.indices(step) for p in plans], axis=1).ravel().tolist() == expected


def test_micro_batches_in_order_and_resumed(prepared):
    dataset = TokenDataset(prepared.folder, "train", 16, seed=3)
    plan = BatchSampler(12, 2, 1, 2)
    state = torch.get_rng_state()
    with PrefetchLoader(dataset, plan, 0, 5) as batches:
        whole = list(batches)
    assert torch.equal(torch.get_rng_state(), state)
    expected = [dataset.sequences(row) for step in range(5) for row in plan.indices(step)]
    assert torch.equal(torch.stack(whole), torch.stack(expected))
    with PrefetchLoader(dataset, plan, 2) as batches:  # no end: runs on over the epochs
        resumed = [next(batches) for _ in range(9)]
    assert torch.equal(torch.stack(resumed), torch.stack(whole[6:15]))
    with pytest.raises(StopIteration):
        next(batches)


def test_an_error_in_the_background_is_raised_in_front(prepared, monkeypatch):
    dataset = TokenDataset(prepared.folder, "train", 16)

    def broken(indices):
        raise OSError("disk gone")

    monkeypatch.setattr(dataset, "sequences", broken)
    with PrefetchLoader(dataset, BatchSampler(2, 2)) as batches, pytest.raises(OSError, match="disk gone"):
        next(batches)


@pytest.mark.parametrize("world", [1, 3])
def test_sequential_batches_cover_the_split_once(prepared, world):
    dataset = TokenDataset(prepared.folder, "validation", 32)
    rows = [
        row
        for rank in range(world)
        for batch in sequential_batches(dataset, 4, rank=rank, world=world)
        for row in batch.tolist()
    ]
    assert sorted(rows) == sorted(dataset.sequences(np.arange(len(dataset))).tolist())
    first = torch.cat(list(sequential_batches(dataset, 4, limit=6)))
    assert torch.equal(first, dataset.sequences(np.arange(6)))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 97, 100, 101, 1023, 1024, 1025, 4099])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_permutation_is_a_bijection_and_a_function_of_the_position_alone(n, seed):
    whole = permute(np.arange(n), n, seed).tolist()
    assert sorted(whole) == list(range(n))
    assert [int(permute(np.array([i]), n, seed)[0]) for i in (0, n // 3, n - 1)] == [
        whole[i] for i in (0, n // 3, n - 1)
    ]


def test_seed_and_epoch_change_a_permutation():
    n = 1000
    orders = [
        permute(np.arange(n), n, seed, epoch).tolist() for seed, epoch in [(0, 0), (1, 0), (0, 1), (1, 1)]
    ]
    assert len({tuple(order) for order in orders}) == 4
    # Independent orders agree in about one place, as a random permutation has one fixed point on average.
    agreements = [sum(a == b for a, b in zip(orders[0], other, strict=True)) for other in orders[1:]]
    assert max(agreements) < 12


def test_a_permutation_of_a_large_range_needs_no_memory():
    n = 10**12 + 39
    out = permute(np.array([0, 1, n - 1]), n, seed=0)
    assert len(set(out.tolist())) == 3
    assert ((out >= 0) & (out < n)).all()
