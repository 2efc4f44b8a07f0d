"""Errors for users."""

from collections.abc import Callable

import pytest


def refusal(work: Callable, *arguments: object, **options: object) -> str:
    """Return the message of the ValueError that the call raises, which must be one line."""
    with pytest.raises(ValueError) as failure:
        work(*arguments, **options)
    assert "\n" not in str(failure.value)
    return str(failure.value)
