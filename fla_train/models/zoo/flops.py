"""Count forward FLOPs per token of other libraries' models from their modules, two per multiply-add.

The count includes linear layers (with the head, without the embedding; the active experts of a mixture),
convolutions, softmax attention by visible keys, and the states of the recurrences in RECURRENCES. It excludes
element-wise operations, the extra products of chunked recurrences, the iterations of MesaNet, and recurrences
and attention of unknown classes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from fla_train.models.flops import visible_keys

if TYPE_CHECKING:  # imports modeling code
    from transformers import PreTrainedModel


def _matrices(layer: Any) -> int:
    """Count the elements of a key x value matrix for each value head."""
    heads = getattr(layer, "num_v_heads", None) or layer.num_heads
    return heads * layer.head_k_dim * layer.head_v_dim


# The elements of a layer's state by class, and the multiply-adds per element and token: 2 for a write and a
# read, 3 if a delta rule also reads before it writes, 4 with an additional transition of rank 1.
RECURRENCES: dict[str, tuple[Callable[[Any], int], int]] = {
    "MambaMixer": (lambda layer: layer.intermediate_size * layer.ssm_state_size, 2),
    "SignedMambaMixer": (lambda layer: layer.config.inner_size * layer.config.state_size, 2),
    "Mamba2Mixer": (lambda layer: layer.intermediate_size * layer.ssm_state_size, 2),
    "xLSTMLayer": (lambda layer: layer.qk_dim * layer.v_dim // layer.config.num_heads, 2),
    "Qwen3NextGatedDeltaNet": (_matrices, 3),
    "OlmoHybridGatedDeltaNet": (_matrices, 3),
    "GatedLinearAttention": (_matrices, 2),
    "MultiScaleRetention": (_matrices, 2),
    "HGRN2Attention": (lambda layer: layer.num_heads * layer.head_f_dim * layer.head_i_dim, 2),
    "RWKV7Attention": (lambda layer: layer.num_heads * layer.head_dim * layer.head_v_dim, 4),
    "GatedDeltaNet": (_matrices, 3),
    "KimiDeltaAttention": (_matrices, 3),
    "MesaNet": (_matrices, 2),
}
FLA_ATTENTION = "fla.layers.attn"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a forward pass per token."""

    projections: float  # linear layers and convolutions
    attention: float
    recurrences: float

    @property
    def training(self) -> float:
        """Return the FLOPs of forward and backward pass; the latter costs twice as much."""
        return 3 * (self.projections + self.attention + self.recurrences)


def forward_flops(model: "PreTrainedModel", seq_len: int) -> ForwardFlops:
    """Count a model, which may lie on the meta device, at sequences of `seq_len` tokens."""
    layers = softmax_attention(model)
    return ForwardFlops(
        projections=sum(_projection(module, model) for module in model.modules()),
        # 2 per key and channel for scores, and for values
        attention=sum(4 * width * visible_keys(seq_len, window) for width, window in layers),
        recurrences=sum(map(_recurrence, model.modules())),
    )


def softmax_attention(model: "PreTrainedModel") -> Iterator[tuple[int, int | None]]:
    """Yield heads x channels, and the window in tokens (None: all), of each softmax attention layer."""
    config = model.config
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    types = getattr(config, "layer_types", None)
    for module in model.modules():
        name = type(module).__name__
        if type(module).__module__ == FLA_ATTENTION:
            yield module.num_heads * module.head_dim, module.window_size
        elif name.endswith("Attention") and name not in RECURRENCES and hasattr(module, "head_dim"):
            kind = types[module.layer_idx] if types else "full_attention" if window is None else SLIDING
            if kind in ("full_attention", SLIDING):
                heads = getattr(module, "num_heads", config.num_attention_heads)
                yield heads * module.head_dim, window if kind == SLIDING else None


def _projection(module: nn.Module, model: "PreTrainedModel") -> float:
    from transformers.pytorch_utils import Conv1D  # the launcher, which imports this module, may not need it

    if isinstance(module, nn.Linear | nn.Conv1d | Conv1D):
        return 2 * module.weight.numel()
    if not hasattr(module, "num_experts"):
        return 0
    flops = 0.0
    for matrix in (p for p in module.parameters(recurse=False) if p.ndim > 1):
        taken = model.config.num_experts_per_tok / module.num_experts if matrix.ndim == 3 else 1  # 3: stacked
        flops += 2 * taken * matrix.numel()
    return flops


def _recurrence(module: nn.Module) -> int:
    elements, multiply_adds = RECURRENCES.get(type(module).__name__, (lambda layer: 0, 0))
    return 2 * multiply_adds * elements(module)
