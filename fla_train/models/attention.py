"""Softmax attention for the hybrid layers: grouped queries, rotary positions, optional sliding window."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla_train.models.cache import append_along_time
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.context import SequenceContext


def rotate(x: Tensor, first: int, theta: float) -> Tensor:
    """Rotary position embedding (half-rotation layout) of x [B, H, T, D] at positions first, first + 1, ...

    The angles are made anew, in fp32: a buffer would have to survive meta initialisation and casts of the
    model.
    """
    half = x.shape[-1] // 2
    channel = torch.arange(half, device=x.device, dtype=torch.float32)
    position = torch.arange(first, first + x.shape[2], device=x.device, dtype=torch.float32)
    angle = position[:, None] * theta ** (-channel / half)  # [T, D / 2]
    cos, sin = angle.cos(), angle.sin()
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class HybridAttention(nn.Module):
    """Causal softmax attention over [B, T, hidden_size], by torch's scaled_dot_product_attention."""

    def __init__(self, config: DeltaProductConfig) -> None:
        super().__init__()
        attn = config.attn
        self.num_heads, self.num_kv_heads = attn["num_heads"], attn["num_kv_heads"]
        self.head_dim = config.hidden_size // self.num_heads
        self.window, self.rope_theta = attn["window_size"], attn["rope_theta"]
        kv_size = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context: SequenceContext, cache: dict[str, Tensor] | None = None) -> Tensor:
        """Attend; `cache` is this layer's dict of a `DeltaProductCache`, read and updated in place."""
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.head_dim).transpose(1, 2)  # [B, H, T, D]

        q = rotate(heads(self.q_proj(x)), context.seen, self.rope_theta)
        k = rotate(heads(self.k_proj(x)), context.seen, self.rope_theta)
        v = heads(self.v_proj(x))
        if cache is not None:
            limit = None if self.window is None else self.window - 1
            k, cache["keys"] = append_along_time(cache.get("keys"), k, limit)
            v, cache["values"] = append_along_time(cache.get("values"), v, limit)
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=context.visible, is_causal=context.visible is None, enable_gqa=True
        )
        return self.o_proj(o.transpose(1, 2).reshape(batch, length, -1))
