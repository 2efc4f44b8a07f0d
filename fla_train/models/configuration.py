"""`DeltaProductConfig`: one configuration for the four models of docs/architecture.md, and its Hydra schema.

The annotated fields of the class are the only list of settings: transformers makes the constructor from them,
`model_schema` the typed Hydra node, and `build_config` checks a composed node against them.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from fla_train.kernels.delta_product.interface import known_backend

MACHINE_KEYS = ("backend", "recompute_operator")
INITIALIZATION_KEYS = ("scale_output_init", "embedding_init_std")  # no effect once there are weights
IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
LAYER_TYPES = ("linear_attention", "full_attention", "sliding_attention")
# Fields of attention layers by their names in flash-linear-attention's `attn`
ATTN_KEYS = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "window_size": "sliding_window",
    "rope_theta": "rope_theta",
}


class DeltaProductConfig(PreTrainedConfig):
    """Configuration of DeltaNet, Gated DeltaNet, DeltaProduct and Gated DeltaProduct language models.

    Field names follow flash-linear-attention. `num_householder` is the papers' n_h, generalized Householder
    steps per token. `intermediate_size=None` becomes 256 * ceil(int(hidden_size * hidden_ratio * 2/3) / 256).
    `backend` chooses the operator's backend; with `recompute_operator` its forward pass keeps only the
    inputs. Both describe the machine, so `save_pretrained` does not write them.

    Each query and key head serves `num_v_heads / num_heads` value heads (None: one), which have the states; a
    value head has V = head_dim * expand_v channels. `o_norm_eps` is that of the mixer's output norm (None:
    `norm_eps`).

    Weights are drawn with the standard deviation `initializer_range`. `scale_output_init` divides that of the
    layers that write to the residual stream (`o_proj` of a mixer, `down_proj` of an MLP) by
    sqrt(2 * num_hidden_layers), as in GPT-2. `embedding_init_std` is that of the embedding (None:
    `initializer_range`), and of the head if the two are tied. `embedding_multiplier` scales the embedding
    where it enters the residual stream, and not as a tied head; Gemma has sqrt(hidden_size).

    `residual_in_fp32=False` adds up the residual stream in the dtype that autocast gives to matrix products;
    true keeps the dtype of the embedding's weight, fp32 in training. Without autocast it changes nothing.

    `layer_types` says which layers are the recurrence ("linear_attention") and which softmax attention over
    all tokens before ("full_attention") or over the last `sliding_window` tokens, itself included
    ("sliding_attention"). None: all linear; a list shorter than the model repeats. `num_attention_heads`
    (None: `num_heads`), `num_key_value_heads` (None: as many), `sliding_window` and `rope_theta` (None: no
    positions) belong to the attention layers. So do `use_qk_norm`, an RMSNorm over all channels of q and one
    over those of k, and `norm_after`, which normalises the outputs of attention and MLP instead of their
    inputs: both as in OLMo 2 (arXiv 2501.00656).

    `mixer` is the class of the linear layers, `package.module:Class`, built with `mixer_options`; None:
    `DeltaProductMixer`. `fla_train.models.mixers.Mixer` says what it must be. A config that is read from a
    file does not choose what is imported: the model is built only if whoever reads it names the class, too,
    as in `from_pretrained(folder, mixer="package.module:Class")`, or gives `trust_remote_code=True`.

    Raises:
        ValueError: listing every error at once.
    """

    model_type = "delta_product"
    mixer_permitted = True  # whether the mixer may be imported; not saved
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012  Trainer adds a list to it
    auto_map = {}  # noqa: RUF012  TRL reads it of every model that transformers does not define

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_heads: int = 8
    num_v_heads: int | None = None
    head_dim: int = 128
    expand_v: float = 1.0
    num_householder: int = 1
    use_forget_gate: bool = False
    use_output_gate: bool = False
    allow_neg_eigval: bool = True
    use_short_conv: bool = True
    conv_size: int = 4
    hidden_ratio: float = 4.0
    intermediate_size: int | None = None
    hidden_act: str = "silu"
    norm_eps: float = 1e-6
    o_norm_eps: float | None = None
    embedding_multiplier: float = 1.0
    residual_in_fp32: bool = True
    layer_types: list[str] | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    sliding_window: int | None = None
    rope_theta: float | None = 10000.0
    use_qk_norm: bool = False
    norm_after: bool = False
    mixer: str | None = None
    mixer_options: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    scale_output_init: bool = False
    embedding_init_std: float | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    backend: str = "auto"
    recompute_operator: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if errors := self._errors() or self._fit_errors():
            raise ValueError(f"model config: {'; '.join(errors)}")
        if self.intermediate_size is None:
            self.intermediate_size = 256 * math.ceil(int(self.hidden_size * self.hidden_ratio * 2 / 3) / 256)
        pattern = self.layer_types or ["linear_attention"]
        self.layer_types = [pattern[i % len(pattern)] for i in range(self.num_hidden_layers)]
        self.num_v_heads = None if self.num_v_heads == self.num_heads else self.num_v_heads
        self.o_norm_eps = None if self.o_norm_eps == self.norm_eps else self.o_norm_eps
        self.num_attention_heads = self.num_attention_heads or self.num_heads
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> "DeltaProductConfig":
        """Make the config of a file. Its mixer is permitted if `options` name one."""
        permitted = options.pop("mixer_permitted", options.get("mixer") is not None)
        return super().from_dict(drop_auto_map(cls, config_dict) | {"mixer_permitted": permitted}, **options)

    @property
    def value_heads(self) -> int:
        """Heads of v, beta, g and the states, HV."""
        return self.num_v_heads or self.num_heads

    @property
    def head_v_dim(self) -> int:
        """Channels of a value head, V."""
        return int(self.head_dim * self.expand_v)

    @property
    def attention_layers(self) -> list[int]:
        """The layers that are softmax attention instead of the recurrence, in order."""
        return [i for i, kind in enumerate(self.layer_types) if kind != "linear_attention"]

    @property
    def number_of_conv_states(self) -> int:
        """Convolutions of a mixer: q, k and v. A name that caches read."""
        return 3

    def to_dict(self) -> dict[str, Any]:
        """The fields; who may import the mixer is no field."""
        return {key: value for key, value in super().to_dict().items() if key != "mixer_permitted"}

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: all but the machine's choices and the settings of absent layers."""
        unused = MACHINE_KEYS
        if not self.attention_layers:
            unused += ("layer_types", *ATTN_KEYS.values())
        elif "sliding_attention" not in self.layer_types:
            unused += ("sliding_window",)
        return {key: value for key, value in super().to_diff_dict().items() if key not in unused}

    def _errors(self) -> list[str]:
        """Errors of single fields."""
        at_least_one = (
            "vocab_size hidden_size num_hidden_layers num_heads head_dim num_householder conv_size "
            "max_position_embeddings intermediate_size num_attention_heads num_key_value_heads num_v_heads"
        )
        least = dict.fromkeys(at_least_one.split(), 1) | {"sliding_window": 2}
        errors = [
            f"{name} must be an integer >= {smallest}, got {value!r}"
            for name, smallest in least.items()
            if (value := getattr(self, name)) is not None and (type(value) is not int or value < smallest)
        ]
        errors += [
            f"{field.name} must be true or false, got {value!r}"
            for field in dataclasses.fields(self)
            if field.type is bool and not isinstance(value := getattr(self, field.name), bool)
        ]
        positive = ["expand_v", "hidden_ratio", "norm_eps", "initializer_range", "embedding_multiplier"]
        optional = ("o_norm_eps", "rope_theta", "embedding_init_std")
        positive += [name for name in optional if getattr(self, name) is not None]
        errors += [
            f"{name} must be > 0 and finite, got {value!r}"
            for name in positive
            if not isinstance(value := getattr(self, name), int | float) or not 0 < value < math.inf
        ]
        types = self.layer_types
        listed = isinstance(types, list | tuple) and len(types) > 0
        if types is not None and not (listed and all(kind in LAYER_TYPES for kind in types)):
            errors.append(f"layer_types must be null or a list of {', '.join(LAYER_TYPES)}, got {types!r}")
        if self.mixer is not None and not IMPORT_PATH.fullmatch(str(self.mixer)):
            errors.append(f"mixer must be null or package.module:Class, got {self.mixer!r}")
        if not isinstance(self.mixer_options, Mapping | None):
            errors.append(f"mixer_options must be null or a mapping, got {self.mixer_options!r}")
        if self.hidden_act != "silu" and not _is_activation(self.hidden_act):
            errors.append(f"hidden_act {self.hidden_act!r} is unknown, use 'silu'")
        try:
            known_backend(self.backend)
        except ValueError as error:
            errors.append(str(error))
        if not isinstance(self.recompute_operator, bool):
            errors.append(f"recompute_operator must be true or false, got {self.recompute_operator!r}")
        return errors

    def _fit_errors(self) -> list[str]:
        """Fields that are right one by one and do not fit together."""
        errors, types = [], self.layer_types or ["linear_attention"]
        if self.head_v_dim < 1:
            errors.append(f"head_dim * expand_v must be >= 1, got {self.head_dim} * {self.expand_v}")
        if self.value_heads % self.num_heads:
            errors.append(f"num_v_heads {self.num_v_heads} must be a multiple of num_heads {self.num_heads}")
        if len(types) > self.num_hidden_layers:
            errors.append(
                f"layer_types names {len(types)} layers, num_hidden_layers is {self.num_hidden_layers}"
            )
        if self.mixer_options and self.mixer is None:
            errors.append("mixer_options are those of a mixer, and mixer is null")
        if self.mixer is not None and "linear_attention" not in types:
            errors.append("mixer is the class of linear_attention layers, and layer_types has none")
        if "sliding_attention" in types and self.sliding_window is None:
            errors.append("sliding_window is required by the sliding_attention layers of layer_types")
        if "sliding_attention" not in types and self.sliding_window is not None:
            errors.append("sliding_window belongs to sliding_attention layers, and layer_types has none")
        if set(types) == {"linear_attention"}:
            return errors
        heads = self.num_attention_heads or self.num_heads
        if self.hidden_size % (2 * heads):
            errors.append(
                f"num_attention_heads {heads} must divide hidden_size {self.hidden_size}, "
                "into heads of an even size"
            )
        if heads % (kv_heads := self.num_key_value_heads or heads):
            errors.append(f"num_key_value_heads {kv_heads} must divide num_attention_heads {heads}")
        return errors


def drop_auto_map(kind: type[PreTrainedConfig], content: dict[str, Any]) -> dict[str, Any]:
    """Return a config's content without `auto_map`, unless the class was loaded from the files it names.

    `save_pretrained` copies these files only for such a class.
    """
    return {key: value for key, value in content.items() if key != "auto_map" or kind._auto_class}


def expansion(value_dim: int, key_dim: int) -> float:
    """The `expand_v` of heads with so many channels: their ratio, rounded so that `head_v_dim` is right."""
    ratio = value_dim / key_dim
    return ratio if int(key_dim * ratio) == value_dim else math.nextafter(ratio, math.inf)


def _is_activation(name: str) -> bool:
    from transformers.activations import ACT2FN  # slow to import

    return name in ACT2FN


def config_fields() -> dict[str, dataclasses.Field]:
    """The model's own settings by name, without those every transformers config has."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {f.name: f for f in dataclasses.fields(DeltaProductConfig) if f.name not in inherited}


def model_schema() -> type:
    """A dataclass with the fields, types and defaults of `DeltaProductConfig`, for Hydra's `model` node.

    There `vocab_size` may be null: a run takes its tokenizer's.
    """
    fields = {name: (f.type, f.default) for name, f in config_fields().items()}
    fields |= {"mixer_options": (Any, None), "vocab_size": (int | None, None)}
    return dataclasses.make_dataclass(
        "ModelSchema",
        [(name, kind, dataclasses.field(default=default)) for name, (kind, default) in fields.items()],
    )


def build_config(node: Mapping[str, Any]) -> DeltaProductConfig:
    """The config of a composed `model` node, as a plain dict (`OmegaConf.to_container(..., resolve=True)`).

    A `vocab_size` of None, which no tokenizer has filled in yet, becomes the class's default.

    Raises:
        ValueError: for unknown keys, or for settings that do not fit together.
    """
    if unknown := sorted(set(node) - set(config_fields())):
        raise ValueError(
            f"model config: unknown {', '.join(unknown)}; known are {', '.join(config_fields())}"
        )
    given = {key: value for key, value in node.items() if (key, value) != ("vocab_size", None)}
    return DeltaProductConfig(**given)
