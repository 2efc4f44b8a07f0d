"""The model of a run at its start: fresh weights, or those of `init_from`."""

import torch
from transformers import PreTrainedModel

from fla_train.data.cache import PreparedData
from fla_train.models import DeltaProductForCausalLM, build_config
from fla_train.models.zoo.build import build_baseline
from fla_train.training.config import TrainConfig
from fla_train.training.model import load_initial_weights


def build_model(config: TrainConfig, data: PreparedData, *, resumed: bool = False) -> PreTrainedModel:
    """The model with the tokenizer's special ids, in fp32; fresh weights depend on `seed` only.

    Args:
        resumed: a checkpoint will fill in the weights, so those of `init_from` are not read.
    """
    if config.baseline is not None:
        torch.manual_seed(config.seed)
        return build_baseline(config.baseline, config.model).float()
    settings = build_config(config.model)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(settings, key) is None:
            setattr(settings, key, data.manifest["tokenizer"][key])
    torch.manual_seed(config.seed)
    model = DeltaProductForCausalLM(settings).float()
    if config.init_from is not None and not resumed:
        load_initial_weights(model, config.init_from)
    if config.trainer.activation_checkpointing:
        model.gradient_checkpointing_enable()
    return model
