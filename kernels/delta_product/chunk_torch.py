"""The operator by chunks in plain PyTorch: matrix products over whole chunks, a short serial pass for states.

A chunk has C tokens and M = N * C sub-steps. With G the running sum of log decays inside the chunk, S the
state before it, S' the state after it, and D[t, t'] = exp(G_t - G_t') for t' <= t, else 0, the errors X that
the delta rule corrects solve a unit-triangular system (the UT transform of arXiv 2406.06484 and 2412.06464):

    A = tril(K K^T * D, -1)          X = (I + A diag(beta))^-1 (V - exp(G) K S)          U = beta X
    P = Q K^T * D                    O = scale (exp(G) Q S + P U)
    S' = exp(G_C) S + (exp(G_C - G) K)^T U

Only X, O and S' depend on S. The backward pass differentiates these lines by hand. It uses

    dV = (I + A diag(beta))^-T beta dU          d(A diag(beta)) = -tril(dV X^T, -1)
    dg_t = sum_{t' >= t} (q dq - v dv)_t' + <dS', S'>

and divides neither by beta nor by a decay. All arithmetic is in float32, or float64 for float64 inputs.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.delta_product.chunk_layout import ChunkLayout
from fla_train.kernels.delta_product.interface import L2NORM_EPS, compute_dtype

LOG_ZERO = -800.0  # exp of it is 0 even in float64; stands for -inf, of which differences would be NaN


def chunked_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor | None]:
    """`delta_product` on validated inputs; shapes and dtypes as there. Gradients of first order only."""
    run = run_chunks
    if torch.compiler.is_compiling():
        from fla_train.kernels.delta_product.chunked_traced import run_traced as run
    o, state = run(q, k, v, beta, g, initial_state, cu_seqlens, scale, qk_l2norm)
    return o, state if output_final_state else None


def run_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """o and the final state."""
    layout = ChunkLayout.of(q.shape[1], k.shape[2], cu_seqlens)
    return _ChunkedDeltaProduct.apply(q, k, v, beta, g, initial_state, scale, qk_l2norm, layout)


@dataclass(frozen=True)
class _Chunks:
    """What chunks hold besides their states. Shapes are given without the leading axes [chunks, B * H]."""

    q: Tensor  # [C, K]
    k: Tensor  # [M, K]
    v: Tensor  # [M, V]
    beta: Tensor  # [M, 1]
    q_rnorm: Tensor | None  # [C, 1] reciprocal norms, if q and k are to be divided by their norms
    k_rnorm: Tensor | None  # [M, 1]
    from_start: Tensor  # [C, 1] decay since the chunk's start
    to_end: Tensor  # [C, 1]
    across: Tensor  # [1, 1]
    pairs: Tensor  # [C, C]: D
    A: Tensor  # [M, M]
    P: Tensor  # [C, M]

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        qk_l2norm: bool,
        layout: ChunkLayout,
    ) -> "_Chunks":
        dtype = compute_dtype(q)
        q = layout.pack(q.unsqueeze(2), dtype)
        k, v = layout.pack(k, dtype), layout.pack(v, dtype)
        q_rnorm = k_rnorm = None
        if qk_l2norm:
            q_rnorm, k_rnorm = _reciprocal_norm(q), _reciprocal_norm(k)
            q, k = q.mul_(q_rnorm), k.mul_(k_rnorm)
        if g is None:
            total = q.new_zeros(*q.shape[:3], 1, dtype=torch.float64)
        else:
            total = layout.pack(g[:, :, None, :, None], torch.float64).clamp(min=LOG_ZERO).cumsum(2)
        # Sums are kept in float64, lest a token behind a closed gate lose the digits of its own small decay.
        end = total[:, :, -1:]
        future = total.new_ones(total.shape[2], total.shape[2], dtype=torch.bool).triu(1)
        pairs = (total - total.mT).to(dtype).masked_fill_(future, -torch.inf).exp_()
        return _Chunks(
            *(q, k, v, layout.pack(beta.unsqueeze(-1), dtype), q_rnorm, k_rnorm),
            from_start=total.exp().to(dtype),
            to_end=(end - total).exp().to(dtype),
            across=end.exp().to(dtype),
            pairs=pairs,
            A=_decayed(k @ k.mT, pairs).tril_(-1),
            P=_decayed(q @ k.mT, pairs),
        )

    def tensors(self) -> list[Tensor | None]:
        """The fields, in order."""
        return [getattr(self, field.name) for field in fields(self)]

    def by_substep(self, x: Tensor) -> Tensor:
        """[C, 1] -> [M, 1]."""
        substeps = self.k.shape[2] // self.q.shape[2]
        return x if substeps == 1 else x.repeat_interleave(substeps, dim=2)

    def decayed(self, x: Tensor) -> Tensor:
        """Multiply [C or M, M] by D in place."""
        return _decayed(x, self.pairs)


def _decayed(x: Tensor, pairs: Tensor) -> Tensor:
    """Multiply [C or M, M] in place by `pairs` [C, C], one factor per pair of tokens."""
    size = pairs.shape[-1]
    blocks = x.view(*x.shape[:2], size, x.shape[2] // size, size, x.shape[3] // size)
    blocks *= pairs[:, :, :, None, :, None]
    return x


class _ChunkedDeltaProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, g, initial_state, scale, qk_l2norm, layout):
        with torch.autocast(q.device.type, enabled=False):
            chunks = _Chunks.of(q, k, v, beta, g, qk_l2norm, layout)
            identity = torch.eye(chunks.A.shape[-1], dtype=chunks.A.dtype, device=q.device)
            inverse = torch.linalg.solve_triangular(
                chunks.A * chunks.beta.mT, identity, upper=False, unitriangular=True
            )
            X = inverse @ chunks.v
            reads = inverse @ (chunks.by_substep(chunks.from_start) * chunks.k)  # [M, K]: X -= reads @ S
            writes = chunks.by_substep(chunks.to_end) * chunks.beta * chunks.k  # [M, K]: S' += writes^T X

            sequences, heads = len(layout.first), X.shape[1]
            states = X.new_zeros(len(layout.slots) + sequences, heads, q.shape[-1], v.shape[-1])
            if initial_state is not None:
                states[layout.first] = initial_state.reshape(sequences, *states.shape[1:])
            for c, slot in enumerate(layout.slots):
                X[c].baddbmm_(reads[c], states[slot], alpha=-1)
                torch.mul(states[slot], chunks.across[c], out=states[slot + 1])
                states[slot + 1].baddbmm_(writes[c].mT, X[c])

            o = chunks.from_start * (chunks.q @ layout.before(states))
            o += chunks.P @ (chunks.beta * X)
            o *= scale
            final_state = states[layout.last].reshape(-1, q.shape[2], *states.shape[2:])
        ctx.save_for_backward(q, k, v, beta, g, initial_state, inverse, X, states, reads, *chunks.tensors())
        ctx.scale, ctx.qk_l2norm, ctx.layout = scale, qk_l2norm, layout
        ctx.set_materialize_grads(False)
        return layout.unpack(o, like=q.unsqueeze(2)).squeeze(2), final_state

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, d_final_state):
        q, k, v, beta, g, initial_state, inverse, X, states, reads, *kept = ctx.saved_tensors
        layout, chunks = ctx.layout, _Chunks(*kept)
        with torch.autocast(q.device.type, enabled=False):
            from_start, to_end = chunks.by_substep(chunks.from_start), chunks.by_substep(chunks.to_end)
            d_o = X.new_zeros(*q.shape[:3], X.shape[-1]) if d_o is None else d_o
            d_o = layout.pack(d_o.unsqueeze(2), X.dtype).mul_(ctx.scale)
            d_o_start = chunks.from_start * d_o

            # Back through the states. Only dU of each chunk and dS before it depend on dS' behind it.
            dU = chunks.P.mT @ d_o
            writes = to_end * chunks.k
            reads = chunks.beta * reads
            d_states = torch.zeros_like(states)
            d_states[layout.slots] = chunks.q.mT @ d_o_start
            if d_final_state is not None:
                d_states[layout.last] = d_final_state.reshape(-1, *states.shape[1:])
            for c, slot in reversed(list(enumerate(layout.slots))):
                dU[c].baddbmm_(writes[c], d_states[slot + 1])
                d_states[slot].addcmul_(d_states[slot + 1], chunks.across[c])
                d_states[slot].baddbmm_(reads[c].mT, dU[c], alpha=-1)
            S, dS = layout.before(states), layout.after(d_states)

            U = chunks.beta * X
            dV = inverse.mT @ (chunks.beta * dU)
            dA_beta = (dV @ X.mT).neg_().tril_(-1)
            d_beta = (dU * X).sum(-1, keepdim=True) + (chunks.A * dA_beta).sum(-2).unsqueeze(-1)
            dA = chunks.decayed(dA_beta.mul_(chunks.beta.mT))
            dP = chunks.decayed(d_o @ U.mT)
            dQ = d_o_start @ S.mT
            dQ += dP @ chunks.k
            dK = to_end * (U @ dS.mT)
            dK -= from_start * (dV @ S.mT)
            dK += dP.mT @ chunks.q
            dK += (dA + dA.mT) @ chunks.k

            d_g = None
            if g is not None:
                by_token = (chunks.q * dQ).sum(-1) - _per_token(chunks.v * dV, k.shape[2])
                later = by_token.flip(-1).cumsum(-1).flip(-1)  # [chunks, B * H, C]
                d_g = later + (dS * layout.after(states)).sum((-2, -1)).unsqueeze(-1)
                d_g = layout.unpack(d_g.unsqueeze(-1), like=g.unsqueeze(2))[:, :, 0, :, 0]
                d_g = d_g.masked_fill(g <= LOG_ZERO, 0.0)
            if ctx.qk_l2norm:
                dQ = _normalised_backward(dQ, chunks.q, chunks.q_rnorm)
                dK = _normalised_backward(dK, chunks.k, chunks.k_rnorm)
            d_initial = None
            if initial_state is not None:
                d_initial = d_states[layout.first].reshape(initial_state.shape)
        return (
            layout.unpack(dQ, like=q.unsqueeze(2)).squeeze(2),
            layout.unpack(dK, like=k),
            layout.unpack(dV, like=v),
            layout.unpack(d_beta, like=beta.unsqueeze(-1)).squeeze(-1),
            d_g,
            d_initial,
            None,
            None,
            None,
        )


def _per_token(x: Tensor, substeps: int) -> Tensor:
    """Sum [M, D] over the features and the sub-steps of each token -> [C]."""
    return x.view(*x.shape[:2], -1, substeps * x.shape[-1]).sum(-1)


def _reciprocal_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def _normalised_backward(grad: Tensor, normalised: Tensor, rnorm: Tensor) -> Tensor:
    """Gradient of x from that of x * rnorm(x)."""
    return rnorm * (grad - normalised * (normalised * grad).sum(-1, keepdim=True))
