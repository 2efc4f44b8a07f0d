"""Read the config.yaml of a run, which may be a stranger's: `${...}` in it is not interpolated."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fla_train.utils.overrides import escape
from fla_train.utils.safe_files import find_json, read_yaml


def read_saved(path: Path) -> dict[str, Any]:
    """Return the content of a `config.yaml` for `OmegaConf.merge`. `${oc.env:SECRET}` in it stays text.

    Raises:
        OSError, ValueError: the file is unreadable.
    """
    return escaped(read_yaml(path))


def kept_tokenizer(name: str, run: Path) -> str:
    """Return the name of a run's tokenizer; the copy with the prepared data if its path no longer exists."""
    if not os.path.isabs(name) or os.path.exists(name):
        return name
    plan = find_json(run / "plan.json") or {}
    kept = Path(str(plan.get("data_folder")), "tokenizer")
    return str(kept) if kept.is_dir() else name


def escaped(node: Any) -> Any:
    """Return plain dicts and lists with each text in them escaped for OmegaConf."""
    return map_text(escape, node)


def map_text(change: Callable[[str], str], node: Any) -> Any:
    """Return plain dicts and lists with each text in them changed."""
    if isinstance(node, dict):
        return {key: map_text(change, value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [map_text(change, value) for value in node]
    return change(node) if isinstance(node, str) else node
