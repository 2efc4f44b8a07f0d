"""Translate flash-linear-attention's `delta_net`, `gated_deltanet` and `gated_deltaproduct`, with hybrids.

State dicts have equal names, shapes and row orders, so only configs are translated. Names and defaults of the
fields follow flash-linear-attention 0.6.0. docs/exports_reference.md has a table of them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fla_train.hub.formats.errors import refuse
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.settings import ATTN_KEYS, FIELDS, FREE_FIELDS, expansion

PACKAGE = "fla"
LIBRARY = "flash-linear-attention"


class ModelType(NamedTuple):
    """Class of a model type, defaults of fields other than `COMMON`, and our settings that it implies."""

    architecture: str
    defaults: dict[str, Any]
    implied: dict[str, Any]


COMMON = {  # defaults of the fields that all types have
    "vocab_size": 32000,
    "hidden_size": 2048,
    "allow_neg_eigval": False,
    "use_short_conv": True,
    "conv_size": 4,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
HEADS = {"num_hidden_layers": 21, "num_heads": 6, "head_dim": 256, "expand_v": 2.0}
GATES = {"use_output_gate": True, "use_forget_gate": False}
TYPES = {  # our models become the first type whose implied values match; the last type implies nothing
    "delta_net": ModelType(
        "DeltaNetForCausalLM",
        {"num_hidden_layers": 24, "num_heads": 16, "use_gate": False},
        {"num_householder": 1, "use_forget_gate": False},
    ),
    "gated_deltanet": ModelType(
        "GatedDeltaNetForCausalLM",
        {**HEADS, "num_v_heads": None, "use_gate": True},
        {"num_householder": 1, "use_forget_gate": True},
    ),
    "gated_deltaproduct": ModelType(
        "GatedDeltaProductForCausalLM", {**HEADS, **GATES, "num_householder": 1}, {}
    ),
}
RENAMED = {"use_gate": "use_output_gate"}  # theirs: ours; all other fields have equal names
MODEL_TYPES = tuple(TYPES)
# Their settings that we lack: the values that match our models, and how our models behave
ONLY = {
    "hidden_act": (("swish", "silu"), "the MLP is a SwiGLU"),
    "use_beta": ((True,), "beta is always learned"),
    "qk_norm": (("l2",), "queries and keys are L2-normalised"),
    "qk_activation": (("silu",), "queries and keys pass a SiLU"),
    "output_gate_activation": (("swish", "silu"), "the output gate is a SiLU"),
    "attnres_block_size": ((None,), "residual connections are sums"),
}


def to_ours(
    content: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[DeltaProductConfig, dict[str, Tensor]]:
    """Return our config and state dict of a model of flash-linear-attention.

    Ignored are fields that flash-linear-attention 0.6.0 ignores, fields that choose kernels (`attn_mode`,
    `fuse_*`), and `use_l2warp`, a term of the training loss.

    Args:
        content: of config.json; absent fields have the type's defaults.
        state: any subset of the state dict.

    Raises:
        ValueError: with each setting that has no counterpart, or settings contradict each other.
    """
    model_type = TYPES[content["model_type"]]
    defaults = COMMON | model_type.defaults
    fields = {**defaults, **content}
    errors = [
        f"{name}={fields[name]!r} (here {ours})"
        for name, (values, ours) in ONLY.items()
        if name in fields and fields[name] not in values
    ]
    attention = _attention_to_ours(fields, errors)
    refuse(errors, f"{LIBRARY}'s {content['model_type']}", "a model of this package")

    settings = {RENAMED.get(name, name): fields[name] for name in defaults}
    if "head_dim" not in defaults:
        expansions = (fields.get(name, 1.0) for name in ("expand_k", "expand_v"))
        k, v = (round(fields["hidden_size"] * each) // fields["num_heads"] for each in expansions)
        settings |= {"head_dim": k, "expand_v": expansion(v, k)}
    settings["hidden_ratio"] = settings["hidden_ratio"] or COMMON["hidden_ratio"]
    settings["dtype"] = content.get("dtype", content.get("torch_dtype"))
    config = DeltaProductConfig(**settings, **model_type.implied, **attention)
    # Early versions kept a vector `D` in a Gated DeltaNet layer that no computation used.
    return config, {name: tensor for name, tensor in state.items() if not name.endswith(".attn.D")}


def from_ours(
    config: DeltaProductConfig, state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the state dict with which flash-linear-attention runs our model.

    Raises:
        ValueError: with each setting that has no counterpart.
    """
    name, model_type = next(
        (name, model_type)
        for name, model_type in TYPES.items()
        if all(getattr(config, field) == value for field, value in model_type.implied.items())
    )
    fields = {field: getattr(config, RENAMED.get(field, field)) for field in COMMON | model_type.defaults}
    if "head_dim" in fields:
        fields["expand_v"] = expansion(config.head_v_dim, config.head_dim)
    else:
        sizes = {"expand_k": config.head_dim, "expand_v": config.head_v_dim}
        fields |= {field: expansion(config.num_heads * n, config.hidden_size) for field, n in sizes.items()}

    covered = {RENAMED.get(field, field) for field in fields} | model_type.implied.keys()
    covered |= {*FREE_FIELDS, *ATTN_KEYS.values(), "layer_types", "head_dim", "hidden_act", "mixer_options"}
    errors = [
        f"{name}={value!r} (it has no such setting)"
        for name, field in FIELDS.items()
        if name not in covered and (value := getattr(config, name)) != field.default
    ]
    if config.hidden_act not in ONLY["hidden_act"][0]:
        errors.append(f"hidden_act={config.hidden_act!r} (its MLP is a SwiGLU)")
    if config.attention_layers and config.rope_theta is None:
        errors.append("rope_theta=None (its attention layers have rotary positions)")
    refuse(errors, "this model", f"{LIBRARY}'s {name}")
    content = {
        "model_type": name,
        "architectures": [model_type.architecture],
        **({} if config.dtype is None else {"dtype": str(config.dtype).removeprefix("torch.")}),
        **fields,
        "hidden_act": "swish",
        "attn": _attention_from_ours(config),
    }
    return content, dict(state)


def _attention_to_ours(content: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    """Return our fields of attention layers, empty without any. Append unsupported ones to `errors`."""
    attn = content.get("attn") or []
    specs = [{"rope_theta": 10000.0, **spec} for spec in ([attn] if isinstance(attn, Mapping) else attn)]
    if not specs:
        return {}
    settings, types = {}, dict.fromkeys(range(content["num_hidden_layers"]), "linear_attention")
    for spec in specs:
        errors += [f"attn.{name} is missing" for name in ("layers", "num_heads") if spec.get(name) is None]
        spec["num_kv_heads"] = spec.get("num_kv_heads") or spec.get("num_heads")
        if spec.get("qkv_bias"):
            errors.append("attn.qkv_bias=True (here projections have no bias)")
        attention = "full_attention" if spec.get("window_size") is None else "sliding_attention"
        types |= dict.fromkeys(spec.get("layers", ()), attention)
    for name, ours in ATTN_KEYS.items():
        values = {spec.get(name) for spec in specs} - {None}
        settings[ours] = max(values, default=None)
        if len(values) > 1:
            errors.append(f"attn.{name}={sorted(values)} (here equal in all layers that have it)")
    return settings | {"layer_types": list(types.values())}


def _attention_from_ours(config: DeltaProductConfig) -> dict[str, Any] | list[dict[str, Any]] | None:
    """Return `attn`: a mapping for one type of attention layers, a list for two, None without such layers."""
    shared = {name: getattr(config, ours) for name, ours in ATTN_KEYS.items()} | {"qkv_bias": False}
    specs = []
    for attention, window in (("full_attention", None), ("sliding_attention", config.sliding_window)):
        if layers := [i for i, layer in enumerate(config.layer_types) if layer == attention]:
            specs.append({"layers": layers, **shared, "window_size": window})
    return specs[0] if len(specs) == 1 else specs or None
