"""The model of a run, fresh."""

import torch
from transformers import PreTrainedModel

from fla_train.baselines import build_baseline
from fla_train.data import PreparedData
from fla_train.models import DeltaProductForCausalLM, build_config
from fla_train.training.schema import TrainConfig


def build_model(config: TrainConfig, data: PreparedData) -> PreTrainedModel:
    """The model with the tokenizer's special ids; its fresh fp32 weights depend on `seed` only."""
    if config.baseline is not None:
        torch.manual_seed(config.seed)
        return build_baseline(config.baseline, config.model).float()
    settings = build_config(config.model)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(settings, key) is None:
            setattr(settings, key, data.manifest["tokenizer"][key])
    torch.manual_seed(config.seed)
    model = DeltaProductForCausalLM(settings).float()
    if config.trainer.activation_checkpointing:
        model.gradient_checkpointing_enable()
    return model
