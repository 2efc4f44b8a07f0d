"""Word problems against permutations composed one by one in plain Python."""

import itertools

import numpy as np
import pytest
import torch

from fla_train.tasks.group_words import GroupWords
from fla_train.tasks.task import IGNORE, Tally, Task

S4 = list(itertools.permutations(range(4)))


def test_labels_are_running_products_from_left_to_right() -> None:
    batch = GroupWords("S4", 50, seed=3).batch(range(30))
    assert batch.input_ids.shape == batch.labels.shape == (30, 51)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert (batch.input_ids[:, 0] == 25).all() and (batch.labels[:, 0] == IGNORE).all()
    for inputs, labels in zip(batch.input_ids[:, 1:].tolist(), batch.labels[:, 1:].tolist(), strict=True):
        where = list(range(4))  # where each point is after the permutations read so far
        for x, y in zip(inputs, labels, strict=True):
            where = [S4[x][point] for point in where]
            assert S4[y] == tuple(where)


def test_cyclic_labels_are_cumulative_sums() -> None:
    batch = GroupWords("Z60", 33, bos=False).batch(range(2500))  # more sequences than one block
    assert batch.input_ids.shape == (2500, 33)
    torch.testing.assert_close(batch.labels, batch.input_ids.cumsum(1) % 60)


@pytest.mark.parametrize("label_incomplete", [True, False])
def test_several_tokens_per_element_delay_the_product(label_incomplete: bool) -> None:
    k, length = 4, 24
    task = GroupWords("S4", length, tokens_per_element=k, label_incomplete=label_incomplete, bos=False)
    batch = task.batch(range(20))
    for inputs, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        state = tuple(range(4))
        for t in range(length):
            assert (inputs[t] == 24) == (t % k != 0)
            complete = t % k == k - 1
            if complete:
                state = tuple(S4[inputs[t - k + 1]][point] for point in state)
            assert labels[t] == (S4.index(state) if complete or label_incomplete else IGNORE)


@pytest.mark.parametrize(("max_moved", "drawn"), [(2, 11), (3, 31), (5, 120)])
def test_limited_inputs_still_reach_the_whole_group(max_moved: int, drawn: int) -> None:
    s5 = list(itertools.permutations(range(5)))
    allowed = {i for i, p in enumerate(s5) if sum(v != j for j, v in enumerate(p)) <= max_moved}
    batch = GroupWords("S5", 60, max_moved=max_moved, bos=False).batch(range(200))
    assert len(allowed) == drawn
    assert set(batch.input_ids.unique().tolist()) == allowed
    assert len(batch.labels.unique()) == 120


@pytest.mark.parametrize(("group", "max_moved", "count"), [("A5", None, 3), ("S5", None, 2), ("S5", 2, 4)])
def test_the_first_elements_reach_the_whole_group(group: str, max_moved: int | None, count: int) -> None:
    few, more = (
        GroupWords(group, 40, max_moved=max_moved, elements=n, bos=False) for n in (count, count + 5)
    )
    batch = few.batch(range(300))
    drawn = set(batch.input_ids.unique().tolist())
    assert len(drawn) == count
    assert drawn < set(more.batch(range(300)).input_ids.unique().tolist())
    assert len(batch.labels.unique()) == few.group.order


def test_inputs_are_uniform_and_positions_independent() -> None:
    """Pearson's statistic has mean m and deviation sqrt(2m) for m degrees of freedom: allow 5 of them."""
    inputs = GroupWords("S4", 40, bos=False).batch(range(5000)).input_ids.numpy()
    pairs = inputs[:, :-1] * 24 + inputs[:, 1:]
    half = inputs[:, :20] * 24 + inputs[:, 20:]  # draws from the two halves of one word
    rows = inputs[:-1] * 24 + inputs[1:]  # sequences of neighbouring indices
    for cells, values in [(24, inputs), (24, inputs[:, 7]), (576, pairs), (576, half), (576, rows)]:
        counts = np.bincount(values.ravel(), minlength=cells)
        expected = values.size / cells
        chi_square = ((counts - expected) ** 2).sum() / expected
        assert abs(chi_square - (cells - 1)) < 5 * np.sqrt(2 * (cells - 1)), (cells, chi_square)


def test_metrics_of_known_mistakes() -> None:
    task: Task = GroupWords("Z5", 4)
    batch = task.batch(range(4))
    predictions = batch.labels.clone()
    predictions[:, 0] = 3  # the beginning of sequence has no label: anything is allowed
    assert task.metrics(predictions, batch) == {
        "token_accuracy": 1.0,
        "sequence_accuracy": 1.0,
        "prefix_accuracy": [1.0] * 4,
    }
    predictions[0, 2] = (predictions[0, 2] + 1) % 5  # second element of row 0
    predictions[1, 4] = (predictions[1, 4] + 1) % 5  # last element of row 1
    metrics = task.metrics(predictions, batch)
    assert metrics == {
        "token_accuracy": 14 / 16,
        "sequence_accuracy": 0.5,
        "prefix_accuracy": [1.0, 0.75, 0.75, 0.5],
    }


@pytest.mark.parametrize(("tokens", "label_incomplete"), [(1, True), (2, True), (4, True), (2, False)])
def test_guesses_are_at_chance(tokens: int, label_incomplete: bool) -> None:
    """Answers up to the first product are known, also where it is asked again; others have 1 of 6."""
    task = GroupWords("S3", 8, tokens_per_element=tokens, label_incomplete=label_incomplete, seed=3)
    batch = task.batch(range(4096))
    guesses = torch.randint(6, batch.labels.shape, generator=torch.Generator().manual_seed(0))
    for t in range(8):  # the tokens read so far belong to fewer than two complete elements
        if (t + 1) // tokens < 2:
            guesses[:, task.bos + t] = batch.labels[:, task.bos + t]
    tally = Tally.of(guesses, batch.labels)
    assert tally.token_accuracy == pytest.approx(task.chance, abs=0.01)
    assert task.against_chance(tally.token_accuracy, 4096).endswith(": at chance)")
    assert task.against_chance(task.chance + 0.05, 4096).endswith(": above chance)")
    if tokens == 1:
        found = task.summary(tally)["prefix_accuracy"]
        assert found == pytest.approx(task.chance_by_prefix, abs=0.02)
