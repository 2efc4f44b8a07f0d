"""The rules of config keys: each wrong value is one line that names its key."""

from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import pytest

from fla_train.utils.keys import find_errors, key


@dataclass
class Section:
    rate: float = key(0.1, above=0, below=1)
    size: int | str = key("first", at_least=1, word="first")
    lengths: list[int] = key(factory=lambda: [1], at_least=1, nonempty=True)
    mode: str = key("a", choices=("a", "b"))
    options: Any = key(None, type=dict | None)
    path: Optional[str] = key("x", required="a folder")  # noqa: UP045 (tasks of users may have it)


@dataclass
class Root:
    section: Section = field(default_factory=Section)
    named: dict[str, Section] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("rate", (0.5, 0.01, np.float64(0.5)), (0, 1, 1.0, "0.5", True, None, float("nan"))),
        ("size", (1, "first"), (0, 1.5, "auto", True)),
        ("lengths", ([1, 2], (3,)), ([], (), [0], [1.0], 3, [True], None)),
        ("mode", ("b",), ("c", 1, ["a"])),
        ("options", (None, {"a": 1}), ([], "a")),
        ("path", ("here",), (None, "", 3)),
    ],
)
def test_only_values_that_break_a_rule_are_errors(name: str, right: tuple, wrong: tuple) -> None:
    named = (f"section.{name}", f"named.one.{name}")
    for value, starts in [(value, ()) for value in right] + [(value, named) for value in wrong]:
        section = Section(**{name: value})
        errors = find_errors(Root(section, {"one": section}))
        assert len(errors) == len(starts), value
        assert all(map(str.startswith, errors, starts))
