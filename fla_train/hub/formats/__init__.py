"""Table of the modules that translate checkpoint formats of other libraries.

Each module has

    MODEL_TYPES                   the model types in config.json that it reads
    PACKAGE                       the Python package that registers these types when it is imported
    to_ours(content, state)       their config.json and state dict -> `DeltaProductConfig` and our state dict
    from_ours(config, state)      the inverse

Both functions are pure and accept any subset of a state dict. They raise `ValueError` for settings without a
counterpart.
"""

from types import ModuleType

from fla_train.hub.formats import fla, olmo_hybrid
from fla_train.models.settings import DeltaProductSettings

OURS = "hf"  # folders that transformers loads as `DeltaProductForCausalLM`
# Keys are the values of `fla-export format=`.
FORMATS: dict[str, ModuleType] = {"fla": fla, "olmo_hybrid": olmo_hybrid}


def format_name(model_type: str | None) -> str | None:
    """Return the format of a model type; None if it cannot be translated."""
    if model_type == DeltaProductSettings.model_type:
        return OURS
    return next((name for name, module in FORMATS.items() if model_type in module.MODEL_TYPES), None)
