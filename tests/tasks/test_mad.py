"""MAD's tasks against readers that go through a sequence token by token."""

from collections import Counter

import pytest
import torch

from fla_train.tasks.mad import Compression, FuzzyRecall, InContextRecall, Memorization, SelectiveCopying
from fla_train.tasks.task import IGNORE


def read_recall(inputs: list[int], half: int, top: int) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """(key letters, [(position, value letter)]) of each pair; noise, at `top` and above, is skipped."""
    pairs, in_value = [], True
    for position, token in enumerate(inputs):
        if token >= top:
            in_value = True
        elif token < half:
            if in_value:
                pairs.append(([], []))
            in_value = False
            pairs[-1][0].append(token)
        else:
            in_value = True
            pairs[-1][1].append((position, token))
    return pairs


SIZES = ({}, {"noise_share": 0.2}, {"vocab_size": 32, "length": 256}, {"vocab_size": 128, "noise_share": 0.2})


@pytest.mark.parametrize("options", SIZES, ids=str)
def test_recall_asks_for_the_values_of_keys_seen_before(options: dict) -> None:
    task = InContextRecall(seed=3, **options)
    batch = task.batch(range(40))
    asked = 0
    for inputs, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        known: dict[tuple[int, ...], list[int]] = {}
        expected = [IGNORE] * len(inputs)
        pairs = read_recall(inputs, task.half, 2 * task.half)
        for number, (key, value) in enumerate(pairs):
            letters = [letter for _, letter in value]
            if tuple(key) in known and value:
                whole = known[tuple(key)]
                assert letters == (whole if number < len(pairs) - 1 else whole[: len(letters)])
                for position, letter in value:
                    expected[position - 1] = letter
            known.setdefault(tuple(key), letters)
        assert labels == expected
        asked += sum(label != IGNORE for label in labels)
        assert len(known) <= task.half + 1  # a cut last key may look like another
        if not options.get("noise_share"):
            assert max(inputs) < 2 * task.half
    assert asked > 40 * 10


@pytest.mark.parametrize("training", [False, True])
def test_fuzzy_recall_asks_for_the_values_of_keys_seen_before(training: bool) -> None:
    task = FuzzyRecall(training=training, seed=3)
    batch = task.batch(range(300))
    found = {"pairs": 0, "keys": 0, "asked": 0}
    sizes = Counter(), Counter()
    for inputs, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        blanks = sum(token == 15 for token in inputs)
        assert inputs[:blanks] == [15] * blanks
        sequence = [*inputs, labels[-1]][blanks:]
        assert not training or labels[blanks:] == inputs[blanks + 1 :] + labels[-1:]
        known: dict[tuple[int, ...], list[int]] = {}
        expected = [IGNORE] * (len(sequence) - 1)
        pairs = read_recall([*sequence, 0], 7, 15)[:-1]  # a further key ends the last value
        for key, value in pairs:
            letters = [letter for _, letter in value]
            assert len(set(key)) == len(key) and len(set(letters)) == len(letters)
            sizes[0][len(key)] += 1
            sizes[1][len(letters)] += 1
            if tuple(key) in known:
                assert letters == known[tuple(key)]
                for position, letter in value:
                    expected[position - 1] = letter
            known.setdefault(tuple(key), letters)
        assert tuple(pairs[-1][0]) in [tuple(key) for key, _ in pairs[:-1]]
        assert training or labels[blanks:] == expected
        found["pairs"] += len(pairs)
        found["keys"] += len(known)
        found["asked"] += sum(label != IGNORE for label in expected)
    # Means of 600 sequences of the published generator (athms/mad-lab, mad/data/instances.py): pairs, keys
    # that differ, and letters asked for in tests.
    means = {name: total / 300 for name, total in found.items()}
    published = {"pairs": 30.88, "keys": 24.11} if training else {"pairs": 24.88, "keys": 22.68, "asked": 4.4}
    assert {name: means[name] for name in published} == pytest.approx(published, rel=0.03)
    for lengths, whole in zip(sizes, (not training, False), strict=True):
        total = sum(lengths.values())
        expected = {3: 1.0} if whole else dict.fromkeys((1, 2, 3), 1 / 3)
        assert {n: count / total for n, count in lengths.items()} == pytest.approx(expected, abs=0.03)


def test_counting_letters_is_a_weak_guess_at_fuzzy_recall() -> None:
    """Values have 8 letters. Guess the most frequent so far; a figure of docs/ has the accuracy."""
    task = FuzzyRecall(seed=-1)
    batch = task.batch(range(400))
    assert set(batch.labels[batch.labels != IGNORE].tolist()) == set(range(task.half, task.half + 8))
    guesses = torch.zeros_like(batch.input_ids)
    for row, inputs in enumerate(batch.input_ids.tolist()):
        counts: Counter[int] = Counter()
        for t, letter in enumerate(inputs):
            counts.update([letter] * (task.half <= letter < task.half + 8))
            guesses[row, t] = max(counts, key=counts.__getitem__, default=0)
    assert task.metrics(guesses, batch)["accuracy"] == pytest.approx(0.185, abs=0.02)


def test_every_row_has_a_question_however_much_noise() -> None:
    """About one in thirty of these rows had no key twice."""
    task = InContextRecall(vocab_size=4, length=32, noise_share=0.8, noise_vocab=4, seed=3)
    batch = task.batch(range(2000))
    assert (batch.labels != IGNORE).any(1).all()
    shares = (batch.input_ids >= 4).double().mean(1)
    assert (shares == 0).double().mean() < 0.05 and abs(shares[shares > 0].mean() - 0.8 / 1.2) < 0.03


def test_training_labels_are_the_next_tokens() -> None:
    batch = InContextRecall(label_all=True).batch(range(4))
    assert torch.equal(batch.labels[:, :-1], batch.input_ids[:, 1:])
    assert (batch.labels[:, -1] == IGNORE).all()


def test_selective_copying_gives_the_tokens_in_order() -> None:
    task = SelectiveCopying(seed=2)
    batch = task.batch(range(30))
    assert batch.input_ids.shape == (30, 256)
    for inputs, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        at = inputs.index(15)
        assert at == 239 and inputs.count(15) == 1 and set(inputs[at + 1 :]) == {14}
        assert labels[at + 1 :] == [token for token in inputs[:at] if token != 14]
        assert len(labels[at + 1 :]) == 16 and set(labels[: at + 1]) == {IGNORE}


def test_compression_asks_for_every_place_once() -> None:
    batch = Compression(length=12, seed=4).batch(range(20))
    for inputs, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        assert inputs[12] == 16 and max(inputs[:12]) < 16
        places = [token - 17 for token in inputs[13:]]
        assert sorted(places) == list(range(12)) and places != sorted(places)
        assert labels == [IGNORE] * 13 + [inputs[place] for place in places]


def test_memorization_has_one_map_for_all_seeds() -> None:
    known: dict[int, int] = {}
    for seed in (0, 1):
        batch = Memorization(seed=seed).batch(range(50))
        for inputs, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
            assert set(inputs[1::2]) == {255} and set(labels[::2]) == {IGNORE}
            for key, value in zip(inputs[::2], labels[1::2], strict=True):
                assert key < 127 <= value < 255
                assert known.setdefault(key, value) == value
    assert len(known) == len(set(known.values())) == 127
