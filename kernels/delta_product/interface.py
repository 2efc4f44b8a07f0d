"""The operator's contract: what is accepted, what runs it, and the arithmetic every backend shares.

    S   <- exp(g_t) S                                        forget gate, once per token (absent without gate)
    S   <- S + beta_tj k_tj (v_tj - S^T k_tj)^T              for each sub-step j = 1..N
    o_t  = scale * S^T q_t                                   read once, after the last sub-step

This is Gated DeltaProduct (arXiv 2502.10297, section 4); N = 1 is (Gated) DeltaNet. The checks read shapes,
dtypes and devices, and values only where they lie in host memory, so that none waits for an accelerator.
"""

import math
import os
from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor

from fla_train.kernels.delta_product.stretches import run_in_stretches, run_recomputed

BACKENDS = ("recurrent", "chunked", "triton")
BACKEND_VARIABLE = "FLA_TRAIN_BACKEND"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
L2NORM_EPS = 1e-6


class OperatorInputs(TypedDict):
    """Validated arguments of one call, exactly those a backend takes; `scale` is resolved."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, N, H, K]
    v: Tensor  # [B, T, N, H, V]
    beta: Tensor  # [B, T, N, H]
    g: Tensor | None  # [B, T, H]
    scale: float
    initial_state: Tensor | None  # [B or S, H, K, V]
    output_final_state: bool
    cu_seqlens: Tensor | None  # [S + 1]
    qk_l2norm: bool


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
    recompute: bool | int = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run the (gated) delta-product recurrence over whole sequences.

    Args:
        q: queries [B, T, H, K]; float32, bfloat16, float16 or float64, and `k` and `v` alike.
        k: keys [B, T, N, H, K], N sub-steps per token. The recurrence needs |k| <= 1: see `qk_l2norm`.
        v: values [B, T, N, H, V].
        beta: step sizes in [0, 2], [B, T, N, H], float32 (float64 for float64 queries).
        g: logarithm of the forget gate, <= 0, -inf allowed, [B, T, H], dtype as `beta`; None: no gate.
        scale: factor of the output, default K ** -0.5.
        initial_state: [B, H, K, V], or [S, H, K, V] with `cu_seqlens`; dtype as `beta`; None: zeros.
        output_final_state: also return the state after the last token of each sequence.
        cu_seqlens: int32 or int64 [S + 1], boundaries 0 = c_0 <= ... <= c_S = T of S documents packed in one
            row (B = 1). The state starts anew at each boundary; documents may be empty.
        qk_l2norm: divide every query and key vector by sqrt(|x|^2 + 1e-6) first, in float32.
        recompute: True: keep nothing but the inputs for the backward, which then runs the forward again. A
            number of tokens: also the states between stretches of so many, and run one stretch again at a
            time, which lowers the peak of memory. Multiples of a chunk, 64 // N tokens, waste nothing.
        backend: "recurrent", "chunked", "triton" or "auto" (see `resolve_backend`).

    Returns:
        o [B, T, H, V] in the dtype of `q`; the final state [B or S, H, K, V] in the dtype of `beta`, or None.

    Raises:
        ValueError: on any argument that breaks this contract, or a backend that cannot run on the device.
    """
    inputs = validate_inputs(
        q, k, v, beta, g, scale, initial_state, output_final_state, cu_seqlens, qk_l2norm
    )
    if not is_recompute(recompute):
        raise ValueError(f"recompute is {recompute!r}, expected False, True or a number of tokens >= 1")
    run = load_backend(resolve_backend(backend, q.device))
    if recompute is False or not torch.is_grad_enabled():
        return run(**inputs)
    if recompute is True or recompute >= q.shape[1]:
        return run_recomputed(run, **inputs)
    return run_in_stretches(run, recompute, **inputs)


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
    v [B, N, H, V], beta [B, N, H], g [B, H]. `state` [B, H, K, V], in the dtype of `beta` or in bfloat16 to
    save memory (the arithmetic stays as it is, the new state is rounded), is read and left as it was.
    `backend="triton"` is one kernel, without gradients and for at most float32; any other is the definition
    in PyTorch. "auto" takes the kernel on a GPU where it can.

    Returns:
        o [B, H, V] in the dtype of `q`, and the new state [B, H, K, V] in the dtype of `state`.

    Raises:
        ValueError: as `delta_product`; for triton also where gradients are recorded, and for float64.
    """
    _check_tensors(q, k, v, beta, g, leading="B")
    _check_state("state", state, q, v, beta, q.shape[0], torch.bfloat16)
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
                "the triton step takes no torch.float64 and records no gradients: use torch.no_grad() or "
                "backend=recurrent"
            )
    from fla_train.kernels.delta_product.recurrent import recurrent_step

    return recurrent_step(q, k, v, beta, g, **options)


def is_recompute(value: object) -> bool:
    """Whether `delta_product` takes it for `recompute`."""
    return isinstance(value, int) and (value is False or value >= 1)


def resolve_backend(backend: str, device: torch.device) -> str:
    """The backend that runs: the argument, else `FLA_TRAIN_BACKEND`, else triton on CUDA, chunked elsewhere.

    Raises:
        ValueError: for a name that is not in `BACKENDS`, and for triton on a device that it cannot run on.
    """
    source = "backend"
    if backend == "auto":
        backend, source = os.environ.get(BACKEND_VARIABLE) or "auto", BACKEND_VARIABLE
    if backend == "auto":
        return "triton" if device.type == "cuda" else "chunked"
    if backend not in BACKENDS:
        raise ValueError(f"{source}={backend!r} is unknown: choose auto, {', '.join(BACKENDS)}")
    if backend == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{source}='triton' needs a CUDA device, got {device}: choose auto, chunked or recurrent"
        )
    return backend


def load_backend(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function `<name>_delta_product` of module `name`, imported on first use (triton loads slowly).

    By statements, because torch.compile cannot trace `import_module`.
    """
    if name == "triton":
        from fla_train.kernels.delta_product.triton.chunk import triton_delta_product as run
    elif name == "chunked":
        from fla_train.kernels.delta_product.chunk_torch import chunked_delta_product as run
    else:
        from fla_train.kernels.delta_product.recurrent import recurrent_delta_product as run
    return run


def compute_dtype(q: Tensor) -> torch.dtype:
    """Dtype of beta, gates, states and all arithmetic: float64 for float64 queries, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) along the last axis, in the dtype of `x`: cast to `compute_dtype` first."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def validate_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
) -> OperatorInputs:
    """Check the arguments of `delta_product` and resolve `scale`; ValueError names the tensor at fault."""
    _check_tensors(q, k, v, beta, g, leading="BT")
    sequences = q.shape[0]
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, q)
        sequences = cu_seqlens.numel() - 1
    if initial_state is not None:
        _check_state("initial_state", initial_state, q, v, beta, sequences)
    return {
        **{"q": q, "k": k, "v": v, "beta": beta, "g": g, "scale": _scale(scale, q)},
        **{"initial_state": initial_state, "output_final_state": output_final_state},
        **{"cu_seqlens": cu_seqlens, "qk_l2norm": qk_l2norm},
    }


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, leading: str) -> None:
    """`leading` names the axes before N and H: "BT" for sequences, "B" for one step."""
    layouts = {
        "q": (q, f"{leading}HK"),
        "k": (k, f"{leading}NHK"),
        "v": (v, f"{leading}NHV"),
        "beta": (beta, f"{leading}NH"),
        "g": (g, f"{leading}H"),
    }
    sizes: dict[str, int] = {}
    for name, (tensor, axes) in layouts.items():
        if tensor is None and name == "g":
            continue
        if tensor.dim() != len(axes):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, expected {len(axes)} axes [{', '.join(axes)}]"
            )
        for axis, size in zip(axes, tensor.shape, strict=True):
            if size < 1 or sizes.setdefault(axis, size) != size:
                expected = sizes.get(axis, "at least 1")
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}: "
                    f"axis {axis} of [{', '.join(axes)}] is {size}, expected {expected}"
                )
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, expected {q.device} (the device of q)")
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    for name in ("k", "v"):
        if layouts[name][0].dtype != q.dtype:
            raise ValueError(f"{name} is {layouts[name][0].dtype}, expected {q.dtype} (the dtype of q)")
    for name, tensor in (("beta", beta), ("g", g)):
        if tensor is not None and tensor.dtype != compute_dtype(q):
            raise ValueError(f"{name} is {tensor.dtype}, expected {compute_dtype(q)} for q in {q.dtype}")
    # A NaN passes on purpose: it belongs to the caller's own watch for diverging losses.
    if _readable(beta) and bool(((beta < 0) | (beta > 2)).any()):
        raise ValueError(f"beta lies in [{beta.min():.4g}, {beta.max():.4g}], expected [0, 2]")
    if g is not None and _readable(g) and bool((g > 0).any()):
        raise ValueError(f"g reaches {g.max():.4g}, expected a log decay <= 0")


def _check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    batch, tokens = q.shape[:2]
    if batch != 1:
        raise ValueError(f"q has batch {batch}, expected 1 with cu_seqlens: pack the documents in one row")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}, expected [S + 1] with S >= 1")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype}, expected torch.int32 or torch.int64")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, expected {q.device} (the device of q)")
    if _readable(cu_seqlens):
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if (first, last) != (0, tokens) or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens runs from {first} to {last}, expected non-decreasing from 0 to T = {tokens}"
            )


def _check_state(
    name: str, state: Tensor, q: Tensor, v: Tensor, beta: Tensor, sequences: int, *also: torch.dtype
) -> None:
    expected = [sequences, q.shape[-2], q.shape[-1], v.shape[-1]]
    if list(state.shape) != expected:
        raise ValueError(f"{name} has shape {list(state.shape)}, expected [sequences, H, K, V] = {expected}")
    if state.dtype not in (beta.dtype, *also):
        raise ValueError(f"{name} is {state.dtype}, expected {beta.dtype} for q in {q.dtype}")
    if state.device != q.device:
        raise ValueError(f"{name} is on {state.device}, expected {q.device} (the device of q)")


def _scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return q.shape[-1] ** -0.5
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}, expected a finite number")
    return float(scale)


def _readable(tensor: Tensor) -> bool:
    """Whether its values can be looked at for free: in host memory, and real rather than being traced."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
