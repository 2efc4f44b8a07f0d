"""What a call refuses to do."""

from collections.abc import Callable

import pytest


def refusal(work: Callable, *arguments: object, **options: object) -> str:
    """The one line of the ValueError that the call ends with."""
    with pytest.raises(ValueError) as failure:
        work(*arguments, **options)
    assert "\n" not in str(failure.value)
    return str(failure.value)
