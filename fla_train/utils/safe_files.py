"""Read JSON and YAML files that may come from someone else.

- The result is plain data: mappings, lists, text and numbers. The root is a mapping.
- Size and depth are bounded, and YAML has no anchors, with which a few bytes stand for gigabytes.
- Any error in the content raises one `ValueError` that names the file.
"""

import errno
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fla_train.utils.keys import fits

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


def find_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file; None if it is missing or damaged."""
    try:
        return read_json(path)
    except (FileNotFoundError, ValueError):
        return None


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file. Raise the errors of `read_json`."""
    return parse_yaml(_read(path, LARGEST_YAML), path)


def parse_yaml(content: str | bytes, name: object) -> dict[str, Any]:
    """Return the content of a YAML text, which errors call `name`. Raise the errors of `read_json`."""
    return _parse(_load_yaml, content, LARGEST_YAML, name)


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


def _read(path: Path, most: int) -> bytes:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        return file.read(most + 1)


def _parse(parse: Callable[[str], Any], content: str | bytes, most: int, name: object) -> dict[str, Any]:
    try:
        if len(content) > most:
            raise ValueError(f"more than {most:,} bytes")
        mapping = parse(content if isinstance(content, str) else content.decode())
        if not isinstance(mapping, dict):
            raise ValueError(f"it holds {type(mapping).__name__} instead of a mapping")
        _check_depth(mapping, DEEPEST)
    except RecursionError:
        raise ValueError(f"{name} is damaged: it is nested too deeply") from None
    except (ValueError, TypeError) as failure:
        raise ValueError(f"{name} is damaged: {' '.join(str(failure).split())}") from failure
    return mapping


_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """Load YAML as Hydra reads it: no duplicate keys, `1e-3` is a number, a date is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise ValueError(f"line {node.start_mark.line + 1} begins a mapping that has a key twice")
        return mapping


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _load_yaml(text: str) -> Any:
    """Return the content of a YAML text of at most DEEPEST levels.

    Raises:
        ValueError: it is invalid YAML, or uses an anchor or an alias.
        RecursionError: it is nested too deeply.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_SafeLoader):
            if getattr(event, "anchor", None) is not None:  # also true for an alias
                raise ValueError("it uses a YAML anchor or alias: write the values out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:  # stop here, because the loader is recursive
                raise RecursionError
        return _Loader(text).get_single_data()
    except yaml.YAMLError as failure:
        raise ValueError(str(failure)) from failure


def _check_depth(node: Any, left: int) -> None:
    if isinstance(node, dict | list):
        if left == 0:
            raise RecursionError
        for child in node.values() if isinstance(node, dict) else node:
            _check_depth(child, left - 1)
