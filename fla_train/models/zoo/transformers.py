"""Config classes of transformers' causal language models, by model type."""

from difflib import get_close_matches

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES


def config_class(model_type: str) -> type[transformers.PreTrainedConfig]:
    """Return transformers' config class of a causal language model, even if others registered the same name.

    Raises:
        ValueError: transformers has no causal language model of this type.
    """
    # Import it here: with transformers 5.17 it imports modeling code.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        close = get_close_matches(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, 3)
        hint = f": did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"model.model_type={model_type} is not a causal model of transformers{hint}")
    return getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
