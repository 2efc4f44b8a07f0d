"""Linear attention (arXiv 2006.16236) as a mixer of one's own: the whole contract in one file.

    o_t = S_t^T phi(q_t) / (z_t . phi(q_t)),   S_t = S_{t-1} + phi(k_t) v_t^T,   z_t = z_{t-1} + phi(k_t)

phi(x) = elu(x) + 1. A column of ones beside v makes z the last column of S.

    fla-train model=delta_net/tiny model.mixer=linear_attention:LinearAttention
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.context import SequenceContext


class LinearAttention(nn.Module):
    """`chunk` tokens are read at once, in [chunk, chunk] scores; memory is linear in T."""

    def __init__(self, config: DeltaProductConfig, layer_index: int = 0, *, chunk: int = 128) -> None:
        super().__init__()
        self.layer_index, self.chunk, self.heads = layer_index, chunk, config.num_heads
        size = config.num_heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(config.hidden_size, size, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)
        self.temperature = nn.Parameter(torch.empty(config.num_heads, config.head_dim))
        self.temperature._no_weight_decay = True  # a matrix would have weight decay
        self.init_weights(config.initializer_range)

    def init_weights(self, std: float) -> None:
        nn.init.ones_(self.temperature)

    def flops_per_token(self, seq_len: int) -> float:
        """Return three times the forward pass: projections, scores of half a chunk, reads and writes of S."""
        weights = sum(layer.weight.numel() for layer in self.children())
        head_dim = self.temperature.shape[1]
        return 3 * 2 * (weights + self.heads * head_dim * (self.chunk + 2 * head_dim))

    def forward(
        self, x: Tensor, context: SequenceContext | None = None, cache: Cache | None = None
    ) -> Tensor:
        context = context or SequenceContext()
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, K]
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = F.elu(q * self.temperature[:, None]) + 1, F.elu(k) + 1
        if context.padding_mask is not None:  # a key of zeros adds nothing to the state
            k = k * context.padding_mask[:, None, :, None]
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # [B, H, T, V + 1]
        dtype = torch.promote_types(x.dtype, torch.float32)  # of the state and its sums
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        position = torch.arange(x.shape[1], device=x.device)
        first = torch.full_like(position, -1)  # the first token that each one sees; -1: all in the state, too
        if context.position_in_document is not None:
            first = position - context.position_in_document

        state = None if cache is None else cache.layers[self.layer_index].recurrent_states[0]
        if state is None:
            state = q.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
        outputs = []
        for start in range(0, x.shape[1], self.chunk):
            t = slice(start, start + self.chunk)
            visible = (position[t] <= position[t, None]) & (position[t] >= first[t, None])
            carried = (first[t] < start).to(state)  # whether a token's document began before the chunk
            o = (q[:, :, t] @ k[:, :, t].mT * visible) @ v[:, :, t] + (q[:, :, t] @ state) * carried[:, None]
            outputs.append(o[..., :-1] / o[..., -1:].clamp(min=1e-6))
            state = state * carried[-1] + (k[:, :, t] * visible[-1, :, None]).mT @ v[:, :, t]
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_index)
        return self.o_proj(torch.cat(outputs, dim=2).transpose(1, 2).flatten(2).to(x.dtype))
