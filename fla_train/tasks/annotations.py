"""Whether a plain value of a YAML file is what an annotation says, and that annotation in words.

Options of tasks come untyped from their configs: checked against the signature of the task's class, a wrong
one is named before it fails somewhere in numpy.
"""

from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text (in quotes if it reads as a number)",
    NoneType: "null",
}


def fits(value: Any, annotation: Any) -> bool:
    """Whether `value` is of the type. true and false are no numbers; a list may stand for a tuple."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is UnionType:
        return any(fits(value, part) for part in parts)
    if kind in (tuple, Sequence):
        if not isinstance(value, list | tuple):
            return False
        if kind is Sequence:
            parts = parts * len(value)
        return len(value) == len(parts) and all(map(fits, value, parts))
    return type(value) is annotation or (annotation is float and type(value) is int)


def in_words(annotation: Any) -> str:
    """What a user may write; classes of Python, which YAML cannot, are left out."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is UnionType:
        return " or ".join(in_words(part) for part in parts if get_origin(part) or part in _WORDS)
    if kind is tuple:
        return f"[{', '.join(map(in_words, parts))}]"
    if kind is Sequence:
        return f"a list of {in_words(parts[0])}"
    return _WORDS[annotation]
