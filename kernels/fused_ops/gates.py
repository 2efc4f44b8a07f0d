"""Gates of the recurrence, step sizes beta and log decays g in fp32: PyTorch definition, Triton kernels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_train.kernels.custom_op import custom_op
from fla_train.kernels.fused_ops.backend import resolve_backend
from fla_train.kernels.fused_ops.rms_norm import load_tile, load_weight, norm_tile, store_tile
from fla_train.kernels.fused_ops.side_by_side import as_rows, empty_gradient, row_stride
from fla_train.kernels.fused_ops.sum_rows import sum_rows
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div, next_power_of_2

GATE_TILE = 2048  # elements of b per program of the Triton kernels


def recurrence_gates(
    b: Tensor,
    a: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    beta_max: float,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Return beta = beta_max sigmoid(b) and g = -exp(A_log) softplus(a + dt_bias), differentiable in all.

    Args:
        b: [..., N H] for N Householder steps and H heads; a: [..., H], or None without forget gate.
        A_log, dt_bias: [H], None with `a`.
        beta_max: 1, or 2 for eigenvalues in [-1, 1].
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        beta and g (or None) in the shapes of `b` and `a`, float32 (float64 for float64 input).

    Raises:
        ValueError: a backend that is unknown or cannot run.
    """
    if a is not None:
        assert a.shape[:-1] == b.shape[:-1] and b.shape[-1] % a.shape[-1] == 0
        assert A_log.shape == dt_bias.shape == a.shape[-1:]
    if resolve_backend(backend, b) == "triton":
        return _Gates.apply(b, a, A_log, dt_bias, beta_max)
    wide = torch.promote_types(b.dtype, torch.float32)
    beta = beta_max * torch.sigmoid(b.to(wide))
    if a is None:
        return beta, None
    return beta, -A_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias.to(wide))


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, b, a, A_log, dt_bias, beta_max):
        b, a = [x if x is None else as_rows(x) for x in (b, a)]  # a list, as in rotary.py
        A_log, dt_bias = (x if x is None else x.contiguous() for x in (A_log, dt_bias))
        beta = b.new_empty(b.shape, dtype=torch.float32)
        g = None if a is None else a.new_empty(a.shape, dtype=torch.float32)
        recurrence_gates_forward(b, a, A_log, dt_bias, beta_max, beta, g)
        ctx.save_for_backward(b, a, A_log, dt_bias)
        ctx.beta_max = beta_max
        return beta, g

    @staticmethod
    @once_differentiable
    def backward(ctx, dbeta, dg):
        b, a, A_log, dt_bias = ctx.saved_tensors
        db, da, dparameters = empty_gradient(b), None, None
        if a is not None:
            da, dg = empty_gradient(a), dg.contiguous()
            dparameters = torch.empty(2, a.shape[-1], dtype=torch.float32, device=a.device)
        recurrence_gates_backward(
            b, a, A_log, dt_bias, ctx.beta_max, dbeta.contiguous(), dg, db, da, dparameters,
        )  # fmt: skip
        if a is None:
            return db, None, None, None, None
        dA_log, ddt_bias = dparameters.unbind()
        return db, da, dA_log.to(A_log.dtype), ddt_bias.to(dt_bias.dtype), None


@custom_op(mutates=("beta", "g"))
def recurrence_gates_forward(
    b: Tensor, a: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, beta_max: float,
    beta: Tensor, g: Tensor | None,
) -> None:  # fmt: skip
    """Fill beta and, with a forget gate, g."""
    programs, sizes = _sizes(b, a)
    gate_forward_kernel[(programs,)](
        b, a, A_log, dt_bias, beta, g, beta_max=beta_max, **_strides(b=b, a=a), **sizes
    )  # fmt: skip


@custom_op(mutates=("db", "da", "dparameters"))
def recurrence_gates_backward(
    b: Tensor, a: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, beta_max: float,
    dbeta: Tensor, dg: Tensor | None, db: Tensor, da: Tensor | None, dparameters: Tensor | None,
) -> None:  # fmt: skip
    """Fill the gradients; `dparameters` are those of A_log and dt_bias, fp32 [2, H]."""
    programs, sizes = _sizes(b, a)
    partial = None if a is None else dparameters.new_empty(programs, 2, a.shape[-1])
    gate_backward_kernel[(programs,)](
        b, a, A_log, dt_bias, dbeta, dg, db, da, partial, beta_max=beta_max,
        **_strides(b=b, a=a, db=db, da=da), **sizes,
    )  # fmt: skip
    if a is not None:
        sum_rows(partial, dparameters)


def _sizes(b: Tensor, a: Tensor | None) -> tuple[int, dict[str, Any]]:
    """Return number of programs, and the arguments that both kernels share."""
    columns, heads = b.shape[-1], 1 if a is None else a.shape[-1]
    block = next_power_of_2(columns)
    tile_rows, rows = max(1, GATE_TILE // block), b.numel() // columns
    sizes = dict(n_rows=rows, S=columns, H=heads, BR=tile_rows, BS=block, BH=next_power_of_2(heads))
    return ceil_div(rows, tile_rows), sizes | {"GATED": a is not None}


def _strides(**tensors: Tensor | None) -> dict[str, int]:
    """Return the rows' strides, by the kernels' names for them."""
    return {f"S_{name}": 0 if x is None else row_stride(x) for name, x in tensors.items()}


@triton.jit
def softplus(b_z):
    """Return log(1 + e^z) to fp32 precision: log(w) u / (w - 1) with w = 1 + u corrects the rounding of w."""
    b_u = tl.exp(-tl.abs(b_z))
    b_w = 1.0 + b_u
    b_log = tl.where(b_w == 1.0, b_u, tl.log(b_w) * (b_u / tl.where(b_w == 1.0, 1.0, b_w - 1.0)))
    return tl.maximum(b_z, 0.0) + b_log


@triton.jit(do_not_specialize=["n_rows"])
def gate_forward_kernel(
    b, a, A_log, dt_bias,  # [rows, S], [rows, H], [H], [H]
    beta, g,  # out, fp32, as b and a
    n_rows, beta_max,
    S: tl.constexpr, H: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr,
    S_b: tl.constexpr, S_a: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    o_r, o_s, m_b = norm_tile(tl.program_id(0), n_rows, S, BR, BS)
    b_b = load_tile(b + o_r * S_b, o_s, m_b)
    tl.store(beta + o_r * S + o_s, beta_max * tl.sigmoid(b_b), mask=m_b)
    if GATED:
        o_r, o_a, m_a = norm_tile(tl.program_id(0), n_rows, H, BR, BH)
        b_rate, b_bias = tl.exp(load_weight(A_log, H, BH)), load_weight(dt_bias, H, BH)
        b_z = load_tile(a + o_r * S_a, o_a, m_a) + b_bias
        tl.store(g + o_r * H + o_a, -b_rate * softplus(b_z), mask=m_a)


@triton.jit(do_not_specialize=["n_rows"])
def gate_backward_kernel(
    b, a, A_log, dt_bias, dbeta, dg,  # as above; gradients as b and a
    db, da, partial,  # out: as b, as a; fp32 [programs, 2, H] parts of the gradients of A_log and dt_bias
    n_rows, beta_max,
    S: tl.constexpr, H: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr,
    S_b: tl.constexpr, S_a: tl.constexpr, S_db: tl.constexpr, S_da: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    o_r, o_s, m_b = norm_tile(tl.program_id(0), n_rows, S, BR, BS)
    b_sigmoid = tl.sigmoid(load_tile(b + o_r * S_b, o_s, m_b))
    b_slope = beta_max * b_sigmoid * (1.0 - b_sigmoid)
    b_db = tl.load(dbeta + o_r * S + o_s, mask=m_b, other=0.0) * b_slope
    store_tile(db + o_r * S_db, o_s, b_db, m_b)
    if GATED:
        o_r, o_a, m_a = norm_tile(tl.program_id(0), n_rows, H, BR, BH)
        b_rate, b_bias = tl.exp(load_weight(A_log, H, BH)), load_weight(dt_bias, H, BH)
        b_z = load_tile(a + o_r * S_a, o_a, m_a) + b_bias
        b_slope = tl.load(dg + o_r * H + o_a, mask=m_a, other=0.0) * -b_rate
        b_da = b_slope * tl.sigmoid(b_z)
        store_tile(da + o_r * S_da, o_a, b_da, m_a)
        o_h = tl.arange(0, BH)
        p_part = partial + tl.program_id(0) * 2 * H + o_h
        tl.store(p_part, tl.sum(b_slope * softplus(b_z), 0), mask=o_h < H)
        tl.store(p_part + H, tl.sum(b_da, 0), mask=o_h < H)
