"""What folders and repositories are called."""

import os
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


def own_name(path: str | Path) -> str:
    """The last part of a path, also of `.` and `..`, whose `Path.name` is no name."""
    return os.path.basename(os.path.abspath(path))


def is_hub_name(name: str) -> bool:
    """Whether a repository of the Hub can be called `name`: `user/model`, or `model` alone; no path can."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
