"""Plain values against annotations, and what a user is told of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from fla_train.tasks import MQARSetting
from fla_train.tasks.annotations import fits, in_words

SETTINGS = Sequence[MQARSetting | tuple[int, int] | tuple[int, int, float]]


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (int, [3, -1], [True, 3.0, "3", None, [3]]),
        (float, [3, 0.5], [True, "0.5", None]),
        (bool, [True, False], [1, 0, "maybe", None]),
        (str, ["S3", ""], [5, ["S3"], None]),
        (int | None, [3, None], [2.5, False, "abc"]),
        (
            SETTINGS,
            [[], [[64, 4]], ((64, 4, 0.5), [128, 8]), [MQARSetting(64, 4)]],
            [3, "ab", [64, 4], [[64]], [[64, "a"]], [[64, 4.5]], [[64, 4, 1, 1]], [{"seq_len": 64}]],
        ),
    ],
)
def test_values_of_the_type_fit(annotation: Any, good: list, bad: list) -> None:
    assert [value for value in good if not fits(value, annotation)] == []
    assert [value for value in bad if fits(value, annotation)] == []


def test_an_annotation_is_said_as_a_user_may_write_it() -> None:
    assert in_words(int | None) == "a whole number or null"
    assert in_words(SETTINGS) == (
        "a list of [a whole number, a whole number] or [a whole number, a whole number, a number]"
    )
