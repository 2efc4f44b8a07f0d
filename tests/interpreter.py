"""Triton's interpreter without what it does in vain, half of its time."""

import functools
from collections.abc import Callable
from dataclasses import replace

import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """From here on, it patches `triton.language` once a launch, and not at each call of a device function. It
    builds its table of dtypes once, and looks for no overflows, which it would report in debug mode only.
    """
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_scalar(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _once_a_launch(patch_lang: Callable) -> Callable:
    """A launch calls it first, and undoes it at its end; in between device functions call it, for nothing."""
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
