"""Read the config.yaml of a run, which may be someone else's: `${...}` in it is not interpolated."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fla_train.utils.safe_files import read_json, read_yaml

NOT_TEXT = ("null", "true", "false", "nan", "inf")  # of Hydra's grammar


def read_saved(path: Path) -> dict[str, Any]:
    """The content of a `config.yaml` for `OmegaConf.merge`, in which `${oc.env:SECRET}` stays text.

    Raises:
        OSError, ValueError: it can't be read.
    """
    return escaped(read_yaml(path))


def kept_tokenizer(name: str, run: Path) -> str:
    """`name` of a run's tokenizer, or the copy kept with the prepared data if that path has gone."""
    plan = run / "plan.json"
    if os.path.isabs(name) and not os.path.exists(name) and plan.is_file():
        try:
            kept = Path(read_json(plan)["data_folder"]) / "tokenizer"
        except (OSError, ValueError, KeyError, TypeError):
            return name
        return str(kept) if kept.is_dir() else name
    return name


def escape(text: str) -> str:
    """`text` as OmegaConf gives it back: backslashes before `${` escape it, and each other."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def quote(text: str) -> str:
    """`text` as Hydra reads it back; it gives commas, quotes and `${` a meaning."""
    text = re.sub(r"(\\*)'", r"\1\1\'", escape(text))  # Hydra: backslashes escape quotes, too
    trailing = len(text) - len(text.rstrip("\\"))
    return f"'{text}" + "\\" * trailing + "'"


def assign(key: str, value: object) -> str:
    """Return the override that gives a key this value: plain data, or a path."""
    return f"{key}={_literal(value)}"


def _literal(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_literal(child)}' for key, child in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, str | Path):  # without quotes where Hydra reads the same text
        text = str(value)
        plain_text = re.fullmatch(r"([a-zA-Z_/]|\.\.?/)[a-zA-Z0-9_.:/+-]*", text)
        return text if plain_text and text.lower() not in NOT_TEXT else quote(text)
    return "null" if value is None else str(value).lower()


def as_values(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command with their values as plain data, which is not interpolated.

    Raises:
        ValueError: one is not KEY=VALUE: a flag, say, a sweep or a key of Hydra's own.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    found = []
    for text in overrides:
        key = text.partition("=")[0]
        try:
            parsed = OverridesParser.create().parse_override(text)
        except HydraException as failure:
            raise ValueError(" ".join(str(failure).split())) from failure
        if parsed.is_sweep_override() or not re.fullmatch(r"\+{0,2}(?!hydra\b)[\w./-]+", key):
            raise ValueError(f"{text} is not an option of the form KEY=VALUE")
        value = parsed.value()  # a number stays as it is written: it may be of a key whose type is text
        found.append(text if isinstance(value, int | float) else assign(key, value))
    return found


def escaped(node: Any) -> Any:
    """`node`, of plain dicts and lists, with each text in it escaped."""
    return map_text(escape, node)


def flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; an empty mapping is one, too."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def plain(value: object) -> str:
    """A value as one writes it on the command line: null, true, 3, text."""
    return value if isinstance(value, str) else json.dumps(value)


def map_text(change: Callable[[str], str], node: Any) -> Any:
    """`node`, of plain dicts and lists, with each text in it changed."""
    if isinstance(node, dict):
        return {key: map_text(change, value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [map_text(change, value) for value in node]
    return change(node) if isinstance(node, str) else node
