"""Registration with transformers' Auto classes: configs at once, models when a config is read.

Importing transformers' modeling code takes seconds, which commands that need no model should not pay.
"""

from importlib import import_module
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig


class LazyModelConfig(PreTrainedConfig):
    """A config that imports the module of its models when it is read from a checkpoint.

    The module registers the models with the Auto classes, which look for them after reading the config.
    """

    modeling_module: ClassVar[str]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> "LazyModelConfig":
        import_module(cls.modeling_module)
        return super().from_dict(config_dict, **options)


def register(config: type[LazyModelConfig], modeling_module: str) -> None:
    """Make `config` known to `AutoConfig`; `modeling_module` is the full name of its models' module."""
    config.modeling_module = modeling_module
    AutoConfig.register(config.model_type, config, exist_ok=True)
