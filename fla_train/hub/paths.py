"""What a folder or a model is called outside this machine."""

import os
from pathlib import Path


def own_name(path: str | Path) -> str:
    """The last part of a path, also of `.` and `..`, whose `Path.name` is no name."""
    return os.path.basename(os.path.abspath(path))


def public_name(source: str) -> str:
    """A Hub name as it is; of a folder its last part, and of an export in a run the run's name as well."""
    path = Path(source).expanduser()
    if not path.is_absolute() and not source.startswith((".", "~")) and not path.exists():
        return source
    if path.parent.name == "hf":
        return f"{own_name(path.parent.parent)}/{path.name}"
    return own_name(path)
