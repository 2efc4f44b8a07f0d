"""Checkpoint formats of other libraries: the table of modules that translate them to ours and back.

Each module has

    MODEL_TYPES                   the model types of config.json that it reads
    PACKAGE                       the Python package whose import registers these types
    to_ours(content, state)       from their config.json and state dict to a `DeltaProductConfig` and ours
    from_ours(config, state)      the way back

Both functions are pure and work on a part of a state dict, also on an empty one. They raise `FormatError` for
settings without a counterpart.
"""

from types import ModuleType

from fla_train.hub.formats import fla, olmo_hybrid
from fla_train.models.configuration import DeltaProductConfig

OURS = "hf"  # the name of our format: folders that transformers loads as `DeltaProductForCausalLM`
FORMATS: dict[str, ModuleType] = {
    "fla": fla,
    "olmo_hybrid": olmo_hybrid,
}  # by the name that `fla-export format=` takes


def format_name(model_type: str | None) -> str | None:
    """The name of the format whose model type this is; None: of no model that can be translated."""
    if model_type == DeltaProductConfig.model_type:
        return OURS
    return next((name for name, module in FORMATS.items() if model_type in module.MODEL_TYPES), None)
