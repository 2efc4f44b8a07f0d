"""flash-linear-attention's format: `delta_net`, `gated_deltanet`, `gated_deltaproduct`, hybrids included.

State dicts have equal names, shapes and row orders, so only configs are translated. Names and defaults of the
fields are those of flash-linear-attention 0.6.0. docs/exports.md has them as a table.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fla_train.hub.formats.errors import refuse
from fla_train.models.configuration import MACHINE_KEYS, DeltaProductConfig, config_fields, expansion

PACKAGE = "fla"
LIBRARY = "flash-linear-attention"


class ModelType(NamedTuple):
    """A model type of flash-linear-attention.

    Attributes:
        architecture: the class of its language model.
        fields: its fields as (our name, default), beside `SAME_NAME`.
        implied: our settings that the type stands for.
    """

    architecture: str
    fields: dict[str, tuple[str, Any]]
    implied: dict[str, Any]


SAME_NAME = {  # fields of all types that are called as ours, with their defaults
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
HEADS = {"num_heads": ("num_heads", 6), "head_dim": ("head_dim", 256), "expand_v": ("expand_v", 2.0)}
DEPTH = {"num_hidden_layers": ("num_hidden_layers", 21)}
TYPES = {  # the last one can express any of our models, so the first that fits is taken
    "delta_net": ModelType(
        "DeltaNetForCausalLM",
        {
            "num_hidden_layers": ("num_hidden_layers", 24),
            "num_heads": ("num_heads", 16),
            "use_gate": ("use_output_gate", False),
        },
        {"num_householder": 1, "use_forget_gate": False},
    ),
    "gated_deltanet": ModelType(
        "GatedDeltaNetForCausalLM",
        {
            **DEPTH,
            **HEADS,
            "num_v_heads": ("num_v_heads", None),
            "use_gate": ("use_output_gate", True),
        },
        {"num_householder": 1, "use_forget_gate": True},
    ),
    "gated_deltaproduct": ModelType(
        "GatedDeltaProductForCausalLM",
        {
            **DEPTH,
            **HEADS,
            "use_output_gate": ("use_output_gate", True),
            "use_forget_gate": ("use_forget_gate", False),
            "num_householder": ("num_householder", 1),
        },
        {},
    ),
}
MODEL_TYPES = tuple(TYPES)
# Their settings that we lack: the values that make no difference, and what ours does
ONLY = {
    "hidden_act": (("swish", "silu"), "the MLP is a SwiGLU"),
    "use_beta": ((True,), "beta is always learned"),
    "qk_norm": (("l2",), "queries and keys are L2-normalised"),
    "qk_activation": (("silu",), "queries and keys pass a SiLU"),
    "output_gate_activation": (("swish", "silu"), "the output gate is a SiLU"),
    "attnres_block_size": ((None,), "residual connections are sums"),
}
ATTENTION = ("layer_types", "num_attention_heads", "num_key_value_heads", "sliding_window", "rope_theta")
SHARED_BY_ATTENTION = {"num_heads": None, "num_kv_heads": None, "rope_theta": 10000.0}


def to_ours(
    content: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[DeltaProductConfig, dict[str, Tensor]]:
    """Our config and state dict of a model of flash-linear-attention.

    A field that flash-linear-attention 0.6.0 does not know is ignored, as it does; so are fields that choose
    kernels (`attn_mode`, `fuse_*`), and `use_l2warp`, a term of the training loss.

    Args:
        content: of config.json; absent fields have the type's defaults.
        state: any part of the state dict.

    Raises:
        FormatError: naming each setting without a counterpart.
        ValueError: settings that do not fit together.
    """
    model_type = TYPES[content["model_type"]]
    defaults = SAME_NAME | {name: default for name, (_, default) in model_type.fields.items()}
    given = {**defaults, **content}
    errors = [
        f"{name}={given[name]!r} (here {ours})"
        for name, (values, ours) in ONLY.items()
        if name in given and given[name] not in values
    ]
    errors += _attention_errors(specs := _specs(given))
    refuse(errors, f"{LIBRARY}'s {content['model_type']}", "a model of this package")

    settings = {name: given[name] for name in SAME_NAME}
    settings |= {ours: given[name] for name, (ours, _) in model_type.fields.items()}
    if "head_dim" not in model_type.fields:
        key_dim, value_dim = (
            round(given["hidden_size"] * given.get(name, 1.0)) for name in ("expand_k", "expand_v")
        )
        settings["head_dim"] = key_dim // given["num_heads"]
        settings["expand_v"] = expansion(value_dim // given["num_heads"], settings["head_dim"])
    settings["hidden_ratio"] = settings["hidden_ratio"] or 4  # null means 4
    dtype = content.get("dtype", content.get("torch_dtype"))
    config = DeltaProductConfig(
        **settings, **model_type.implied, **_attention_to_ours(specs, given["num_hidden_layers"]), dtype=dtype
    )
    # Early versions kept a vector `D` in a Gated DeltaNet layer that no computation used.
    return config, {name: tensor for name, tensor in state.items() if not name.endswith(".attn.D")}


def from_ours(
    config: DeltaProductConfig, state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of config.json and the state dict with which flash-linear-attention runs a model of ours.

    Raises:
        FormatError: naming each setting without a counterpart.
    """
    name, model_type = next(
        (name, kind)
        for name, kind in TYPES.items()
        if all(getattr(config, field) == value for field, value in kind.implied.items())
    )
    same = {field: getattr(config, field) for field in SAME_NAME}
    fields = {field: getattr(config, ours) for field, (ours, _) in model_type.fields.items()}
    if "head_dim" in fields:
        fields["expand_v"] = expansion(config.head_v_dim, config.head_dim)
    else:
        sizes = {"expand_k": config.head_dim, "expand_v": config.head_v_dim}
        fields |= {field: config.num_heads * size / config.hidden_size for field, size in sizes.items()}

    said = {*SAME_NAME, *ATTENTION, *MACHINE_KEYS, "head_dim", "expand_v", "mixer_options", "hidden_act"}
    said |= {ours for ours, _ in model_type.fields.values()} | model_type.implied.keys()
    errors = [
        f"{field}={value!r} (it has no such setting)"
        for field, described in config_fields().items()
        if field not in said and (value := getattr(config, field)) != described.default
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
        **same,
        **fields,
        "hidden_act": "swish",
        "attn": _attention_from_ours(config),
    }
    return content, dict(state)


def _specs(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of attention layers, one mapping for each group of equal layers."""
    attn = content.get("attn") or []
    specs = [attn] if isinstance(attn, Mapping) else attn
    return [{**spec, "num_kv_heads": spec.get("num_kv_heads") or spec["num_heads"]} for spec in specs]


def _attention_errors(specs: list[dict[str, Any]]) -> Iterator[str]:
    if any(spec.get("qkv_bias") for spec in specs):
        yield "attn.qkv_bias=True (here projections have no bias)"
    for name, default in SHARED_BY_ATTENTION.items():
        if len(values := {spec.get(name, default) for spec in specs}) > 1:
            yield f"attn.{name}={sorted(values)} (here equal in all attention layers)"
    if len(windows := {spec.get("window_size") for spec in specs} - {None}) > 1:
        yield f"attn.window_size={sorted(windows)} (here equal in all layers with a window)"


def _attention_to_ours(specs: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    """Our fields of attention layers; none without such layers."""
    if not specs:
        return {}
    windows = {layer: spec.get("window_size") for spec in specs for layer in spec["layers"]}

    def kind(layer: int) -> str:
        if layer not in windows:
            return "linear_attention"
        return "full_attention" if windows[layer] is None else "sliding_attention"

    return {
        "layer_types": [kind(layer) for layer in range(layers)],
        "num_attention_heads": specs[0]["num_heads"],
        "num_key_value_heads": specs[0]["num_kv_heads"],
        "sliding_window": next((window for window in windows.values() if window is not None), None),
        "rope_theta": specs[0].get("rope_theta", SHARED_BY_ATTENTION["rope_theta"]),
    }


def _attention_from_ours(config: DeltaProductConfig) -> dict[str, Any] | list[dict[str, Any]] | None:
    """Its `attn`: a mapping for one kind of attention layers, a list of them for two, None for none."""
    specs = [
        {
            "layers": layers,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "qkv_bias": False,
            "window_size": config.sliding_window if kind == "sliding_attention" else None,
            "rope_theta": config.rope_theta,
        }
        for kind in ("full_attention", "sliding_attention")
        if (layers := [i for i, each in enumerate(config.layer_types) if each == kind])
    ]
    return specs[0] if len(specs) == 1 else specs or None
