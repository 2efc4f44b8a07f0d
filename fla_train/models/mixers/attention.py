"""Softmax attention for the hybrid layers: grouped queries, rotary positions, optional sliding window."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.context import SequenceContext


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding (half-rotation layout) of x [B, H, T, D] at `positions`, integers [T].

    The angles are computed at each call, in fp32: a buffer would be lost by meta initialisation and rounded
    by casts of the model.
    """
    half = x.shape[-1] // 2
    channel = torch.arange(half, device=x.device, dtype=torch.float32)
    angle = positions.float()[:, None] * theta ** (-channel / half)  # [T, D / 2]
    cos, sin = angle.cos(), angle.sin()
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, T, D] and softmax weights [B, H, T, S] of q [B, H, T, D] on k and v [B, H_kv, S, D].

    `visible` is bool, broadcast to the weights; None: plain causal, T = S. The softmax is taken in fp32.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if visible is None:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return weights @ v, weights


class HybridAttention(nn.Module):
    """Causal softmax attention over [B, T, hidden_size].

    `attn_implementation` "sdpa" (the default) is torch's scaled_dot_product_attention, "eager" writes it out;
    a call that asks for the weights is "eager" too.
    """

    def __init__(self, config: DeltaProductConfig, layer_index: int = 0) -> None:
        super().__init__()
        self.config, self.layer_index = config, layer_index
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.rope_theta = config.rope_theta
        kv_size = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context: SequenceContext, cache: Cache | None = None) -> Tensor:
        """Attend; this layer's keys and values in `cache` are read and updated in place."""
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.head_dim).transpose(1, 2)  # [B, H, T, D]

        q = rotate(heads(self.q_proj(x)), context.positions, self.rope_theta)
        k = rotate(heads(self.k_proj(x)), context.positions, self.rope_theta)
        v = heads(self.v_proj(x))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_index)
        if self.config._attn_implementation == "eager" or context.attentions is not None:
            o, weights = eager_attention(q, k, v, context.visible)
            if context.attentions is not None:
                context.attentions.append(weights)
        else:
            o = F.scaled_dot_product_attention(
                q, k, v, attn_mask=context.visible, is_causal=context.visible is None, enable_gqa=True
            )
        return self.o_proj(o.transpose(1, 2).reshape(batch, length, -1))
