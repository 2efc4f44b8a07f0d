"""Import custom classes and functions by their path, `package.module:NAME`."""

import os
import sys
from collections.abc import Mapping
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
            hint = (
                ": install its package, start in the folder that holds it, or add that folder to PYTHONPATH"
            )
        raise ValueError(f"{path}: importing {module} raised {described(error)}{hint}") from error
    if target is None:
        raise ValueError(f"{path}: {module} has no {name}")
    return target


def named_classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a training config, as plain data, that name classes outside this package."""
    keys = ("model.mixer", "trainer.callbacks", "task.kind", "optimizer.name", "schedule.name")
    values = {}
    for key in keys:
        section, _, name = key.partition(".")
        values[key] = (config.get(section) or {}).get(name)
    # Without a colon the last three name classes of this package.
    return {key: value for key, value in values.items() if value and (key in keys[:2] or ":" in value)}
