"""Interface of the operator `delta_product`: notation, argument checks, choice of the backend.

    S   <- exp(g_t) S                                  forget gate, once per token (absent without gate)
    S   <- S + beta_tj k_tj (v_tj - S^T k_tj)^T        for each Householder step j = 1 .. N
    o_t  = scale * S^T q_t                             after the last step

This is Gated DeltaProduct (arXiv 2502.10297, section 3); N = n_h = 1 is (Gated) DeltaNet. Shapes count B
sequences, T tokens, H heads, N Householder steps per token, K key and V value channels. A head of q and k may
serve several consecutive value heads, HV / H of them: it is repeated for the backends in PyTorch, and read
where it is by Triton's. All backends, kernels, tests and pages use the notation below, with symbols of arXiv
2406.06484 and 2412.06464. A chunk has C tokens and M = N C Householder steps; `.*` is elementwise, where each
step uses the factor of its token.

    S, S'   [K, V]   state before and after the chunk
    g_cum   [C]      cumulative log decay: sum of g from the chunk's start to a token
    D       [C, C]   exp(g_cum_i - g_cum_j) for tokens j <= i, else 0
    A       [M, M]   tril(K K^T .* D, -1), the strictly lower triangular scores of the keys
    T       [M, M]   (I + A diag(beta))^-1, the inverse of the WY form
    w       [M, K]   T (exp(g_cum) .* K)
    u       [M, V]   T V - w S, the corrected values: the errors v - S^T k of the recurrence
    P       [C, M]   scale * (Q K^T) .* D
    o       [C, V]   scale * exp(g_cum) .* (Q S) + P diag(beta) u
    S'               exp(g_cum_C) S + K^T diag(beta .* exp(g_cum_C - g_cum)) u

Argument checks read shapes, dtypes and devices, and values only of tensors in host memory, so that no call
waits for an accelerator.
"""

import math
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.checkpoint import checkpoint

from fla_train.kernels.delta_product.chunk_torch import chunk_delta_product
from fla_train.kernels.delta_product.recurrent import compute_dtype, recurrent_delta_product, recurrent_step

BACKENDS = ("recurrent", "chunk", "triton")
BACKEND_VARIABLE = "FLA_TRAIN_BACKEND"
HAS_TRITON = find_spec("triton") is not None  # not imported here, since it loads slowly
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
    recompute: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run the (gated) delta-product recurrence over whole sequences.

    Args:
        q: queries [B, T, H, K]; float32, bfloat16, float16 or float64, and `k` and `v` alike.
        k: keys [B, T, N, H, K], with |k| <= 1, which `qk_l2norm` makes true.
        v: values [B, T, N, HV, V], where HV is a multiple of H.
        beta: step sizes in [0, 2], [B, T, N, HV], float32 (float64 for float64 queries).
        g: logarithm of the forget gate, <= 0, -inf allowed, [B, T, HV], dtype as `beta`; None: no gate.
        scale: factor of the output, default K ** -0.5.
        initial_state: [B, HV, K, V], or [S, HV, K, V] with `cu_seqlens`; dtype as `beta`; None: zeros.
        output_final_state: also return the state after the last token of each sequence.
        cu_seqlens: int32 or int64 [S + 1], boundaries 0 = c_0 <= ... <= c_S = T of S documents packed in one
            row (B = 1). Each document has its state; documents may be empty.
        qk_l2norm: divide every query and key vector by sqrt(|x|^2 + 1e-6) first, in float32.
        recompute: keep only the inputs for the backward pass, which then runs the forward again; nothing may
            write to them before.
        backend: "recurrent", "chunk", "triton" or "auto" (see `resolve_backend`).

    Returns:
        o [B, T, HV, V] in the dtype of `q`; the final state [B or S, HV, K, V] in the dtype of `beta`, or
        None.

    Raises:
        ValueError: on any argument that breaks this contract, or a backend that cannot run on the device.
    """
    _check_tensors(q, k, v, beta, g, leading="B T")
    sequences = q.shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q)
        _check_place("cu_seqlens", cu_seqlens, q, torch.int32, torch.int64)
        sequences = cu_seqlens.numel() - 1
    if initial_state is not None:
        _check_state("initial_state", initial_state, q, v, sequences, beta.dtype)
    name = resolve_backend(backend, q.device)
    run = load_backend(name)
    if recompute and torch.is_grad_enabled():
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    if name != "triton":
        q, k = _by_value_head(q, k, v)
    return run(
        q=q, k=k, v=v, beta=beta, g=g, scale=_scale(scale, q), initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, qk_l2norm=qk_l2norm,
    )  # fmt: skip


def delta_product_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    state: Tensor,
    scale: float | None = None,
    qk_l2norm: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Advance the recurrence by one token (decoding).

    The arguments are those of `delta_product` without the T axis: q [B, H, K], k [B, N, H, K],
    v [B, N, HV, V], beta [B, N, HV], g [B, HV]. `state` [B, HV, K, V], in the dtype of `beta` or in bfloat16
    to save memory (the arithmetic stays as it is, the new state is rounded), is read and left as it was.
    `backend="triton"` is one kernel, without gradients and for at most float32; any other is the definition
    in PyTorch. "auto" selects the kernel on a GPU where it can.

    Returns:
        o [B, HV, V] in the dtype of `q`, and the new state [B, HV, K, V] in the dtype of `state`.

    Raises:
        ValueError: as `delta_product`; for triton also where gradients are recorded, and for float64.
    """
    _check_tensors(q, k, v, beta, g, leading="B")
    _check_state("state", state, q, v, q.shape[0], beta.dtype, torch.bfloat16)
    options = {"state": state, "scale": _scale(scale, q), "qk_l2norm": qk_l2norm}
    if resolve_backend(backend, q.device) == "triton":
        tensors = (q, k, v, beta, g, state)
        recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if not recorded and q.dtype != torch.float64:
            from fla_train.kernels.delta_product.triton.fused_recurrent import triton_step

            return triton_step(q, k, v, beta, g, **options)
        asked = os.environ.get(BACKEND_VARIABLE) if backend == "auto" else backend
        if asked == "triton":
            raise ValueError(
                "the triton step supports neither torch.float64 nor gradients: use torch.no_grad() or "
                "backend=recurrent"
            )
    return recurrent_step(*_by_value_head(q, k, v), v, beta, g, **options)


def resolve_backend(backend: str, device: torch.device) -> str:
    """Return the backend: the argument, or `FLA_TRAIN_BACKEND`, or the default if both are auto.

    The default is triton on CUDA, and chunk elsewhere or without the package triton.

    Raises:
        ValueError: the name is not in `BACKENDS`, or triton cannot run on the device.
    """
    source = "backend"
    if backend == "auto":
        backend, source = os.environ.get(BACKEND_VARIABLE) or "auto", BACKEND_VARIABLE
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"{source}={backend!r} is unknown: choose auto, {', '.join(BACKENDS)}")
    if backend == "auto":
        return "triton" if device.type == "cuda" and HAS_TRITON else "chunk"
    if backend == "triton" and not HAS_TRITON:
        raise ValueError(f"{source}='triton' needs the package triton: install it, or choose auto")
    if backend == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{source}='triton' needs a CUDA device, got {device}: choose auto, chunk or recurrent"
        )
    return backend


def load_backend(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a backend's function. Triton is imported on first use, because that is slow."""
    if name == "triton":
        from fla_train.kernels.delta_product.triton.chunk import triton_delta_product

        return triton_delta_product
    return chunk_delta_product if name == "chunk" else recurrent_delta_product


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, leading: str) -> None:
    """Check dtypes and shapes. `leading` names the axes before N and the heads: "B T", for one step "B"."""
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    dtype = compute_dtype(q)
    layouts = {
        "q": (q, f"{leading} H K", q.dtype),
        "k": (k, f"{leading} N H K", q.dtype),
        "v": (v, f"{leading} N HV V", q.dtype),
        "beta": (beta, f"{leading} N HV", dtype),
        "g": (g, f"{leading} HV", dtype),
    }
    sizes: dict[str, int] = {}
    for name, (tensor, layout, expected) in layouts.items():
        if tensor is None and name == "g":
            continue
        axes = layout.split()
        named = f"[{', '.join(axes)}]"
        if tensor.dim() != len(axes):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {len(axes)} axes {named}")
        for axis, size in zip(axes, tensor.shape, strict=True):
            if size < 1 or sizes.setdefault(axis, size) != size:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}: "
                    f"axis {axis} of {named} is {size}, expected {sizes.get(axis, 'at least 1')}"
                )
        _check_place(name, tensor, q, expected)
    if sizes["HV"] % sizes["H"]:
        raise ValueError(f"v has {sizes['HV']} heads (HV), expected a multiple of H = {sizes['H']}")
    # A NaN passes: callers look for diverging losses themselves.
    if _readable(beta) and bool(((beta < 0) | (beta > 2)).any()):
        raise ValueError(f"beta lies in [{beta.min():.4g}, {beta.max():.4g}], expected [0, 2]")
    if g is not None and _readable(g) and bool((g > 0).any()):
        raise ValueError(f"g reaches {g.max():.4g}, expected a log decay <= 0")


def check_cu_seqlens(cu_seqlens: Tensor, rows: Tensor) -> None:
    """Check bounds of the documents that are packed in `rows` [B = 1, T, ...]; values only in host memory.

    Raises:
        ValueError: they are not such bounds.
    """
    batch, tokens = rows.shape[:2]
    if batch != 1:
        raise ValueError(f"cu_seqlens packs documents in one row: expected batch 1, not {batch}")
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens is a {type(cu_seqlens).__name__}, expected a tensor [S + 1]")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}, expected [S + 1] with S >= 1")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype}, expected torch.int32 or torch.int64")
    if _readable(cu_seqlens):
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if (first, last) != (0, tokens) or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens runs from {first} to {last}, expected non-decreasing from 0 to T = {tokens}"
            )


def _check_state(
    name: str, state: Tensor, q: Tensor, v: Tensor, sequences: int, *dtypes: torch.dtype
) -> None:
    expected = [sequences, v.shape[-2], q.shape[-1], v.shape[-1]]
    if list(state.shape) != expected:
        raise ValueError(f"{name} has shape {list(state.shape)}, expected [sequences, HV, K, V] = {expected}")
    _check_place(name, state, q, *dtypes)


def _check_place(name: str, tensor: Tensor, q: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} is {tensor.dtype}, expected {expected} for q in {q.dtype}")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {q.device} (the device of q)")


def _by_value_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k with each head as often as value heads share it."""
    shared = v.shape[-2] // q.shape[-2]
    if shared == 1:
        return q, k
    return q.repeat_interleave(shared, dim=-2), k.repeat_interleave(shared, dim=-2)


def _scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return q.shape[-1] ** -0.5
    if isinstance(scale, Tensor) or not math.isfinite(scale):
        raise ValueError(f"scale is {scale}, expected a finite number (a tensor's gradient would be lost)")
    return float(scale)


def _readable(tensor: Tensor) -> bool:
    """Return whether its values can be read without waiting: in host memory, and not being traced."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not is_fake(tensor)
