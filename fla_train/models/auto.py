"""Registration with transformers' Auto classes: configs at once, models when a config is read or made.

Importing transformers' modeling code takes seconds, which commands that need no model should not pay.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LazyModelConfig(PreTrainedConfig):
    """A config that imports the module of its models when it is read, or made where Auto classes are in use.

    The module registers the models with the Auto classes, which look for them after reading the config. In
    the Python files of an export nothing is registered: transformers finds the classes by `auto_map`.
    """

    modeling_module: ClassVar[str | None] = None  # its full name, once the config is registered

    def __post_init__(self, **options: Any) -> None:
        super().__post_init__(**options)
        # `AutoModel.from_config` looks for the model's class, which this import registers.
        if self.modeling_module is not None and "transformers.models.auto.modeling_auto" in sys.modules:
            import_module(self.modeling_module)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> "LazyModelConfig":
        if cls.modeling_module is not None:
            import_module(cls.modeling_module)
            # `auto_map` names Python files beside the config, which `save_pretrained` would not copy.
            config_dict = {key: value for key, value in config_dict.items() if key != "auto_map"}
        return super().from_dict(config_dict, **options)


def register(config: type[LazyModelConfig], modeling_module: str) -> None:
    """Make `config` known to `AutoConfig`; `modeling_module` is the full name of its models' module."""
    config.modeling_module = modeling_module
    config.auto_map = {}  # TRL reads it of every model whose class is not one of transformers' own
    AutoConfig.register(config.model_type, config, exist_ok=True)


def register_models(config: type[LazyModelConfig], models: Mapping[type, type["PreTrainedModel"]]) -> None:
    """Make models known to their Auto classes, if `config` is registered, to Trainer and to the server."""
    # Here, because the import takes seconds.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM

    # Trainer shifts the labels that it smooths for the classes of this table only.
    if language_model := models.get(AutoModelForCausalLM):
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = language_model.__name__
    if config.modeling_module is not None:
        for auto_class, model_class in models.items():
            auto_class.register(config, model_class, exist_ok=True)
    # The server looks for the class that config.json names in its `transformers`, also with remote code.
    if server := sys.modules.get("transformers.cli.serving.model_manager"):
        for model_class in models.values():
            setattr(server.transformers, model_class.__name__, model_class)
