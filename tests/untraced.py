"""Kernels without coverage: it doesn't report them, and watching an interpreter doubles its time."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P, R = ParamSpec("P"), TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, while which coverage's tracer, if there is one, rests.

    Its own `stop` and `start`: after `sys.settrace` it would take lines of one file for those of another.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        tracer = sys.gettrace()
        if not hasattr(tracer, "stop"):  # no coverage, one that needs no tracer, or a debugger
            return function(*args, **kwargs)
        tracer.stop()
        try:
            return function(*args, **kwargs)
        finally:
            tracer.start()

    return run
