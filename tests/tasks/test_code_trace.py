"""Code traces against Python itself, which runs what they say; and Householder products that solve them."""

import contextlib
import io
from collections import Counter
from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch

from fla_train.tasks import IGNORE, CodeTrace

SETTINGS = [
    {"variables": 3, "length": 60},
    {"variables": 5, "length": 90, "max_moved": 3, "gaps": [2, 7]},
    {"variables": 4, "length": 300, "statement_tokens": False},
    {"variables": 2, "length": 40, "gaps": [1], "label_all": True},
]


def outputs(session: str) -> tuple[list[str], list[str]]:
    """What `session` shows as printed values, and what Python prints when it runs its statements."""
    lines = session.splitlines()
    code = "\n".join(line[4:] for line in lines if line.startswith(">>> "))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    return [line for line in lines if not line.startswith(">>> ")], printed.getvalue().splitlines()


@pytest.mark.parametrize("options", SETTINGS)
def test_python_prints_the_values_that_a_session_shows(options: dict) -> None:
    task = CodeTrace(**options, seed=3)
    batch = task.batch(range(20))
    assert batch.input_ids.shape == batch.labels.shape == (20, options["length"])
    assert task.vocab_size == len(task.tokens) > batch.input_ids.max()
    for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        session = task.text(ids)
        whole = session[: session.rindex("\n") + 1]  # a row may end within a line
        shown, printed = outputs(whole[: whole.rindex("\n>>> ") + 1])
        assert shown and shown == printed[: len(shown)] and len(printed) - len(shown) <= 1
        following = [(t, ids[t + 1]) for t in range(len(ids) - 1)]
        if options.get("label_all"):
            assert all(labels[t] == token for t, token in following)
        else:
            values = [
                t for t, token in following
                if task.tokens[token][0].isdigit() and task.tokens[ids[t]].endswith("\n")
            ]  # fmt: skip
            assert [t for t, label in enumerate(labels[:-1]) if label != IGNORE] == values


@pytest.mark.parametrize("statement_tokens", [True, False])
def test_rows_have_their_number_of_assignments_between_prints(statement_tokens: bool) -> None:
    task = CodeTrace(3, 400, gaps=[1, 4], statement_tokens=statement_tokens)
    batch = task.batch(range(40))
    for ids, gap in zip(
        batch.input_ids.tolist(), batch.metadata["moves_between_reveals"].tolist(), strict=True
    ):
        lines = task.text(ids).splitlines()[3:-1]  # after the first assignments
        prints = [i for i, line in enumerate(lines) if "print" in line]
        assert prints == list(range(gap, len(lines), gap + 2))
    assert set(batch.metadata["moves_between_reveals"].tolist()) == {1, 4}


@pytest.mark.parametrize("statement_tokens", [True, False])
def test_the_least_length_that_is_taken_ends_with_a_print_in_the_longest_rows(statement_tokens: bool) -> None:
    task = partial(CodeTrace, 3, gaps=[1, 2], statement_tokens=statement_tokens)
    first = (task(100).batch(range(1000)).labels != IGNORE).int().argmax(1)
    least = int(first.max()) + 1
    assert (task(least).batch(range(1000)).labels != IGNORE).any(1).all()
    with pytest.raises(ValueError):
        task(least - 1)


def test_assignments_are_drawn_uniformly_from_those_that_move_so_many() -> None:
    task = CodeTrace(4, 512, max_moved=3, gaps=[8])
    lines = task.text(task.batch(range(60)).input_ids.flatten().tolist()).splitlines()
    counts = Counter(line for line in lines if line.startswith(">>>") and "," in line)
    moved = [sum(a != b for a, b in enumerate(images)) for images in permutations(range(4))]
    kinds = sum(2 <= count <= 3 for count in moved)
    assert len(counts) == kinds
    expected = counts.total() / kinds
    assert all(abs(count - expected) < 5 * np.sqrt(expected) for count in counts.values())
    assert {line.count("=") for line in counts} == {1}


def test_tracking_by_products_of_householders_answers_every_print() -> None:
    """The operator's state S, a row for each variable: two reflections a line solve swaps and cycles."""
    task = CodeTrace(4, 200, max_moved=3)
    batch = task.batch(range(8))
    predictions = torch.zeros_like(batch.labels)
    for row, ids in enumerate(batch.input_ids.tolist()):
        state = torch.zeros(4, 4, dtype=torch.float64)
        for t, line in enumerate(task.text([i]) for i in ids):
            if "," in line:
                left, right = (side.strip("> \n").split(", ") for side in line.split(" = "))
                source = dict(zip(left, right, strict=True))
                target = left[0]
                for _ in left[1:]:  # along the cycle: n - 1 reflections, each of them a swap
                    normal = torch.zeros(4, dtype=torch.float64)
                    normal["abcd".index(target)], normal["abcd".index(source[target])] = 0.5**0.5, -(0.5**0.5)
                    state = state - 2 * torch.outer(normal, normal @ state)
                    target = source[target]
            elif "=" in line:
                state["abcd".index(line[4]), int(line[8])] = 1
            elif "print" in line:
                value = state["abcd".index(line[10])].argmax()
                predictions[row, t] = task.tokens.index(f"{value}\n")
    assert task.metrics(predictions, batch)["accuracy"] == 1.0
