"""Config classes of the optional package flash-linear-attention, whose kernels need a GPU."""

import inspect
from importlib import import_module
from types import ModuleType

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from fla_train.utils.errors import described

PACKAGE = "flash-linear-attention"


def config_class(model_type: str) -> type[PreTrainedConfig]:
    """Return the config class of a model of flash-linear-attention.

    Raises:
        ValueError: the package is missing, can't be imported, or has no such model.
    """
    if model_type in CONFIG_MAPPING_NAMES:  # an export would load as the class in transformers
        raise ValueError(f"model.model_type={model_type} is a model of transformers: use model=hf/any")
    classes = (value for _, value in inspect.getmembers(import_models(), inspect.isclass))
    configs = {c.model_type: c for c in classes if issubclass(c, PreTrainedConfig)}
    if model_type not in configs:
        known = ", ".join(sorted(configs.keys() - CONFIG_MAPPING_NAMES.keys()))
        raise ValueError(f"model.model_type={model_type} is not in the installed {PACKAGE}: it has {known}")
    return configs[model_type]


def import_models() -> ModuleType:
    """Import `fla.models`, which registers its classes with transformers' Auto classes.

    Raises:
        ValueError: it can't be imported.
    """
    try:
        return import_module("fla.models")
    except Exception as failure:  # any error, with an unsupported torch or triton
        if isinstance(failure, ModuleNotFoundError) and failure.name == "fla":
            raise ValueError(f"this model needs the package {PACKAGE}: pip install {PACKAGE}") from None
        raise ValueError(f"{PACKAGE} can't be imported ({described(failure)})") from failure
