"""DeltaProduct mixer: projections, short convolutions, the operator, output norm."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from fla_train.kernels.context_parallel import context_parallel_delta_product, receive_inputs, send_inputs
from fla_train.kernels.delta_product.interface import delta_product, delta_product_step
from fla_train.kernels.fused_ops.gates import recurrence_gates
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.context import SequenceContext
from fla_train.models.layer_sizes import training_flops
from fla_train.models.layers import RMSNorm, ShortConvolution, draw_time_steps, norm_project, project

# As in Mamba-2, A = exp(A_log) is drawn uniformly.
A_RANGE = (0.0, 16.0)


class DeltaProductMixer(nn.Module):
    """(Gated) DeltaProduct over [B, T, hidden_size] (arXiv 2502.10297, section 3; n_h = 1: (Gated) DeltaNet).

        q, k, v = silu(conv(W x))
        beta    = sigmoid(W_b x), doubled for eigenvalues in [-1, 1]
        g       = -exp(A_log) softplus(W_a x + dt_bias)            with the forget gate
        y       = W_o rmsnorm(delta_product(q, k, v, beta, g))     rmsnorm * silu(W_g x) with the output gate

    Names and row order follow flash-linear-attention: the rows of `k_proj` are (N, H, K), of `v_proj`
    (N, HV, V), of `b_proj` (N, HV), so the operator's layout is a view of each projection. HV =
    `config.value_heads` is a multiple of H; value heads share the queries and keys of a head.
    """

    def __init__(self, config: DeltaProductConfig, layer_index: int = 0) -> None:
        super().__init__()
        self.config, self.layer_index = config, layer_index
        num_householder, heads = config.num_householder, config.value_heads
        key_size, value_size = config.num_heads * config.head_dim, heads * config.head_v_dim

        def linear(rows: int) -> nn.Linear:
            return nn.Linear(config.hidden_size, rows, bias=False)

        self.q_proj, self.k_proj = linear(key_size), linear(num_householder * key_size)
        self.v_proj, self.b_proj = linear(num_householder * value_size), linear(num_householder * heads)
        if config.use_forget_gate:
            self.a_proj = linear(heads)
            self.A_log = nn.Parameter(torch.empty(heads))
            self.dt_bias = nn.Parameter(torch.empty(heads))
            self.A_log._no_weight_decay = self.dt_bias._no_weight_decay = True
        if config.use_short_conv:
            self.q_conv1d = ShortConvolution(key_size, config.conv_size)
            self.k_conv1d = ShortConvolution(num_householder * key_size, config.conv_size)
            self.v_conv1d = ShortConvolution(num_householder * value_size, config.conv_size)
        self.g_proj = linear(value_size) if config.use_output_gate else None
        self.o_norm = RMSNorm(config.head_v_dim, config.o_norm_eps or config.norm_eps)
        self.o_proj = nn.Linear(value_size, config.hidden_size, bias=False)
        self.beta_max = 2.0 if config.allow_neg_eigval else 1.0
        with torch.random.fork_rng(devices=[]):  # a model draws again, from an unchanged random stream
            self.init_weights(config.initializer_range)

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """Draw the parameters of the decay. `init.*` skip tensors that a checkpoint has filled."""
        if self.config.use_forget_gate:
            empty = torch.empty_like(self.A_log, dtype=torch.float32)
            init.copy_(self.A_log, empty.uniform_(*A_RANGE).clamp(min=1e-4).log())
            init.copy_(self.dt_bias, draw_time_steps(empty))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs to train on a token, forward and backward, for any `seq_len`."""
        return training_flops(self.config)

    def forward(
        self, x: Tensor, context: SequenceContext | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Mix x [B, T, hidden_size]; this layer's states in `cache` are updated in place.

        Padding has no effect, because its inputs to the convolutions are zero and beta = g = 0 keep the
        state.
        """
        context = context or SequenceContext()
        if context.padding_mask is not None:
            x = x * context.padding_mask[..., None].to(x.dtype)
        num_householder, heads = self.config.num_householder, self.config.num_heads
        names = "qkv" + "g" * self.config.use_output_gate + "b" + "a" * self.config.use_forget_gate
        projections = project(x, *(getattr(self, f"{name}_proj") for name in names))
        y = dict(zip(names, projections, strict=True))
        q, k, v = self._convolve([y[name] for name in "qkv"], context, cache)
        q = q.unflatten(-1, (heads, self.config.head_dim))
        k = k.unflatten(-1, (num_householder, heads, self.config.head_dim))
        v = v.unflatten(-1, (num_householder, self.config.value_heads, self.config.head_v_dim))
        forget = (y["a"], self.A_log, self.dt_bias) if "a" in y else (None, None, None)
        beta, g = recurrence_gates(y["b"], *forget, beta_max=self.beta_max)
        beta = beta.unflatten(-1, (num_householder, self.config.value_heads))
        if context.padding_mask is not None:
            beta = beta * context.padding_mask[..., None, None]
            g = g if g is None else g * context.padding_mask[..., None]

        o = self._recur(self.operator_inputs(q, k, v, beta, g), context, cache)  # [B, T, HV, V]
        return norm_project(self.o_norm, o, y.get("g"), self.o_proj)

    def operator_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return the inputs of the operator, here unchanged. A subclass can change the recurrence here.

        Args:
            q: queries [B, T, H, K] before their normalisation; the operator normalises q and k.
            k: keys [B, T, N, H, K] before their normalisation.
            v: values [B, T, N, HV, V].
            beta: step sizes [B, T, N, HV] from 0 to 2, fp32, 0 at padding.
            g: log decays [B, T, HV] <= 0, fp32; None: no forget gate.
        """
        return q, k, v, beta, g

    def _convolve(self, ys: list[Tensor], context: SequenceContext, cache: Cache | None) -> list[Tensor]:
        """Apply convolution and SiLU to the projections q, k and v [B, T, D].

        Earlier inputs come from the cache or the previous part; the last inputs go to the cache or the next.
        """
        if not self.config.use_short_conv:
            convolved = [F.silu(y) for y in ys]
            # Without empty states the cache would count the layer as not run.
            last = [y.new_empty(len(y), 0, 0) for y in ys]
        else:
            history, position = self.config.conv_size - 1, context.position_in_document
            past: Sequence[Tensor | None] = (None,) * 3
            if context.part is not None:
                past = receive_inputs(ys, history, context.part, self.layer_index)
            elif cache is not None:
                states = cache.layers[self.layer_index].conv_states
                past = [states[i] for i in range(3)]
            convolutions = (getattr(self, f"{name}_conv1d") for name in "qkv")
            both = [
                convolution(y, before, position)
                for convolution, y, before in zip(convolutions, ys, past, strict=True)
            ]
            convolved, last = [y for y, _ in both], [state for _, state in both]
            if context.part is not None:
                convolved[-1] = send_inputs(convolved[-1], last, context.part, self.layer_index)
        if cache is not None:
            for i, state in enumerate(last):
                cache.update_conv_state(state, self.layer_index, state_idx=i)
        return convolved

    def _recur(
        self, inputs: Sequence[Tensor | None], context: SequenceContext, cache: Cache | None
    ) -> Tensor:
        """Run the operator over T tokens, or its one-token step if one token follows a state."""
        state = None if cache is None else cache.layers[self.layer_index].recurrent_states[0]
        options = {"qk_l2norm": True, "backend": self.config.backend}
        if context.part is not None:
            options |= {"cu_seqlens": context.cu_seqlens, "recompute": self.config.recompute_operator}
            options |= {"part": context.part, "layer": self.layer_index}
            return context_parallel_delta_product(*inputs, **options)
        if state is not None and inputs[0].shape[1] == 1:
            now = [None if tensor is None else tensor[:, 0] for tensor in inputs]
            o, final = delta_product_step(*now, state=state, **options)
            cache.update_recurrent_state(final, self.layer_index)
            return o[:, None]
        # Documents inside a row start from zeros.
        if state is not None and context.first_documents is not None:
            rows, state = state, state.new_zeros(len(context.cu_seqlens) - 1, *state.shape[1:])
            state[context.first_documents] = rows
        o, final = delta_product(
            *inputs,
            initial_state=state,
            output_final_state=cache is not None,
            cu_seqlens=context.cu_seqlens,
            recompute=self.config.recompute_operator,
            **options,
        )
        if cache is not None:
            if context.last_documents is not None:
                final = final[context.last_documents]
            cache.update_recurrent_state(final, self.layer_index)
        return o
