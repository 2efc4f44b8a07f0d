"""Write Hydra overrides as text: quote values, and flatten configs to dotted keys."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

PLAIN = re.compile(r"([a-zA-Z_/]|\.\.?/)[a-zA-Z0-9_.:/+-]*")
NOT_TEXT = ("null", "true", "false", "nan", "inf")  # Hydra's grammar reads these as other types


def escape(text: str) -> str:
    """Escape `${` so that OmegaConf reads the original text. Backslashes escape each other."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def quote(text: str) -> str:
    """Quote text for Hydra, which otherwise gives commas, quotes, brackets and `${` a meaning."""
    return QuotedString(escape(text), Quote.single).with_quotes()


def assign(key: str, value: object) -> str:
    """Return the override that sets a key to this value, plain data or a path."""
    return f"{key}={_literal(value)}"


def parse_all(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides; return none if one is invalid, because composing them reports the errors."""
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException:
        return []


def as_data(overrides: Sequence[str]) -> list[str]:
    """Return overrides with their values as plain data, without interpolation.

    Raises:
        ValueError: an override is not KEY=VALUE, but for example a flag, a sweep or a key of `hydra`.
    """
    words = []
    for text in overrides:
        key = text.partition("=")[0]
        try:
            parsed = OverridesParser.create().parse_override(text)
        except HydraException as failure:
            raise ValueError(" ".join(str(failure).split())) from failure
        if parsed.is_sweep_override() or not re.fullmatch(r"\+{0,2}(?!hydra\b)[\w./-]+", key):
            raise ValueError(f"{text} is not an option of the form KEY=VALUE")
        # A number keeps its spelling, because the key's type may be text.
        value = parsed.value()
        words.append(text if isinstance(value, int | float) else assign(key, value))
    return words


def flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every leaf. An empty mapping is a leaf."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def pop_leaves(node: dict[str, Any], chosen: Callable[[str, Any], Any], prefix: str = "") -> dict[str, Any]:
    """Remove the leaves for which `chosen(dotted key, value)` from nested dicts, and return them by key."""
    taken = {}
    for name, value in list(node.items()):
        if isinstance(value, dict) and value:
            taken |= pop_leaves(value, chosen, f"{prefix}{name}.")
            if not value:
                del node[name]
        elif chosen(prefix + name, value):
            taken[prefix + name] = node.pop(name)
    return taken


def plain(value: object) -> str:
    """Return a value as a user writes it on the command line: null, true, 3, text."""
    return value if isinstance(value, str) else json.dumps(value)


def _literal(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_literal(child)}' for key, child in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, str | Path):
        text = str(value)
        return text if PLAIN.fullmatch(text) and text.lower() not in NOT_TEXT else quote(text)
    return "null" if value is None else str(value).lower()
