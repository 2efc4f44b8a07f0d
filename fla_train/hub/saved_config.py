"""Read the config.yaml of a run, which may be someone else's: `${...}` in it is not interpolated."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def read_saved(path: Path) -> dict[str, Any]:
    """The content of a `config.yaml` for `OmegaConf.merge`, in which `${oc.env:SECRET}` stays text.

    Raises:
        OSError, yaml.YAMLError, omegaconf.errors.OmegaConfBaseException: it can't be read.
    """
    return escaped(OmegaConf.to_container(OmegaConf.load(path)))


def kept_tokenizer(name: str, run: Path) -> str:
    """`name` of a run's tokenizer, or the copy kept with the prepared data if that path has gone."""
    plan = run / "plan.json"
    if os.path.isabs(name) and not os.path.exists(name) and plan.is_file():
        try:
            kept = Path(json.loads(plan.read_text())["data_folder"]) / "tokenizer"
        except (ValueError, KeyError, TypeError):
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


def assign(key: str, path: Path) -> str:
    """The override that gives a key this path, quoted for our commands where the path needs it."""
    text = str(path)
    return f"{key}={text if re.fullmatch(r'[a-zA-Z0-9_./=+-]+', text) else quote(text)}"


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
