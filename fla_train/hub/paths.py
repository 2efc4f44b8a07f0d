"""Short names of folders and models, without the paths of this machine; the run that an export lies in."""

import os
import re
from pathlib import Path

STEP = re.compile(r"step-(\d+)")


def own_name(path: str | Path) -> str:
    """The last part of a path, also for `.` and `..`, whose `Path.name` is empty or `..`."""
    return os.path.basename(os.path.abspath(path))


def public_name(text: str) -> str:
    """A path reduced to its last part, with the run's name for an export in a run folder.

    Names of the Hub and all other words stay as they are.
    """
    path = Path(text).expanduser()
    if not text or not (text.startswith(("/", "~", ".")) or text.count("/") > 1 or path.exists()):
        return text
    if path.parent.name == "hf":
        return f"{own_name(path.parent.parent)} {path.name}"  # no slash: it is no name of the Hub
    return own_name(path)


def run_folder(checkpoint: Path | str) -> Path | None:
    """The run folder that a resolved checkpoint lies in (`<run>/hf/step-*`), or None."""
    path = Path(os.path.abspath(checkpoint))  # resolves `..`, but no links
    inside = path.is_dir() and STEP.fullmatch(path.name) and path.parent.name == "hf"
    return path.parent.parent if inside else None
