"""AdamW and what it decays."""

import torch
from torch import nn

from fla_train.training.schema import OptimizerConfig

# Decay pulls these toward a value that means something else than "small": the decay rate of the state itself.
UNDECAYED_NAMES = ("A_log", "dt_bias")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices with `weight_decay`, and the rest (vectors, A_log, dt_bias, embeddings) without.

    A tied output head is the embedding. Empty groups, which ZeRO refuses, are left out.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed, undecayed = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        special = name.rsplit(".", 1)[-1] in UNDECAYED_NAMES or id(parameter) in embeddings
        (undecayed if parameter.ndim < 2 or special else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over `parameter_groups`; one fused kernel where the parameters are on a GPU."""
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=on_gpu,
    )
