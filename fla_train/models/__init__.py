"""The model family, registered with transformers' Auto classes.

Importing this package registers the config only. The models, which take seconds to import, follow when a
config is read from a checkpoint or one of the names below is asked for; what needs no model imports from
`configuration` and `accounting` themselves.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from fla_train.models import configuration

if TYPE_CHECKING:
    from fla_train.models.configuration import DeltaProductConfig, build_config, model_schema
    from fla_train.models.loss import count_targets
    from fla_train.models.modeling import (
        DeltaProductForCausalLM,
        DeltaProductForQuestionAnswering,
        DeltaProductForSequenceClassification,
        DeltaProductForTokenClassification,
        DeltaProductModel,
    )

__all__ = [
    "DeltaProductConfig",
    "DeltaProductForCausalLM",
    "DeltaProductForQuestionAnswering",
    "DeltaProductForSequenceClassification",
    "DeltaProductForTokenClassification",
    "DeltaProductModel",
    "build_config",
    "count_targets",
    "model_schema",
]

AutoConfig.register(
    configuration.DeltaProductConfig.model_type, configuration.DeltaProductConfig, exist_ok=True
)

_MODULES = {
    "configuration": ("DeltaProductConfig", "build_config", "model_schema"),
    "loss": ("count_targets",),
    "modeling": tuple(name for name in __all__ if name.endswith("Model") or "For" in name),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            import_module(f"{__name__}.modeling")  # registers the models
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
