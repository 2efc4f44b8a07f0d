"""Optimizers by name, and which parameters get weight decay."""

import torch
from torch import Tensor, nn

from fla_train.training.config import OptimizerConfig
from fla_train.training.muon import PartitionedMuon


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices with `weight_decay`; vectors, embeddings and marked parameters without.

    A model marks a parameter by the attribute `_no_weight_decay = True`, as flash-linear-attention does. A
    tied output head is the embedding. Empty groups, which ZeRO refuses, are left out.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed, undecayed = [], []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        special = getattr(parameter, "_no_weight_decay", False) or id(parameter) in embeddings
        (undecayed if parameter.ndim < 2 or special else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, one fused kernel per group; as `muon`, Muon for the blocks' matrices and AdamW for the rest."""
    groups = parameter_groups(model, config.weight_decay)
    matrices: list[Tensor] = []
    if config.name == "muon":
        matrices = hidden_matrices(model)
        taken = {id(matrix) for matrix in matrices}
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in taken]
        groups = [group for group in groups if group["params"]]
    adamw = torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )
    if not matrices:
        return adamw
    return PartitionedMuon(
        matrices, adamw, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum
    )


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """What Muon takes: the linear layers between embedding and head, neither of the two included."""
    head = model.get_output_embeddings()
    return [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
