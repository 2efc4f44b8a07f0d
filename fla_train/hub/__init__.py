"""Checkpoints as folders of the Hugging Face format: write, find, load and push them."""

from fla_train.hub.card import CardInfo
from fla_train.hub.device import pick_device, pick_dtype
from fla_train.hub.export import copy_export, export_model
from fla_train.hub.load import load_model, resolve_checkpoint
from fla_train.hub.push import push

__all__ = [
    "CardInfo",
    "copy_export",
    "export_model",
    "load_model",
    "pick_device",
    "pick_dtype",
    "push",
    "resolve_checkpoint",
]
