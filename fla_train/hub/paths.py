"""Names of folders and models, as a reader is shown them."""

import os
from pathlib import Path


def own_name(path: str | Path) -> str:
    """The last part of a path, also of `.` and `..`, whose `Path.name` is no name."""
    return os.path.basename(os.path.abspath(path))


def public_name(text: str) -> str:
    """A path of this machine as others may read it: its last part, and of an export in a run the run's name.

    Names of the Hub and all other words stay as they are.
    """
    path = Path(text).expanduser()
    if not text or not (text.startswith(("/", "~", ".")) or text.count("/") > 1 or path.exists()):
        return text
    if path.parent.name == "hf":
        return f"{own_name(path.parent.parent)} {path.name}"  # no slash: it is no name of the Hub
    return own_name(path)
