"""Code traces against Python itself, which runs what they say; and Householder products that solve them."""

import contextlib
import io
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from fla_train.tasks.code_trace import CodeTrace
from fla_train.tasks.task import IGNORE

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
