"""Code that coverage does not report runs without its tracer, which doubles the time of interpreted kernels
and adds half to that of imports.
"""

import functools
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
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


def rest_during_imports() -> None:
    """From here on, modules of other projects are imported `untraced`."""
    traced = SourceFileLoader.exec_module
    rested = untraced(traced)

    def exec_module(self: SourceFileLoader, module: object) -> None:
        (rested if "site-packages" in self.path else traced)(self, module)

    SourceFileLoader.exec_module = exec_module
