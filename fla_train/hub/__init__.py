"""Checkpoints as folders of the Hugging Face format: write, find, load and push them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fla_train.hub.push import push  # not lazily: its module has the same name

if TYPE_CHECKING:
    from fla_train.hub.card import CardInfo
    from fla_train.hub.checksums import find_export_damage
    from fla_train.hub.export import copy_export, export_model
    from fla_train.hub.load import load_model, resolve_checkpoint

__all__ = [
    "CardInfo",
    "copy_export",
    "export_model",
    "find_export_damage",
    "load_model",
    "push",
    "resolve_checkpoint",
]

# Modules are imported on first use of a name: most import the models, which takes seconds.
_MODULES = {
    "card": ("CardInfo",),
    "checksums": ("find_export_damage",),
    "export": ("copy_export", "export_model"),
    "load": ("load_model", "resolve_checkpoint"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
