"""Settings of all DeltaProduct models, with their checks.

The fields of `DeltaProductSettings` define the settings, from which `DeltaProductConfig` makes a config of
transformers. configs/model/common.yaml explains each. The launcher of a run imports this module. It does not
import transformers, because that would take a third of a second.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Self, get_args

from fla_train.kernels.delta_product.interface import BACKENDS

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
LAYER_TYPES = ("linear_attention", "full_attention", "sliding_attention")
# Fields of attention layers by their names in flash-linear-attention's `attn`
ATTN_KEYS = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "window_size": "sliding_window",
    "rope_theta": "rope_theta",
}


def free(default: Any, *, machine: bool = False) -> Any:
    """Declare a field that changes no trained weight, and results only by rounding.

    Args:
        machine: whether it describes the machine, so that it is not saved with the model.
    """
    return field(default=default, metadata={"machine": machine})


@dataclass(repr=False)
class DeltaProductSettings:
    """Settings of DeltaNet, Gated DeltaNet, DeltaProduct and Gated DeltaProduct language models.

    Field names follow flash-linear-attention.

    Recurrence: `num_householder` is the papers' n_h, generalized Householder steps per token. Each query and
    key head serves `num_v_heads / num_heads` value heads (None: one), which have the states; a value head has
    V = head_dim * expand_v channels. `o_norm_eps` belongs to the mixer's output norm (None: `norm_eps`).
    `backend` selects the operator's backend; with `recompute_operator` its forward pass keeps only the
    inputs. Both describe the machine, so exports do not have them.

    MLP: `intermediate_size=None` becomes 256 * ceil(int(hidden_size * hidden_ratio * 2/3) / 256).

    Initial weights have the standard deviation `initializer_range`. `scale_output_init` divides that of the
    layers that write to the residual stream (`o_proj` of a mixer, `down_proj` of an MLP) by
    sqrt(2 * num_hidden_layers), as in GPT-2. `embedding_init_std` is that of the embedding (None:
    `initializer_range`), and of the head if the two are tied.

    Residual stream: `embedding_multiplier` scales the embedding where it enters the stream, but not as a tied
    head; Gemma has sqrt(hidden_size). `residual_in_fp32=False` sums the stream in autocast's dtype of matrix
    products; true keeps the dtype of the embedding's weight (fp32).

    Attention: `layer_types` selects for each layer the recurrence ("linear_attention"), softmax attention
    over all tokens so far ("full_attention"), or over the last `sliding_window` of them
    ("sliding_attention"). None: all linear; a list shorter than the model repeats. `num_attention_heads`
    (None: `num_heads`), `num_key_value_heads` (None: as many), `sliding_window` and `rope_theta` (None: no
    positions) belong to the attention layers. So do `use_qk_norm`, one RMSNorm over all channels of q and one
    over those of k, and `norm_after`, which normalises the outputs of attention and MLP instead of their
    inputs, both as in OLMo 2 (arXiv 2501.00656).

    Custom mixers: `mixer` is the class of the linear layers, `package.module:Class`, built with
    `mixer_options` (None: `DeltaProductMixer`); `fla_train.models.mixers.Mixer` is its interface. A file
    alone never selects code to import: loading builds the model only if the caller also names the class, as
    in `from_pretrained(folder, mixer="package.module:Class")`, or passes `trust_remote_code=True`.

    Raises:
        ValueError: with all errors at once.
    """

    model_type = "delta_product"

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
    hidden_ratio: float = free(4.0)
    intermediate_size: int | None = None
    hidden_act: str = "silu"
    norm_eps: float = 1e-6
    o_norm_eps: float | None = None
    embedding_multiplier: float = 1.0
    residual_in_fp32: bool = free(True)
    layer_types: list[str] | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    sliding_window: int | None = None
    rope_theta: float | None = 10000.0
    use_qk_norm: bool = False
    norm_after: bool = False
    mixer: str | None = None
    mixer_options: dict[str, Any] | None = None
    max_position_embeddings: int = free(2048)
    initializer_range: float = free(0.02)
    scale_output_init: bool = free(False)
    embedding_init_std: float | None = free(None)
    tie_word_embeddings: bool = False
    use_cache: bool = free(True)
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    backend: str = free("auto", machine=True)
    recompute_operator: bool = free(False, machine=True)

    def __post_init__(self) -> None:
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

    @classmethod
    def from_node(cls, node: Mapping[str, Any]) -> Self:
        """Return the settings of a composed `model` node, a plain dict.

        A `vocab_size` of None, before a tokenizer is known, becomes the class's default.

        Raises:
            ValueError: unknown keys, or settings that contradict each other.
        """
        if unknown := sorted(set(node) - set(FIELDS)):
            raise ValueError(f"model config: unknown {', '.join(unknown)}; known are {', '.join(FIELDS)}")
        return cls(**{k: v for k, v in node.items() if (k, v) != ("vocab_size", None)})

    @property
    def value_heads(self) -> int:
        """Return the number of heads of v, beta, g and the states, HV."""
        return self.num_v_heads or self.num_heads

    @property
    def head_v_dim(self) -> int:
        """Return the channels of a value head, V."""
        return int(self.head_dim * self.expand_v)

    @property
    def attention_layers(self) -> list[int]:
        """Return the indices of the softmax attention layers."""
        return [i for i, layer in enumerate(self.layer_types) if layer != "linear_attention"]

    def _errors(self) -> list[str]:
        """List errors of single fields."""
        errors = []

        def check(name: str, valid: bool, rule: str) -> None:
            if not valid:
                errors.append(f"{name} must be {rule}, got {getattr(self, name)!r}")

        for name, entry in FIELDS.items():
            value, types = getattr(self, name), get_args(entry.type) or (entry.type,)
            if name.endswith("_token_id") or (value is None and NoneType in types):
                continue
            if int in types:
                least = 2 if name == "sliding_window" else 1
                check(name, type(value) is int and value >= least, f"an integer >= {least}")
            elif float in types:
                check(name, isinstance(value, int | float) and 0 < value < math.inf, "> 0 and finite")
            elif bool in types:
                check(name, isinstance(value, bool), "true or false")
        types = self.layer_types
        listed = types is None or (isinstance(types, list | tuple) and types and {*types} <= {*LAYER_TYPES})
        check("layer_types", listed, f"null or a list of {', '.join(LAYER_TYPES)}")
        imported = self.mixer is None or IMPORT_PATH.fullmatch(str(self.mixer))
        check("mixer", imported, "null or package.module:Class")
        check("mixer_options", isinstance(self.mixer_options, Mapping | None), "null or a mapping")
        check("hidden_act", self.hidden_act == "silu" or _is_activation(self.hidden_act), "'silu'")
        check("backend", self.backend in ("auto", *BACKENDS), f"auto, {', '.join(BACKENDS)}")
        return errors

    def _fit_errors(self) -> list[str]:
        """List fields that are valid one by one and contradict each other."""
        types, window = self.layer_types or ["linear_attention"], self.sliding_window
        linear, sliding = "linear_attention" in types, "sliding_attention" in types
        heads, size = self.num_attention_heads or self.num_heads, self.hidden_size
        kv_heads = self.num_key_value_heads or heads
        softmax = {*types} != {"linear_attention"}
        errors = [
            (self.head_v_dim < 1, f"head_dim {self.head_dim} * expand_v {self.expand_v} must be >= 1"),
            (self.value_heads % self.num_heads, f"num_heads {self.num_heads} must divide num_v_heads"),
            (
                len(types) > self.num_hidden_layers,
                f"layer_types has more than {self.num_hidden_layers} layers",
            ),
            (self.mixer_options and self.mixer is None, "mixer_options needs mixer"),
            (self.mixer is not None and not linear, "mixer needs linear_attention in layer_types"),
            (sliding and window is None, "sliding_attention in layer_types needs sliding_window"),
            (not sliding and window is not None, "sliding_window needs sliding_attention in layer_types"),
            (
                softmax and size % (2 * heads),
                f"2 * num_attention_heads {heads} must divide hidden_size {size}",
            ),
            (softmax and heads % kv_heads, f"num_key_value_heads {kv_heads} must divide {heads} heads"),
        ]
        return [error for wrong, error in errors if wrong]


def expansion(value_dim: int, key_dim: int) -> float:
    """Return the `expand_v` of heads with these channels, rounded so that `head_v_dim` is exact."""
    ratio = value_dim / key_dim
    return ratio if int(key_dim * ratio) == value_dim else math.nextafter(ratio, math.inf)


def _is_activation(name: str) -> bool:
    from transformers.activations import ACT2FN  # imports modeling code

    return name in ACT2FN


FIELDS = {entry.name: entry for entry in fields(DeltaProductSettings)}
# Fields in which a run may differ from `init_from`, and whether they describe the machine.
FREE_FIELDS = {name: entry.metadata["machine"] for name, entry in FIELDS.items() if entry.metadata}
MACHINE_KEYS = tuple(name for name, machine in FREE_FIELDS.items() if machine)
