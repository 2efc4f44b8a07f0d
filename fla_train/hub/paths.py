"""Short names of folders and models without local paths, a run's folder, and whether a tokenizer is there."""

import os
import re
from pathlib import Path

STEP = re.compile(r"step-(\d+)")


def has_tokenizer(source: Path | str) -> bool:
    """Return whether a folder has a tokenizer: exports of task models have none. A Hub name counts as yes."""
    return isinstance(source, str) or any(source.glob("tokenizer*"))


def last_component(path: str | Path) -> str:
    """Return the last component of a path, also for `.` and `..`."""
    return os.path.basename(os.path.abspath(path))


def public_name(text: str) -> str:
    """Shorten a path to its last component, with the run's name for an export in a run folder.

    Names on the Hub and all other text stay unchanged.
    """
    path = Path(text).expanduser()
    if not text or not (text.startswith(("/", "~", ".")) or text.count("/") > 1 or path.exists()):
        return text
    if path.parent.name == "hf":
        return f"{last_component(path.parent.parent)} {path.name}"  # a slash would make it a name on the Hub
    return last_component(path)


def run_folder(checkpoint: Path | str) -> Path | None:
    """Return the run folder of a resolved checkpoint `<run>/hf/step-*`, or None."""
    path = Path(os.path.abspath(checkpoint))  # resolves `..`, but not links
    inside = path.is_dir() and STEP.fullmatch(path.name) and path.parent.name == "hf"
    return path.parent.parent if inside else None
