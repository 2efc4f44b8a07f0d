"""Checkpoints as folders of the Hugging Face format: write, find, load and push them."""

from importlib import import_module
from typing import Any

from fla_train.hub.push import push  # not lazily: its module has the same name

# Modules are imported on first use of a name: most import the models, which takes seconds.
_MODULES = {
    "CardInfo": "card",
    "copy_export": "export",
    "export_model": "export",
    "find_export_damage": "checksums",
    "load_model": "load",
    "resolve_checkpoint": "load",
}
__all__ = ["push", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
