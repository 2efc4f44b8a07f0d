"""`DeltaProductConfig`: one configuration for the four models of docs/architecture.md, and its Hydra schema.

The annotated fields of the class are the only list of settings: transformers makes the constructor from them,
`model_schema` the typed Hydra node, and `build_config` checks a composed node against them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from fla_train.kernels.delta_product import known_backend, known_recompute
from fla_train.models.auto import LazyModelConfig

MACHINE_KEYS = ("backend", "recompute_operator")
HYBRID_KEYS = ("layers", "num_heads", "num_kv_heads", "window_size", "rope_theta")


class DeltaProductConfig(LazyModelConfig):
    """Configuration of DeltaNet, Gated DeltaNet, DeltaProduct and Gated DeltaProduct language models.

    Field names follow flash-linear-attention. `num_householder` is the papers' n_h, generalized Householder
    steps per token. `intermediate_size=None` becomes 256 * ceil(int(hidden_size * hidden_ratio * 2/3) / 256).
    `attn` turns some layers into softmax attention: `{"layers": [3, 7], "num_heads": 8, "num_kv_heads": 8,
    "window_size": None, "rope_theta": 10000.0}`, of which the first two keys are required. `backend` chooses
    the operator's backend; with `recompute_operator` its forward pass keeps only the inputs. Both describe
    the machine, so `save_pretrained` does not write them.

    Raises:
        ValueError: listing every error at once.
    """

    model_type = "delta_product"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  Trainer adds a list to it

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_heads: int = 8
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
    attn: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    backend: str = "auto"
    recompute_operator: bool | int = False  # an int, of earlier versions, means True

    def __post_init__(self, **kwargs: Any) -> None:
        if errors := self._errors():
            raise ValueError(f"model config: {'; '.join(errors)}")
        if self.intermediate_size is None:
            self.intermediate_size = 256 * math.ceil(int(self.hidden_size * self.hidden_ratio * 2 / 3) / 256)
        if self.attn is not None:
            defaults = {"num_kv_heads": None, "window_size": None, "rope_theta": 10000.0}
            self.attn = defaults | dict(self.attn)
            self.attn["layers"] = sorted(set(self.attn["layers"]))
            self.attn["num_kv_heads"] = self.attn["num_kv_heads"] or self.attn["num_heads"]
        super().__post_init__(**kwargs)

    @property
    def head_v_dim(self) -> int:
        """Channels of a value head, V."""
        return int(self.head_dim * self.expand_v)

    @property
    def num_attention_heads(self) -> int:
        """Heads of the attention layers, or of the mixer without any; other libraries read this name."""
        return self.num_heads if self.attn is None else self.attn["num_heads"]

    @property
    def attention_layers(self) -> list[int]:
        """The layers that are softmax attention instead of the recurrence, in order."""
        return [] if self.attn is None else self.attn["layers"]

    @property
    def layer_types(self) -> list[str]:
        """The kind of each layer by transformers' names, such as "linear_attention"."""
        attention = "full_attention" if self.sliding_window is None else "sliding_attention"
        layers = range(self.num_hidden_layers)
        return [attention if i in self.attention_layers else "linear_attention" for i in layers]

    @property
    def sliding_window(self) -> int | None:
        """`attn.window_size` by the name that caches read: how many tokens a token sees, with itself."""
        return None if self.attn is None else self.attn["window_size"]

    @sliding_window.setter
    def sliding_window(self, window: int | None) -> None:
        if self.attn is None:
            raise ValueError("sliding_window belongs to attention layers, and attn is null")
        self.attn["window_size"] = window

    @property
    def number_of_conv_states(self) -> int:
        """Convolutions of a mixer: q, k and v. A name that caches read."""
        return 3

    def to_diff_dict(self) -> dict[str, Any]:
        """What `save_pretrained` writes: everything but the machine's choices."""
        return {key: value for key, value in super().to_diff_dict().items() if key not in MACHINE_KEYS}

    def _errors(self) -> list[str]:
        at_least_one = (
            "vocab_size hidden_size num_hidden_layers num_heads head_dim num_householder conv_size "
            "max_position_embeddings intermediate_size"
        )
        errors = [
            f"{name} must be an integer >= 1, got {value!r}"
            for name in at_least_one.split()
            if (value := getattr(self, name)) is not None and (not isinstance(value, int) or value < 1)
        ]
        errors += [
            f"{name} must be > 0 and finite, got {value!r}"
            for name in ("expand_v", "hidden_ratio", "norm_eps", "initializer_range")
            if not 0 < (value := getattr(self, name)) < math.inf
        ]
        if self.hidden_act != "silu" and not _is_activation(self.hidden_act):
            errors.append(f"hidden_act {self.hidden_act!r} is unknown, use 'silu'")
        for name, known in (("backend", known_backend), ("recompute_operator", known_recompute)):
            try:
                setattr(self, name, known(getattr(self, name), name))
            except ValueError as error:
                errors.append(str(error))
        if not errors and self.head_v_dim < 1:
            errors.append(f"head_dim * expand_v must be >= 1, got {self.head_dim} * {self.expand_v}")
        if errors or self.attn is None:
            return errors
        return self._hybrid_errors(self.attn)

    def _hybrid_errors(self, attn: Mapping[str, Any]) -> list[str]:
        if not isinstance(attn, Mapping):
            return [f"attn must be null or a mapping of {', '.join(HYBRID_KEYS)}, got {attn!r}"]
        errors = [
            f"attn.{key} is unknown, use {', '.join(HYBRID_KEYS)}" for key in attn if key not in HYBRID_KEYS
        ]
        errors += [f"attn.{key} is required" for key in ("layers", "num_heads") if attn.get(key) is None]
        if errors:
            return errors
        layers, theta = attn["layers"], attn.get("rope_theta", 1.0)
        errors = [
            f"attn.{key} must be an integer, got {value!r}"
            for key in ("num_heads", "num_kv_heads", "window_size")
            if not isinstance(value := attn.get(key), int | None)
        ]
        if not isinstance(layers, list | tuple) or not all(isinstance(layer, int) for layer in layers):
            errors.append(f"attn.layers must be a list of integers, got {layers!r}")
        if not isinstance(theta, int | float) or not 0 < theta < math.inf:
            errors.append(f"attn.rope_theta must be a finite number > 0, got {theta!r}")
        if errors:
            return errors
        heads, kv_heads = attn["num_heads"], attn.get("num_kv_heads") or attn["num_heads"]
        outside = [layer for layer in layers if not 0 <= layer < self.num_hidden_layers]
        if outside:
            errors.append(f"attn.layers {outside} do not exist, layers are 0..{self.num_hidden_layers - 1}")
        if heads < 1 or self.hidden_size % (2 * heads):
            errors.append(
                f"attn.num_heads {heads} must give an even hidden_size / num_heads ({self.hidden_size})"
            )
        if kv_heads < 1 or heads % kv_heads:
            errors.append(f"attn.num_kv_heads {kv_heads} must divide attn.num_heads {heads}")
        if (window := attn.get("window_size")) is not None and window < 2:
            errors.append(f"attn.window_size must be >= 2 or null, got {window}")
        return errors


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
    fields |= {"attn": (Any, None), "vocab_size": (int | None, None)}
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
