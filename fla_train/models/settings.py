"""Settings of all DeltaProduct models, with their checks.

The fields of `DeltaProductSettings` define the settings, from which `DeltaProductConfig` makes a config of
transformers. configs/model/common.yaml explains each. This module imports neither torch nor transformers,
because commands import it before they answer.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from fla_train.utils.keys import key, require_valid

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
LAYER_TYPES = ("linear_attention", "full_attention", "sliding_attention")
# Fields of attention layers by their names in flash-linear-attention's `attn`
ATTN_KEYS = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "window_size": "sliding_window",
    "rope_theta": "rope_theta",
}


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
    positions) belong to the attention layers. So does `use_qk_norm`, one RMSNorm over all channels of q and
    one over those of k, as in OLMo 2 (arXiv 2501.00656).

    Norms: `norm_after` normalises the outputs of mixer and MLP instead of their inputs, as in OLMo 2, in
    "attention" layers or in "all". None: inputs everywhere.

    Custom mixers: `mixer` is the class of the linear layers, `package.module:Class`, built with
    `mixer_options` (None: `DeltaProductMixer`); `fla_train.models.mixers.Mixer` is its interface. A file
    alone never selects code to import: loading builds the model only if the caller also names the class, as
    in `from_pretrained(folder, mixer="package.module:Class")`, or passes `trust_remote_code=True`.

    Raises:
        ValueError: with all errors at once.
    """

    model_type = "delta_product"

    vocab_size: int = key(32000, at_least=1)
    hidden_size: int = key(1024, at_least=1)
    num_hidden_layers: int = key(24, at_least=1)
    num_heads: int = key(8, at_least=1)
    num_v_heads: int | None = key(None, at_least=1)
    head_dim: int = key(128, at_least=1)
    expand_v: float = key(1.0, above=0)
    num_householder: int = key(1, at_least=1)
    use_forget_gate: bool = False
    use_output_gate: bool = False
    allow_neg_eigval: bool = True
    use_short_conv: bool = True
    conv_size: int = key(4, at_least=1)
    hidden_ratio: float = key(4.0, above=0, free=True)
    intermediate_size: int | None = key(None, at_least=1)
    hidden_act: str = "silu"
    norm_eps: float = key(1e-6, above=0)
    o_norm_eps: float | None = key(None, above=0)
    embedding_multiplier: float = key(1.0, above=0)
    residual_in_fp32: bool = key(True, free=True)
    layer_types: list[str] | None = key(None, choices=LAYER_TYPES, nonempty=True)
    num_attention_heads: int | None = key(None, at_least=1)
    num_key_value_heads: int | None = key(None, at_least=1)
    sliding_window: int | None = key(None, at_least=2)
    rope_theta: float | None = key(10000.0, above=0)
    use_qk_norm: bool = False
    norm_after: str | None = key(None, choices=("attention", "all"))
    mixer: str | None = None
    mixer_options: dict[str, Any] | None = None
    max_position_embeddings: int = key(2048, at_least=1, free=True)
    initializer_range: float = key(0.02, above=0, free=True)
    scale_output_init: bool = key(False, free=True)
    embedding_init_std: float | None = key(None, above=0, free=True)
    tie_word_embeddings: bool = False
    use_cache: bool = key(True, free=True)
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    backend: str = key("auto", choices=("auto", "recurrent", "chunk", "triton"), free="machine")
    recompute_operator: bool = key(False, free="machine")

    def __post_init__(self) -> None:
        if isinstance(self.norm_after, bool):  # as older runs and exports have it
            self.norm_after = "attention" if self.norm_after else None
        require_valid(self, "model.", DeltaProductSettings)
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
            raise ValueError(f"model has no {', '.join(unknown)}: its keys are {', '.join(FIELDS)}")
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

    def check(self) -> Iterator[str]:
        """Yield errors of names that `key` can't list, and settings that contradict each other."""
        types, window, after = self.layer_types or ["linear_attention"], self.sliding_window, self.norm_after
        linear, sliding = "linear_attention" in types, "sliding_attention" in types
        heads, size = self.num_attention_heads or self.num_heads, self.hidden_size
        kv_heads = self.num_key_value_heads or heads
        softmax, length = {*types} != {"linear_attention"}, self.num_hidden_layers
        importable = self.mixer is None or IMPORT_PATH.fullmatch(self.mixer)
        known = self.hidden_act == "silu" or _is_activation(self.hidden_act)
        errors = [
            (not known, f"hidden_act={self.hidden_act} must be silu"),
            (not importable, f"mixer={self.mixer} must be package.module:Class"),
            (self.head_v_dim < 1, f"head_dim={self.head_dim} * expand_v={self.expand_v} must be at least 1"),
            (self.value_heads % self.num_heads, f"num_heads={self.num_heads} must divide num_v_heads"),
            (len(types) > length, f"layer_types has more than num_hidden_layers={length} entries"),
            (self.mixer_options and self.mixer is None, "mixer_options needs mixer"),
            (self.mixer is not None and not linear, "mixer needs linear_attention in layer_types"),
            (sliding and window is None, "layer_types with sliding_attention needs sliding_window"),
            (not sliding and window is not None, "sliding_window needs sliding_attention in layer_types"),
            (after == "attention" and not softmax, "norm_after=attention needs attention: use null or all"),
            (softmax and size % (2 * heads), f"hidden_size={size} must be a multiple of 2 * {heads} heads"),
            (softmax and heads % kv_heads, f"num_key_value_heads={kv_heads} must divide {heads} heads"),
        ]
        yield from (error for wrong, error in errors if wrong)


def expansion(value_dim: int, key_dim: int) -> float:
    """Return the `expand_v` of heads with these channels, rounded so that `head_v_dim` is exact."""
    ratio = value_dim / key_dim
    return ratio if int(key_dim * ratio) == value_dim else math.nextafter(ratio, math.inf)


def _is_activation(name: str) -> bool:
    from transformers.activations import ACT2FN  # imports modeling code

    return name in ACT2FN


FIELDS = {entry.name: entry for entry in fields(DeltaProductSettings)}
# Fields in which a run may differ from `init_from`.
FREE_FIELDS = tuple(name for name, entry in FIELDS.items() if "free" in entry.metadata)
MACHINE_KEYS = tuple(name for name in FREE_FIELDS if FIELDS[name].metadata["free"] == "machine")
