"""Read JSON and YAML files that may come from someone else.

- The result is plain data: mappings, lists, text and numbers. The root is a mapping.
- Size and depth are bounded, and YAML has no anchors, with which a few bytes stand for gigabytes.
- Any error in the content raises one `ValueError` that names the file.
"""

import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
DEEPEST = 64  # levels of nested mappings and lists
LARGEST_JSON = 1 << 26  # bytes
LARGEST_YAML = 1 << 20  # bytes


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file.

    Raises:
        ValueError: it is invalid JSON, too large, not a mapping, or nested too deeply.
        OSError: it can't be read, or opening it would wait (a named pipe).
    """
    return _parse(json.loads, _read(path, LARGEST_JSON), LARGEST_JSON, path)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file. Raise the errors of `read_json`."""
    return parse_yaml(_read(path, LARGEST_YAML), path)


def parse_yaml(content: str | bytes, name: object) -> dict[str, Any]:
    """Return the content of a YAML text, which errors call `name`. Raise the errors of `read_json`."""
    return _parse(_load_yaml, content, LARGEST_YAML, name)


def read_dataclass(kind: type[T], path: Path) -> T:
    """Return a JSON file as a dataclass. Raise the errors of `read_json` and `check_fields`."""
    content = read_json(path)
    check_fields(content, get_type_hints(kind), path)
    return kind(**content)


def check_fields(content: dict[str, Any], types: Mapping[str, Any], name: object) -> None:
    """Check that a mapping has only the fields of `types`, with values of these types.

    Args:
        types: field -> its type, composed of dict, list, unions and JSON's types.
        name: name of the mapping in errors.

    Raises:
        ValueError: it names the first field that does not fit.
    """
    for key, value in content.items():
        if key not in types:
            raise ValueError(f"{name} is damaged or of another version: it has {key!r:.40}")
        if not fits(value, types[key]):
            raise ValueError(f"{name} is damaged: {key} is {value!r:.40}")


def fits(value: Any, annotation: Any) -> bool:
    """Return whether a value of JSON or YAML is of a type. Booleans are not numbers; lists may be tuples."""
    origin, types = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, UnionType):
        return any(fits(value, each) for each in types)
    if origin is tuple:
        return isinstance(value, list | tuple) and len(value) == len(types) and all(map(fits, value, types))
    if types:  # list[VALUE], Sequence[VALUE] or dict[str, VALUE]
        children = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(fits(child, types[-1]) for child in children)
    return annotation is Any or type(value) is annotation or (annotation is float and type(value) is int)


def _read(path: Path, most: int) -> bytes:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        return file.read(most + 1)


def _parse(parse: Callable[[str], Any], content: str | bytes, most: int, name: object) -> dict[str, Any]:
    try:
        if len(content) > most:
            raise ValueError(f"more than {most:,} bytes")
        found = parse(content if isinstance(content, str) else content.decode())
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__} instead of a mapping")
        _check_depth(found, DEEPEST)
    except RecursionError:
        raise ValueError(f"{name} is damaged: it is nested too deeply") from None
    except (ValueError, TypeError) as failure:
        raise ValueError(f"{name} is damaged: {' '.join(str(failure).split())}") from failure
    return found


def _load_yaml(text: str) -> Any:
    from fla_train.utils.safe_yaml import load_yaml  # slows the start down

    return load_yaml(text, DEEPEST)


def _check_depth(node: Any, left: int) -> None:
    if isinstance(node, dict | list):
        if left == 0:
            raise RecursionError
        for child in node.values() if isinstance(node, dict) else node:
            _check_depth(child, left - 1)
