"""Speed up Triton's interpreter, which spends half of its time on unnecessary work."""

import functools
from collections.abc import Callable
from dataclasses import replace

import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Let it patch `triton.language` once a launch instead of at each call of a device function.

    It also builds its table of dtypes once, and checks for overflows only in debug mode, which reports them.
    """
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_scalar(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _once_a_launch(patch_lang: Callable) -> Callable:
    """Ignore calls by device functions between the start of a launch, which calls it first, and its end."""
    patched: set[int] = set()

    @functools.wraps(patch_lang)
    def patch(function: Callable) -> object:
        visible = {id(x) for x in function.__globals__.values() if x is tl or x is tl.core}
        if patched and visible <= patched:
            return None
        scope = patch_lang(function)
        if not patched:
            restore = scope.restore

            def end_of_launch() -> None:
                patched.clear()
                restore()

            scope.restore = end_of_launch
        patched.update(visible)
        return scope

    return patch


def _by_scalar(np_dtype: Callable) -> Callable:
    of_scalar = functools.cache(np_dtype)
    return lambda dtype: np_dtype(dtype) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
