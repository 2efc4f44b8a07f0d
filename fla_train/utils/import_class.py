"""Import custom classes and functions by their path, `package.module:NAME`."""

import os
import sys
from importlib import import_module
from typing import Any

from fla_train.utils.errors import described


def import_class(path: str, base: type, base_name: str) -> type:
    """Return the class that `path` names. Its module may be in the current folder.

    Raises:
        ValueError: as `import_object`, or it is not a subclass of `base`, which the message calls
            `base_name`.
    """
    target = import_object(path)
    if not (isinstance(target, type) and issubclass(target, base)):
        raise ValueError(f"{path}: {path.partition(':')[2]} is not a subclass of {base_name}")
    return target


def import_object(path: str) -> Any:
    """Return the object that `path` names. Its module may be in the current folder.

    Raises:
        ValueError: it does not exist, or importing its module failed; the message begins with the path.
    """
    module, _, name = path.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        # Append the folder, so that a local queue.py does not hide the standard library's.
        sys.path.append(os.getcwd())
    try:
        target = getattr(import_module(module), name, None)
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = ": install its package, start in its folder, or add that folder to PYTHONPATH"
        raise ValueError(f"{path}: importing {module} raised {described(error)}{hint}") from error
    if target is None:
        raise ValueError(f"{path}: {module} has no {name}")
    return target
