"""Translate configs and weights of transformers' `olmo_hybrid` (OLMo Hybrid, arXiv 2604.03444).

Its linear layers are our Gated DeltaNet with an output gate. Its attention layers are ours with RMSNorm on q
and k (`use_qk_norm`) and on outputs (`norm_after`), with or without rotary positions. A table of the
settings is in docs/exports_reference.md.

Weights are written under the names that both transformers and vLLM read. The names in files that transformers
saves, and those of its modules, are also read.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fla_train.hub.formats.errors import refuse
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.settings import expansion
from fla_train.models.zoo.transformers import config_class

PACKAGE = "transformers"
MODEL_TYPES = ("olmo_hybrid",)
SAME_NAME = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "layer_types max_position_embeddings initializer_range use_cache tie_word_embeddings "
    "bos_token_id eos_token_id pad_token_id dtype"
).split()
RENAMED = {  # ours: theirs
    "norm_eps": "rms_norm_eps",
    "num_heads": "linear_num_key_heads",
    "num_v_heads": "linear_num_value_heads",
    "head_dim": "linear_key_head_dim",
    "conv_size": "linear_conv_kernel_dim",
    "allow_neg_eigval": "linear_allow_neg_eigval",
}
IMPLIED = {  # values of our settings that every model of the class has
    "num_householder": 1,
    "use_forget_gate": True,
    "use_output_gate": True,
    "use_short_conv": True,
    "hidden_act": "silu",
    "embedding_multiplier": 1.0,
    "o_norm_eps": 1e-5,
    "use_qk_norm": True,
    "norm_after": "attention",
    "mixer": None,
}
MODULES = {  # modules of a block by its layer type, ours: theirs
    "linear_attention": {
        "attn": "linear_attn",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    "full_attention": {
        "attn": "self_attn",
        "attn_norm": "post_attention_layernorm",
        "mlp_norm": "post_feedforward_layernorm",
    },
}
SAVED = {  # their names in files that transformers' `save_pretrained` writes: names of their modules
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}


def to_ours(
    content: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[DeltaProductConfig, dict[str, Tensor]]:
    """Return our config and state dict of an OLMo Hybrid. Fields for initial weights are ignored.

    Args:
        content: of config.json; absent fields have the class's defaults.
        state: any subset of the state dict.

    Raises:
        ValueError: with each setting that has no counterpart, or settings contradict each other.
    """
    theirs = config_class(MODEL_TYPES[0]).from_dict(dict(content))
    rope = theirs.rope_parameters
    head_dim = theirs.hidden_size // theirs.num_attention_heads
    fixed = {  # settings that we lack: their value and the one that matches our model
        "attention_bias": (theirs.attention_bias, False),
        "attention_dropout": (theirs.attention_dropout, 0.0),
        "hidden_act": (theirs.hidden_act, "silu"),
        "head_dim": (getattr(theirs, "head_dim", head_dim), head_dim),
        "rope_parameters.rope_type": (rope.get("rope_type", "default"), "default"),
    }
    errors = [f"{name}={value!r} (here {same!r})" for name, (value, same) in fixed.items() if value != same]
    refuse(errors, "transformers' olmo_hybrid", "a model of this package")

    fields = {name: getattr(theirs, name) for name in SAME_NAME}
    fields |= {name: getattr(theirs, other) for name, other in RENAMED.items()}
    expand_v = expansion(theirs.linear_value_head_dim, theirs.linear_key_head_dim)
    config = DeltaProductConfig(**IMPLIED, **fields, expand_v=expand_v, rope_theta=rope.get("rope_theta"))

    modules = {layer: {other: name for name, other in names.items()} for layer, names in MODULES.items()}
    for saved, other in SAVED.items():
        state = {name.replace(f".{saved}.", f".{other}."): tensor for name, tensor in state.items()}
    weights = _renamed(state, config.layer_types, modules, ("embed_tokens", "embeddings"))
    for prefix in {name.rpartition(".attn.")[0] for name in weights if name.endswith("conv1d.weight")}:
        # transformers saves equal thirds of the fused convolution, whatever the channels of q, k and v.
        thirds = [weights.pop(f"{prefix}.attn.{x}conv1d.weight", None) for x in ("", "q_", "k_", "v_")]
        fused = torch.cat([third for third in thirds if third is not None])
        keys = config.num_heads * config.head_dim
        qkv = fused.split([keys, keys, config.value_heads * config.head_v_dim])
        weights |= {f"{prefix}.attn.{x}_conv1d.weight": weight for x, weight in zip("qkv", qkv, strict=True)}
    return config, weights


def from_ours(
    config: DeltaProductConfig, state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the state dict with which transformers' OLMo Hybrid runs our model.

    Raises:
        ValueError: with each setting that has no counterpart.
    """
    ours = {name: getattr(config, name) for name in IMPLIED}
    ours["o_norm_eps"] = config.o_norm_eps or config.norm_eps
    unequal = {name: value for name, value in IMPLIED.items() if ours[name] != value}
    errors = [f"{name}={ours[name]!r} (OLMo Hybrid: {value!r})" for name, value in unequal.items()]
    if {*config.layer_types} != MODULES.keys():
        types = ", ".join(sorted({*config.layer_types}))
        errors.append(f"layer_types has {types} (OLMo Hybrid: {' and '.join(MODULES)})")
    refuse(errors, "this model", "transformers' olmo_hybrid")

    fields = {name: getattr(config, name) for name in SAME_NAME}
    fields |= {other: getattr(config, name) for name, other in RENAMED.items()}
    fields |= {"linear_num_value_heads": config.value_heads, "linear_value_head_dim": config.head_v_dim}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}  # None: no rotary positions
    fields |= {"rope_parameters": rope, "architectures": ["OlmoHybridForCausalLM"]}
    theirs = config_class(MODEL_TYPES[0])(**fields)

    return theirs.to_diff_dict(), _renamed(state, config.layer_types, MODULES, ("embeddings", "embed_tokens"))


def _renamed(
    state: Mapping[str, Tensor],
    layer_types: list[str],
    modules: Mapping[str, Mapping[str, str]],
    embedding: tuple[str, str],
) -> dict[str, Tensor]:
    """Rename the embedding, and the modules of each block according to its layer type."""
    renamed = {}
    for name, tensor in state.items():
        parts = name.replace(*(f"model.{word}." for word in embedding)).split(".")
        if name.startswith("model.layers.") and int(parts[2]) < len(layer_types):
            names = modules[layer_types[int(parts[2])]]
            parts[3] = names.get(parts[3], parts[3])
        renamed[".".join(parts)] = tensor
    return renamed
