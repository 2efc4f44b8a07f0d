"""The model family. Importing this package registers it with transformers' Auto classes, and does nothing
else."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fla_train.models.cache import DeltaProductCache
from fla_train.models.configuration import DeltaProductConfig, build_config, model_schema
from fla_train.models.loss import count_targets
from fla_train.models.modeling import DeltaProductForCausalLM, DeltaProductModel

__all__ = [
    "DeltaProductCache",
    "DeltaProductConfig",
    "DeltaProductForCausalLM",
    "DeltaProductModel",
    "build_config",
    "count_targets",
    "model_schema",
]

AutoConfig.register(DeltaProductConfig.model_type, DeltaProductConfig, exist_ok=True)
AutoModel.register(DeltaProductConfig, DeltaProductModel, exist_ok=True)
AutoModelForCausalLM.register(DeltaProductConfig, DeltaProductForCausalLM, exist_ok=True)
