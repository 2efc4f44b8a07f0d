"""Formal languages against readers written another way: Python's own arithmetic and state machines."""

import re
from collections import Counter

import numpy as np
import pytest
import torch

from fla_train.tasks.formal import LANGUAGES, TRAIN_LENGTHS, FormalLanguage
from fla_train.tasks.task import IGNORE, tally_by


def read_parity(word: list[str]) -> str:
    odd = False
    for bit in word:
        odd ^= bit == "1"
    return str(int(odd))


def read_even_pairs(word: list[str]) -> str:
    text = "".join(word)
    return str(sum(text[i : i + 2] in ("01", "10") for i in range(len(text) - 1)) % 2)


def read_cycle(word: list[str]) -> str:
    position = 0
    for action in word:
        position = {"stay": position, "forward": (position + 1) % 5, "back": (position - 1) % 5}[action]
    return str(position)


def read_arithmetic(word: list[str]) -> str:
    assert word[-1] == "="
    return str(eval("".join(word[:-1])) % 5)


READERS = {
    "parity": read_parity,
    "even_pairs": read_even_pairs,
    "cycle_navigation": read_cycle,
    "modular_arithmetic": read_arithmetic,
    "modular_arithmetic_brackets": read_arithmetic,
    "modular_arithmetic_brackets_times": read_arithmetic,
}


def words_and_answers(task: FormalLanguage, indices) -> list[tuple[list[str], str]]:
    batch = task.batch(indices)
    tokens = task.language.tokens
    pairs = []
    for inputs, labels, length in zip(
        batch.input_ids.tolist(), batch.labels.tolist(), batch.metadata["length"].tolist(), strict=True
    ):
        end = length + ("=" in tokens)
        assert all(tokens[i] == "[PAD]" for i in inputs[end:])
        assert [t for t, label in enumerate(labels) if label != IGNORE] == [end - 1]
        pairs.append(([tokens[i] for i in inputs[:end]], tokens[labels[end - 1]]))
    return pairs


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("lengths", [TRAIN_LENGTHS, (40, 256), (1, 7)])
def test_answers_are_right(name: str, lengths: tuple[int, int]) -> None:
    task = FormalLanguage(name, *lengths, seed=4)
    for word, answer in words_and_answers(task, range(400)):
        assert "[PAD]" not in word
        assert answer == READERS[name](word), word


@pytest.mark.parametrize("name", LANGUAGES)
def test_lengths_and_answers_cover_their_range_evenly(name: str) -> None:
    pairs = words_and_answers(FormalLanguage(name), range(6000))
    odd = name == "modular_arithmetic"
    lengths = Counter(len(word) - ("=" in word) for word, _ in pairs)
    possible = range(3, 41, 2 if odd else 1)
    assert set(lengths) == set(possible)
    expected = 6000 / len(possible)
    assert all(abs(count - expected) < 5 * np.sqrt(expected) for count in lengths.values())
    answers = Counter(answer for _, answer in pairs)
    chances = LANGUAGES[name].answers
    assert len(answers) == chances
    if "*" not in {token for word, _ in pairs for token in word}:  # a product is 0 more often than not
        assert all(abs(count - 6000 / chances) < 5 * np.sqrt(6000 / chances) for count in answers.values())


def test_bracket_expressions_have_the_grammar_of_the_papers() -> None:
    """Reduce by E -> ( E op E ) with leaves d, -d, (d), (-d) until one expression is left."""
    seen = set()
    for word, _ in words_and_answers(FormalLanguage("modular_arithmetic_brackets"), range(500)):
        text = "".join(word[:-1])
        seen |= set(text)
        text = re.sub(r"\(-?\d\)", "E", text)
        text = re.sub(r"(?<![\dE)])-\d|\d", "E", text)  # a minus that follows no operand is a sign
        while (reduced := re.sub(r"\(E[+-]E\)", "E", text)) != text:
            text = reduced
        assert text == "E", word
    assert seen == set("01234+-()")


def test_a_longer_bracket_expression_splits_its_tokens_uniformly() -> None:
    task = FormalLanguage("modular_arithmetic_brackets_times", 6, 6)
    lefts, operators = Counter(), Counter()
    for word, _ in words_and_answers(task, range(3000)):
        text = "".join(word[:-1])
        # 6 tokens: (d op -d) or (-d op d)
        operator = re.fullmatch(r"\((-?\d)([+*-])(-?\d)\)", text)
        lefts[len(operator[1])] += 1
        operators[operator[2]] += 1
    assert all(abs(lefts[size] - 1500) < 5 * np.sqrt(750) for size in (1, 2))
    assert all(abs(operators[o] - 1000) < 5 * np.sqrt(667) for o in "+-*")


@pytest.mark.parametrize("name", LANGUAGES)
def test_labels_of_parts_are_the_answers_of_what_ends_there(name: str) -> None:
    """Read each part alone: the word so far, its open brackets closed."""
    settings = {"max_length": 25, "seed": 8}
    whole, parts = FormalLanguage(name, **settings), FormalLanguage(name, label_parts=True, **settings)
    batch, plain = parts.batch(range(200)), whole.batch(range(200))
    assert torch.equal(batch.input_ids, plain.input_ids)
    last = plain.labels != IGNORE
    assert torch.equal(batch.labels[last], plain.labels[last])
    tokens = parts.language.tokens
    for inputs, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        word = [tokens[i] for i in inputs if i != parts.pad_id]
        found = {t: tokens[label] for t, label in enumerate(labels[: len(word)]) if label != IGNORE}
        assert all(label == IGNORE for label in labels[len(word) :])
        expected = {}
        for t in range(len(word)):
            if (part := part_ending_at(word, t)) is not None:
                expected[t] = READERS[name](part)
        assert found == expected, word


def part_ending_at(word: list[str], t: int) -> list[str] | None:
    """The word up to t, as far as it has an answer there; "=" ends the whole of it."""
    token, part = word[t], word[: t + 1]
    if "=" not in word or token == "=":
        return part
    # A digit ends an expression unless it is bracketed with nothing but its sign, which is one leaf.
    before = t - 1 - (t > 1 and word[t - 1] == "-" and word[t - 2] in "(+-*")
    alone = t > 0 and word[before] == "(" and word[t + 1] == ")"
    if token != ")" and (not token.isdigit() or alone):
        return None
    return [*part, *")" * (part.count("(") - part.count(")")), "="]


@pytest.mark.parametrize(
    ("name", "alphabet", "others"),
    [
        ("modular_arithmetic", "12+", ""),
        ("modular_arithmetic", "034-*", ""),
        ("modular_arithmetic_brackets", "14+", "()-"),
        ("modular_arithmetic_brackets_times", "1+*", "()-"),
    ],
)
def test_an_alphabet_limits_what_is_drawn_and_not_the_meaning(name: str, alphabet: str, others: str) -> None:
    pairs = words_and_answers(FormalLanguage(name, alphabet=alphabet), range(300))
    counts = Counter(token for word, _ in pairs for token in word)
    assert set(counts) == set(alphabet + others + "=")
    assert all(answer == READERS[name](word) for word, answer in pairs)
    digits = [counts[token] for token in alphabet if token.isdigit()]
    assert max(digits) - min(digits) < 6 * np.sqrt(sum(digits))


def test_metrics_are_scaled_by_the_chance_level() -> None:
    task = FormalLanguage("modular_arithmetic", 3, 5)
    batch = task.batch(range(10))
    predictions = batch.labels.clone()
    assert task.metrics(predictions, batch) == {"accuracy": 1.0, "scaled_accuracy": 1.0}
    predictions[:8] = 0  # 2 of 10 right: as good as a guess
    metrics = task.metrics(predictions, batch)
    assert metrics["accuracy"] == 0.2 and abs(metrics["scaled_accuracy"]) < 1e-12
    by_length = tally_by(predictions, batch, "length")
    assert set(by_length) == set(batch.metadata["length"].tolist())
    assert sum(tally.tokens_right for tally in by_length.values()) == 2
