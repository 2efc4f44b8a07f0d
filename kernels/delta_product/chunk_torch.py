"""The `chunk` backend: the operator by chunks in plain PyTorch, with the backward pass written by hand.

The state goes serially from chunk to chunk; all else is matrix products over all chunks at once. Notation and
formulas are those of `interface`, except that P / scale is kept and called `qk`. Only u, o and S' depend on
S. The backward pass uses

    dv = T^T (beta du)          d(A diag(beta)) = -tril(dv u^T, -1)
    dg_t = sum_{t' >= t} (q dq - v dv)_t' + <dS', S'>

and divides neither by beta nor by a decay. All arithmetic is in float32, or float64 for float64 inputs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable

from fla_train.kernels.custom_op import NAMESPACE
from fla_train.kernels.delta_product.recurrent import L2NORM_EPS, compute_dtype

MAX_CHUNK_STEPS = 64  # most Householder steps of a chunk: near the fastest on CPUs for head dims 32 to 128
LOG_ZERO = -800.0  # exp of it is 0 even in float64; stands for -inf, of which differences would be NaN


def chunk_delta_product(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *, scale: float,
    initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None, qk_l2norm: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run `delta_product` on validated inputs; shapes and dtypes as there. First-order gradients only."""
    traced = torch.compiler.is_compiling() or q.is_meta or is_fake(q)  # shapes only
    run = _chunk_op if traced else _ChunkDeltaProduct.apply
    o, state = run(q, k, v, beta, g, initial_state, cu_seqlens, scale, qk_l2norm)
    return o, state if output_final_state else None


@dataclass(frozen=True)
class ChunkLayout:
    """Describe how tokens fall into chunks, and chunks into sequences.

    The states form one list. A sequence of c chunks owns c + 1 neighbouring entries, and an empty one owns
    one entry, its initial and final state. A chunk leads from its entry to the next.
    """

    size: int  # C: tokens per chunk
    entries: list[int]  # for each chunk, the entry of the state it starts from
    first: list[int]  # for each sequence, its first and last entry
    last: list[int]
    rows: Tensor | None  # [T] row of each token among C * len(entries); None: in order from row 0

    @staticmethod
    def of(tokens: int, num_householder: int, cu_seqlens: Tensor | None) -> "ChunkLayout":
        """Return the layout of a row, or of the documents packed in it."""
        fitting = max(1, MAX_CHUNK_STEPS // num_householder)
        size = min(tokens, 1 << (fitting.bit_length() - 1))  # a power of two: odd sizes are a third slower
        lengths = [tokens] if cu_seqlens is None else cu_seqlens.diff().tolist()
        entries, first, last, rows = [], [], [], []
        for length in lengths:
            chunks, start = -(-length // size), len(entries) + len(first)
            rows.append(torch.arange(length) + len(entries) * size)
            first.append(start)
            last.append(start + chunks)
            entries.extend(range(start, start + chunks))
        in_order = len(lengths) == 1
        rows = None if in_order else torch.cat(rows).to(cu_seqlens.device)
        return ChunkLayout(size, entries, first, last, rows)

    def pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Reshape [B, T, N, H, D] to [chunks, B * H, C * N, D], zeros where a chunk has no token."""
        batch, tokens, num_householder, heads, dim = x.shape
        chunks = len(self.entries)
        total = self.size * chunks
        if self.rows is not None:
            x = x.new_zeros(batch, total, num_householder, heads, dim).index_copy_(1, self.rows, x)
        elif total > tokens:
            x = F.pad(x, (0, 0) * 3 + (0, total - tokens))
        x = x.view(batch, chunks, self.size, num_householder, heads, dim).permute(1, 0, 4, 2, 3, 5)
        x = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
        return x.view(chunks, batch * heads, self.size * num_householder, dim)

    def unpack(self, x: Tensor, like: Tensor) -> Tensor:
        """Return the inverse of `pack`, in the dtype and first four axes of `like` [B, T, N, H, .]."""
        batch, tokens, num_householder, heads = like.shape[:4]
        x = x.view(len(self.entries), batch, heads, self.size, num_householder, x.shape[-1])
        x = x.permute(1, 0, 3, 4, 2, 5)
        x = x.to(like.dtype, copy=True, memory_format=torch.contiguous_format).flatten(1, 2)
        return x[:, :tokens].contiguous() if self.rows is None else x.index_select(1, self.rows)

    def before(self, states: Tensor) -> Tensor:
        """Return the state from which each chunk starts."""
        return states[:-1] if len(self.first) == 1 else states[self.entries]

    def after(self, states: Tensor) -> Tensor:
        """Return the state in which each chunk ends."""
        return states[1:] if len(self.first) == 1 else states[[entry + 1 for entry in self.entries]]


@dataclass(frozen=True)
class _Chunks:
    """Values of chunks besides their states. Shapes are given without the leading axes [chunks, B * H]."""

    q: Tensor  # [C, K]
    k: Tensor  # [M, K]
    v: Tensor  # [M, V]
    beta: Tensor  # [M, 1]
    q_rnorm: Tensor | None  # [C, 1] reciprocal norms, if q and k are to be divided by their norms
    k_rnorm: Tensor | None  # [M, 1]
    from_start: Tensor  # [C, 1] exp(g_cum)
    to_end: Tensor  # [C, 1] exp(g_cum_C - g_cum)
    across: Tensor  # [1, 1] exp(g_cum_C)
    D: Tensor  # [C, C]
    A: Tensor  # [M, M]
    qk: Tensor  # [C, M] P / scale

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, qk_l2norm: bool, layout: ChunkLayout
    ) -> "_Chunks":
        dtype = compute_dtype(q)
        q = layout.pack(q.unsqueeze(2), dtype)
        k, v = layout.pack(k, dtype), layout.pack(v, dtype)
        q_rnorm = k_rnorm = None
        if qk_l2norm:
            q_rnorm, k_rnorm = _reciprocal_norm(q), _reciprocal_norm(k)
            q, k = q.mul_(q_rnorm), k.mul_(k_rnorm)
        # In float64: after a closed gate float32 sums would round away a token's small decay.
        if g is None:
            g_cum = q.new_zeros(*q.shape[:3], 1, dtype=torch.float64)
        else:
            g_cum = layout.pack(g[:, :, None, :, None], torch.float64).clamp(min=LOG_ZERO).cumsum(2)
        end = g_cum[:, :, -1:]
        future = g_cum.new_ones(g_cum.shape[2], g_cum.shape[2], dtype=torch.bool).triu(1)
        D = (g_cum - g_cum.mT).to(dtype).masked_fill_(future, -torch.inf).exp_()
        return _Chunks(
            *(q, k, v, layout.pack(beta.unsqueeze(-1), dtype), q_rnorm, k_rnorm),
            from_start=g_cum.exp().to(dtype),
            to_end=(end - g_cum).exp().to(dtype),
            across=end.exp().to(dtype),
            D=D,
            A=_decay_(k @ k.mT, D).tril_(-1),
            qk=_decay_(q @ k.mT, D),
        )

    def by_step(self, x: Tensor) -> Tensor:
        """Repeat the values of tokens [C, 1] for their steps [M, 1]."""
        num_householder = self.k.shape[2] // self.q.shape[2]
        return x if num_householder == 1 else x.repeat_interleave(num_householder, dim=2)


class _ChunkDeltaProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, g, initial_state, cu_seqlens, scale, qk_l2norm):
        layout = ChunkLayout.of(q.shape[1], k.shape[2], cu_seqlens)
        with torch.autocast(q.device.type, enabled=False):
            chunks = _Chunks.of(q, k, v, beta, g, qk_l2norm, layout)
            identity = torch.eye(chunks.A.shape[-1], dtype=chunks.A.dtype, device=q.device)
            system = chunks.A * chunks.beta.mT
            T = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
            u = T @ chunks.v  # minus w S, below
            w = T @ (chunks.by_step(chunks.from_start) * chunks.k)
            writes = chunks.by_step(chunks.to_end) * chunks.beta * chunks.k  # [M, K]: S' += writes^T u

            sequences, heads = len(layout.first), u.shape[1]
            states = u.new_zeros(len(layout.entries) + sequences, heads, q.shape[-1], v.shape[-1])
            if initial_state is not None:
                states[layout.first] = initial_state.reshape(sequences, *states.shape[1:])
            for c, entry in enumerate(layout.entries):
                u[c].baddbmm_(w[c], states[entry], alpha=-1)
                torch.mul(states[entry], chunks.across[c], out=states[entry + 1])
                states[entry + 1].baddbmm_(writes[c].mT, u[c])

            o = chunks.from_start * (chunks.q @ layout.before(states))
            o += chunks.qk @ (chunks.beta * u)
            o *= scale
            final_state = states[layout.last].reshape(-1, q.shape[2], *states.shape[2:])
        ctx.save_for_backward(q, k, v, beta, g, T, u, states, w, *vars(chunks).values())
        ctx.scale, ctx.qk_l2norm, ctx.layout = scale, qk_l2norm, layout
        ctx.set_materialize_grads(False)
        return layout.unpack(o, like=q.unsqueeze(2)).squeeze(2), final_state

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal_state):
        q, k, v, beta, g, T, u, states, w, *kept = ctx.saved_tensors
        layout, chunks = ctx.layout, _Chunks(*kept)
        with torch.autocast(q.device.type, enabled=False):
            from_start, to_end = chunks.by_step(chunks.from_start), chunks.by_step(chunks.to_end)
            do = u.new_zeros(*q.shape[:3], u.shape[-1]) if do is None else do
            do = layout.pack(do.unsqueeze(2), u.dtype).mul_(ctx.scale)
            do_start = chunks.from_start * do

            # Back through the states. `dbu` is the gradient of beta u: it and dS need the dS' of their chunk.
            dbu = chunks.qk.mT @ do
            writes = to_end * chunks.k
            beta_w = chunks.beta * w
            dstates = torch.zeros_like(states)
            dstates[layout.entries] = chunks.q.mT @ do_start
            if dfinal_state is not None:
                dstates[layout.last] = dfinal_state.reshape(-1, *states.shape[1:])
            for c, entry in reversed(list(enumerate(layout.entries))):
                dbu[c].baddbmm_(writes[c], dstates[entry + 1])
                dstates[entry].addcmul_(dstates[entry + 1], chunks.across[c])
                dstates[entry].baddbmm_(beta_w[c].mT, dbu[c], alpha=-1)
            S, dS_end = layout.before(states), layout.after(dstates)

            bu = chunks.beta * u
            dv = T.mT @ (chunks.beta * dbu)
            dA_beta = (dv @ u.mT).neg_().tril_(-1)
            dbeta = (dbu * u).sum(-1, keepdim=True) + (chunks.A * dA_beta).sum(-2).unsqueeze(-1)
            dA = _decay_(dA_beta.mul_(chunks.beta.mT), chunks.D)
            dqk = _decay_(do @ bu.mT, chunks.D)
            dq = do_start @ S.mT
            dq += dqk @ chunks.k
            dk = to_end * (bu @ dS_end.mT)
            dk -= from_start * (dv @ S.mT)
            dk += dqk.mT @ chunks.q
            dk += (dA + dA.mT) @ chunks.k

            dg = None
            if g is not None:
                by_token = (chunks.q * dq).sum(-1)  # [chunks, B * H, C]
                by_token = by_token - (chunks.v * dv).view(*by_token.shape, -1).sum(-1)
                later = by_token.flip(-1).cumsum(-1).flip(-1)
                dg = later + (dS_end * layout.after(states)).sum((-2, -1)).unsqueeze(-1)
                dg = layout.unpack(dg.unsqueeze(-1), like=g.unsqueeze(2))[:, :, 0, :, 0]
                dg = dg.masked_fill(g <= LOG_ZERO, 0.0)
            if ctx.qk_l2norm:
                dq = _normalised_backward(dq, chunks.q, chunks.q_rnorm)
                dk = _normalised_backward(dk, chunks.k, chunks.k_rnorm)
            dinitial_state = None
            if ctx.needs_input_grad[5]:
                dinitial_state = dstates[layout.first].reshape(-1, q.shape[2], *states.shape[2:])
        return (
            layout.unpack(dq, like=q.unsqueeze(2)).squeeze(2),
            layout.unpack(dk, like=k),
            layout.unpack(dv, like=v),
            layout.unpack(dbeta, like=beta.unsqueeze(-1)).squeeze(-1),
            dg, dinitial_state, None, None, None,
        )  # fmt: skip


def _decay_(x: Tensor, D: Tensor) -> Tensor:
    """Multiply [C or M, M] by D [C, C] in place, one factor per pair of tokens."""
    size = D.shape[-1]
    blocks = x.view(*x.shape[:2], size, x.shape[2] // size, size, x.shape[3] // size)
    blocks *= D[:, :, :, None, :, None]
    return x


def _reciprocal_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def _normalised_backward(grad: Tensor, normalised: Tensor, rnorm: Tensor) -> Tensor:
    """Return the gradient of x from that of x * rnorm(x)."""
    return rnorm * (grad - normalised * (normalised * grad).sum(-1, keepdim=True))


# torch.compile calls these two operators, because it cannot trace the function. The number of chunks of
# packed rows, which is a loop's length and a tensor's size, depends on data ("Could not extract specialized
# integer from data-dependent expression"). Tensors of such a size can't be kept for the backward pass, so it
# runs the forward pass again.
@torch.library.custom_op(f"{NAMESPACE}::chunk", mutates_args=())
def _chunk_op(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _ChunkDeltaProduct.apply(q, k, v, beta, g, initial_state, cu_seqlens, scale, qk_l2norm)


@_chunk_op.register_fake
def _(q, k, v, beta, g, initial_state, cu_seqlens, scale, qk_l2norm):
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    return q.new_empty(*q.shape[:3], v.shape[-1]), beta.new_empty(sequences, *q.shape[2:], v.shape[-1])


@torch.library.custom_op(f"{NAMESPACE}::chunk_backward", mutates_args=())
def _chunk_backward_op(
    do: Tensor, dfinal_state: Tensor, inputs: list[Tensor | None], scale: float, qk_l2norm: bool
) -> list[Tensor]:
    """Return the gradients of all inputs that are not None, except `cu_seqlens`, the last one."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs[:-1]]
    with torch.enable_grad():
        outputs = _ChunkDeltaProduct.apply(*leaves, inputs[-1], scale, qk_l2norm)
    gradients = torch.autograd.grad(outputs, [x for x in leaves if x is not None], (do, dfinal_state))
    return [x.contiguous() for x in gradients]


@_chunk_backward_op.register_fake
def _(do, dfinal_state, inputs, scale, qk_l2norm):
    dense = torch.contiguous_format  # whatever the strides of the inputs
    return [torch.empty_like(x, memory_format=dense) for x in inputs[:-1] if x is not None]


def _keep_inputs(ctx, inputs, output):
    *tensors, ctx.scale, ctx.qk_l2norm = inputs
    ctx.save_for_backward(*tensors)


def _chunk_op_backward(ctx, do, dfinal_state):
    inputs = list(ctx.saved_tensors)
    gradients = iter(_chunk_backward_op(do, dfinal_state, inputs, ctx.scale, ctx.qk_l2norm))
    return *(None if x is None else next(gradients) for x in inputs[:-1]), None, None, None


_chunk_op.register_autograd(_chunk_op_backward, setup_context=_keep_inputs)
