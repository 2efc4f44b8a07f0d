"""Language models of this package, registered with transformers' Auto classes.

`configuration`, `modeling`, `layers`, `mixers`, `cache`, `context` and `loss` are the DeltaProduct family;
`flops` counts its parameters, FLOPs and bytes; `zoo` has other architectures. Importing this package
registers the configs only. `modeling`, which takes seconds to import, follows when a config is read from a
checkpoint or a model class is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fla_train.models.auto import register
from fla_train.models.configuration import DeltaProductConfig, build_config, model_schema
from fla_train.models.zoo.mamba_configuration import SignedMambaConfig

if TYPE_CHECKING:
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
    "model_schema",
]

register(DeltaProductConfig, f"{__name__}.modeling")
register(SignedMambaConfig, f"{__name__}.zoo.mamba")


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.modeling"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
