"""A class of the user's own by its import path, `package.module:Class`."""

import os
import sys
from importlib import import_module

from fla_train.utils.errors import described


def import_class(path: str, base: type, base_name: str) -> type:
    """The class that `path` names; its module may lie in the current folder.

    Raises:
        ValueError: there is none, importing its module failed, or it is no subclass of `base`, which the
            line calls `base_name`; one line that begins with the path.
    """
    module, _, name = path.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # last: a queue.py there must not hide the standard library's
    try:
        found = getattr(import_module(module), name, None)
    except Exception as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            raise ValueError(f"{path}: importing {module} raised {described(error)}") from error
        if module.endswith(".py"):
            raise ValueError(f"{path}: write {module.removesuffix('.py')}:{name}, a module") from error
        raise ValueError(
            f"{path}: there is no module {missing}: install its package, start in the folder that holds it, "
            "or add that folder to PYTHONPATH"
        ) from error
    if found is None:
        raise ValueError(f"{path}: {module} has no {name}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path}: {name} is no subclass of {base_name}")
    return found
