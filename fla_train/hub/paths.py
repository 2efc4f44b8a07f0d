"""What a folder is called."""

import os
from pathlib import Path


def own_name(path: str | Path) -> str:
    """The last part of a path, also of `.` and `..`, whose `Path.name` is no name."""
    return os.path.basename(os.path.abspath(path))
