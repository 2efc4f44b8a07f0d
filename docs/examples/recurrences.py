"""Recurrences that run token by token: two baselines of arXiv 2411.12537.

    SLSTM        (arXiv 2405.04517) has exponential gates, a normalizer n, a stabilizer m, and a block of R
                 for each head. No convolution precedes its gates:

        i, f, z, o = W x_t + R h_{t-1} + b,    m_t = max(log sigmoid(f) + m_{t-1}, i)
        c_t = f' c_{t-1} + i' tanh(z),         f' = exp(log sigmoid(f) + m_{t-1} - m_t)
        n_t = f' n_{t-1} + i',                 i' = exp(i - m_t)
        h_t = sigmoid(o) c_t / n_t

    FullMatrix   (appendix E.2.1) has a full matrix A(x) = I + U(x) for each token, from H_0 = I:

        H_t = A(x_t) H_{t-1},                  o_t = H_t / max(1, |H_t|)

The block adds a residual and an MLP, where the paper's full matrix has only a linear decoder.

    fla-train experiment=formal/parity scale=cpu model.mixer=recurrences:SLSTM trainer.max_steps=600 \\
        optimizer.lr=3e-3 'task.curriculum=[[6,150],[12,100],[24,100]]'
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.context import SequenceContext


class Recurrence(nn.Module):
    """A recurrence from a state of zeros [B, *shape].

    A subclass has `step`, from a state and a token's inputs [B, inputs] to the next state, and `read`, from a
    state to outputs [B, outputs].
    """

    def __init__(
        self, config: DeltaProductConfig, layer_index: int, shape: tuple[int, ...], inputs: int, outputs: int
    ) -> None:
        super().__init__()
        self.layer_index, self.shape = layer_index, shape
        self.in_proj = nn.Linear(config.hidden_size, inputs)
        self.o_proj = nn.Linear(outputs, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, context: SequenceContext | None = None, cache: Cache | None = None
    ) -> Tensor:
        context = context or SequenceContext()
        inputs = self.in_proj(x).to(torch.promote_types(x.dtype, torch.float32))
        state = None if cache is None else cache.layers[self.layer_index].recurrent_states[0]
        if state is None:
            state = inputs.new_zeros(len(x), *self.shape)
        outputs = []
        for t in range(x.shape[1]):
            if context.position_in_document is not None:
                state = state * (context.position_in_document[t] > 0)
            after = self.step(state, inputs[:, t])
            if context.padding_mask is not None:
                after = after.where(context.padding_mask[:, t].view(-1, *[1] * len(self.shape)), state)
            outputs.append(self.read(state := after))
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_index)
        return self.o_proj(torch.stack(outputs, dim=1).to(x.dtype))


class SLSTM(Recurrence):
    def __init__(self, config: DeltaProductConfig, layer_index: int = 0) -> None:
        heads, size = config.num_heads, config.head_dim
        super().__init__(config, layer_index, (4, heads, size), 4 * heads * size, heads * size)
        self.recurrent = nn.Parameter(torch.empty(heads, size, 4 * size))
        self.init_weights(config.initializer_range)

    def init_weights(self, std: float) -> None:
        nn.init.normal_(self.recurrent, std=self.recurrent.shape[1] ** -0.5)

    def step(self, state: Tensor, inputs: Tensor) -> Tensor:
        h, c, n, m = state.unbind(1)  # [B, H, d]
        gates = inputs.unflatten(-1, (h.shape[1], -1)) + torch.einsum("bhd,hde->bhe", h, self.recurrent.to(h))
        i, f, z, o = gates.chunk(4, dim=-1)
        kept = F.logsigmoid(f) + m
        m = torch.maximum(kept, i)
        keep, write = (kept - m).exp(), (i - m).exp()
        c, n = keep * c + write * z.tanh(), keep * n + write
        return torch.stack([o.sigmoid() * c / n, c, n, m], dim=1)

    def read(self, state: Tensor) -> Tensor:
        return F.layer_norm(state[:, 0], state.shape[-1:]).flatten(1)  # of each head


class FullMatrix(Recurrence):
    def __init__(self, config: DeltaProductConfig, layer_index: int = 0, *, size: int = 32) -> None:
        super().__init__(config, layer_index, (size, size), size**2, size**2)

    def step(self, state: Tensor, inputs: Tensor) -> Tensor:
        u = inputs.view_as(state) / state.shape[1] ** 0.5  # the state is H - I
        return state + u + u @ state

    def read(self, state: Tensor) -> Tensor:
        h = (state + torch.eye(self.shape[0], dtype=state.dtype, device=state.device)).flatten(1)
        return h / h.norm(dim=1, keepdim=True).clamp(min=1)
