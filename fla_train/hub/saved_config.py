"""Read the config that a run wrote, perhaps someone else's: nothing in it is interpolated."""

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def read_saved(path: Path) -> dict[str, Any]:
    """The content of a `config.yaml`, for `OmegaConf.merge`: `${oc.env:SECRET}` in it is text and stays text.

    Raises:
        OSError, yaml.YAMLError, omegaconf.errors.OmegaConfBaseException: it can't be read.
    """
    return escaped(OmegaConf.to_container(OmegaConf.load(path)))


def escape(text: str) -> str:
    """`text` as OmegaConf gives it back: backslashes before `${` escape it, and each other."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def escaped(node: Any) -> Any:
    """`node`, of plain dicts and lists, with each text in it escaped."""
    if isinstance(node, dict):
        return {key: escaped(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [escaped(value) for value in node]
    return escape(node) if isinstance(node, str) else node
