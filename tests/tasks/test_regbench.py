"""RegBench: strings follow one automaton, and an answer counts exactly if that automaton allows it."""

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from fla_train.tasks.regbench import PAD, SEPARATOR, SYMBOLS, RegBench, random_automaton
from fla_train.tasks.task import IGNORE


def test_automata_are_as_the_benchmark_draws_them() -> None:
    sizes, out_degrees = set(), set()
    for seed in range(300):
        edges = random_automaton(np.random.default_rng(seed))
        sizes.add(len(edges))
        for state, outgoing in enumerate(edges):
            out_degrees.add(len(outgoing))
            assert len(set(outgoing.values())) == len(outgoing)  # different targets
            assert state not in outgoing.values()
            assert all(
                0 <= symbol < SYMBOLS and 0 <= target < len(edges) for symbol, target in outgoing.items()
            )
    assert sizes == set(range(4, 13)) and out_degrees == {1, 2, 3}


def test_labels_are_the_next_symbols() -> None:
    batch = RegBench(950, seed=1).batch(range(20))
    for inputs, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        end = inputs.index(PAD) if PAD in inputs else len(inputs)
        assert set(inputs[end:]) <= {PAD} and PAD not in inputs[:end]
        strings, current = [], []
        for token in [*inputs[:end], SEPARATOR]:
            if token == SEPARATOR:
                strings.append(current)
                current = []
            else:
                current.append(token)
        assert 10 <= len(strings) <= 19 and all(1 <= len(string) <= 49 for string in strings)
        following = [*inputs[1:], PAD]
        assert labels == [token if token < SYMBOLS else IGNORE for token in following]


def test_what_is_allowed_is_what_the_automaton_allows() -> None:
    """Equal beginnings of strings allow the same symbols, among them all that ever follow."""
    batch = RegBench(950, seed=2).batch(range(10))
    for inputs, labels, allowed in zip(
        batch.input_ids.tolist(), batch.labels.tolist(), batch.metadata["allowed"], strict=True
    ):
        sets: dict[tuple, set[int]] = {}
        followed = defaultdict(set)
        history: tuple[int, ...] = ()
        for token, label, row in zip(inputs, labels, allowed, strict=True):
            history = () if token == SEPARATOR else (*history, token)
            if label == IGNORE:
                continue
            here = set(row.nonzero().flatten().tolist())
            assert 1 <= len(here) <= 3
            assert sets.setdefault(history, here) == here
            followed[history].add(label)
        assert all(followed[history] <= sets[history] for history in followed)


def test_any_allowed_symbol_counts() -> None:
    task = RegBench(200, seed=3)
    batch = task.batch(range(16))
    labelled = batch.labels != IGNORE
    allowed = batch.metadata["allowed"]
    other = allowed.clone()
    other.scatter_(2, batch.labels.clamp(min=0)[..., None], False)
    predictions = torch.where(other.any(2), other.int().argmax(2), batch.labels)  # another one, if there is
    assert (predictions != batch.labels)[labelled].any()
    assert task.metrics(predictions, batch)["dfa_accuracy"] == 1.0
    wrong = (~allowed).int().argmax(2)
    assert task.metrics(wrong, batch)["dfa_accuracy"] == 0.0
    assert task.metrics(torch.full_like(wrong, SEPARATOR), batch)["dfa_accuracy"] == 0.0


def test_counting_what_followed_is_a_strong_guess() -> None:
    """Guess the most frequent successor of 0 to 2 symbols; docs/results_expressivity.md quotes one."""
    task = RegBench(seed=-1)
    batch = task.batch(range(100))
    accuracies = []
    for order in range(3):
        guesses = torch.zeros_like(batch.input_ids)
        for row, inputs in enumerate(batch.input_ids.tolist()):
            counts: dict[tuple, Counter] = defaultdict(Counter)
            for t, token in enumerate(inputs):
                for n in range(order + 1):
                    if token < SYMBOLS and t >= n:
                        counts[tuple(inputs[t - n : t])][token] += 1
                for n in range(order + 1):  # the longest context that has come before
                    if n <= t + 1 and (found := counts.get(tuple(inputs[t + 1 - n : t + 1]))):
                        guesses[row, t] = found.most_common(1)[0][0]
        accuracies.append(task.metrics(guesses, batch)["dfa_accuracy"])
    assert accuracies == pytest.approx([0.486, 0.829, 0.934], abs=0.03)
