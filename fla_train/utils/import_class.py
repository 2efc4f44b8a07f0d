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
    found = import_object(path)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path}: {path.partition(':')[2]} is not a subclass of {base_name}")
    return found


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
    return found


def named_classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a training config, as plain data, that name classes outside this package."""
    keys = {
        "model.mixer": (config.get("model") or {}).get("mixer"),
        **{
            f"{section}.{key}": path
            for section, key in (("task", "kind"), ("optimizer", "name"), ("schedule", "name"))
            if ":" in (path := (config.get(section) or {}).get(key) or "")
        },
        "trainer.callbacks": (config.get("trainer") or {}).get("callbacks"),
    }
    return {key: value for key, value in keys.items() if value}
