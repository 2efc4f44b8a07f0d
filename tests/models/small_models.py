"""Configurations of the small models of this folder's tests, their states and caches."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fla_train.models.carried_states import CONV, RECURRENT, CarriedStates, StateKey
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM

HYBRID = {"num_attention_heads": 4, "num_key_value_heads": 2}
OLMO = {
    "num_householder": 1, "num_v_heads": 4, "expand_v": 1.5, "use_output_gate": True, "o_norm_eps": 1e-5,
    "rope_theta": None, "use_qk_norm": True, "norm_after": "attention",
}  # fmt: skip
VARIANTS = {
    "delta_net": {"num_householder": 1, "use_forget_gate": False, "allow_neg_eigval": False},
    "gated_delta_product": {"use_output_gate": True, "expand_v": 2.0},
    "without_conv": {"num_householder": 3, "use_short_conv": False, "use_forget_gate": False},
    "norm_after": {"norm_after": "all"},
    "hybrid": HYBRID | {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 5},
    "wide_window": HYBRID | {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 64},
    "transformer": HYBRID | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "hybrid_full_attention": HYBRID | {"layer_types": ["linear_attention", "full_attention"]},
    "olmo_hybrid": HYBRID | {"layer_types": ["linear_attention", "full_attention"]} | OLMO,
}
every_variant = pytest.mark.parametrize(
    "variant", ["gated_delta_product", "without_conv", "norm_after", "hybrid", "transformer", "olmo_hybrid"]
)


def small_config(variant: str = "gated_delta_product", **overrides) -> DeltaProductConfig:
    fields = {
        "vocab_size": 31,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "head_dim": 8,
        "num_householder": 2,
        "use_forget_gate": True,
        "intermediate_size": 24,
        "initializer_range": 0.3,
        "backend": "recurrent",
    }
    return DeltaProductConfig(**(fields | VARIANTS[variant] | overrides))


def zero_states(model: DeltaProductForCausalLM, rows: int) -> dict[StateKey, Tensor]:
    """Make zero initial states of all linear layers, in the shapes of a cache."""
    cache = model(torch.ones(rows, 1, dtype=torch.long), use_cache=True).past_key_values
    return {
        StateKey(kind, number, index): torch.zeros_like(state)
        for number, layer in enumerate(cache.layers)
        for kind in (RECURRENT, CONV)
        for index, state in getattr(layer, f"{kind}_states", {}).items()
        if state is not None
    }


def carried_passes(model: DeltaProductForCausalLM, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits of training passes over `parts`, whose states are carried from one to the next."""
    logits, start = [], zero_states(model, len(parts[0]))
    for part in parts:
        end = {key: torch.full_like(state, torch.nan) for key, state in start.items()}
        logits.append(model(part, states=CarriedStates(start, end, model.config.num_hidden_layers)).logits)
        start = end
    return logits
