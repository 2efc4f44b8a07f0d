"""Language models of this package, registered with transformers' Auto classes.

`configuration`, `modeling`, `layers`, `mixers`, `cache`, `context` and `loss` are the DeltaProduct family;
`flops` counts its parameters, FLOPs and bytes; `zoo` has other architectures. Importing this package
registers the configs only. The models, which take seconds to import, follow when a config is read from a
checkpoint or one of the names below is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fla_train.models.auto import register
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.zoo.mamba_configuration import SignedMambaConfig

if TYPE_CHECKING:
    from fla_train.models.configuration import build_config, model_schema
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

register(DeltaProductConfig, f"{__name__}.modeling")
register(SignedMambaConfig, f"{__name__}.zoo.mamba")

_MODULES = {
    "configuration": ("build_config", "model_schema"),
    "loss": ("count_targets",),
    "modeling": tuple(name for name in __all__ if name.endswith("Model") or "For" in name),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            import_module(f"{__name__}.modeling")  # registers the models
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
