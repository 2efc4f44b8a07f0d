"""Causal depthwise convolution over time followed by SiLU, on packed documents or continuing a sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels.neighbours.backend import resolve_backend

MAX_TAPS = 4  # of the Triton kernel, which keeps the inputs before a token in registers


def short_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    state: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """y_t = silu(sum_s weight[:, 0, W-1-s] * x_{t-s}) for shifts s = 0 .. W-1, differentiable in all tensors.

    Args:
        x: [B, T, D]. The triton backend computes in float32, the torch backend in the dtype of `x`.
        weight: [D, 1, W], as a depthwise `nn.Conv1d` keeps it.
        state: the W-1 inputs before x, [B, D, W-1]; zeros when absent.
        offsets: distance of each token from its document's start, integers [T], for documents packed in one
            row (B = 1); taps never reach beyond it.
        backend: "torch", "triton" or "auto" (see `resolve_backend`).

    Returns:
        y [B, T, D] in the dtype of `x`, and the last W-1 inputs [B, D, W-1] to continue from.

    Raises:
        ValueError: for shapes that do not fit, `state` together with `offsets`, or a backend that cannot run.
    """
    (batch, length, channels), width = x.shape, weight.shape[-1]
    if weight.shape != (channels, 1, width):
        raise ValueError(f"weight has shape {list(weight.shape)}, expected [D, 1, W] with D = {channels}")
    if state is not None and state.shape != (batch, channels, width - 1):
        raise ValueError(
            f"state has shape {list(state.shape)}, expected [B, D, W-1] = {[batch, channels, width - 1]}"
        )
    if offsets is not None:
        if state is not None:
            raise ValueError("state continues one sequence, offsets start documents: give one of them")
        if batch != 1 or offsets.shape != (length,):
            raise ValueError(
                f"offsets has shape {list(offsets.shape)} for x of {list(x.shape)}: expected [T] and batch 1"
            )
    limit = None if width <= MAX_TAPS else f"takes at most {MAX_TAPS} taps, got {width}"
    backend = resolve_backend(backend, x, limit)

    if backend == "torch":
        return torch_short_convolution(x, weight, state, offsets)
    from fla_train.kernels.neighbours.convolution_triton import triton_short_convolution

    if state is None:
        return triton_short_convolution(x, weight, offsets), _last_inputs(x, width - 1)
    x = torch.cat([state.transpose(1, 2).to(x.dtype), x], dim=1)
    return triton_short_convolution(x, weight, None)[:, width - 1 :], _last_inputs(x, width - 1)


def torch_short_convolution(
    x: Tensor, weight: Tensor, state: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The definition, as W shifted multiply-adds.

    On CPUs that is as fast as a grouped `conv1d`, needs no transposes, and makes the reset at document
    boundaries a mask per shift.
    """
    length, history = x.shape[1], weight.shape[-1] - 1
    if state is None:
        x = F.pad(x, (0, 0, history, 0))
    else:
        x = torch.cat([state.transpose(1, 2).to(x.dtype), x], dim=1)
    taps = weight[:, 0].to(x.dtype).unbind(-1)
    y = x[:, history:] * taps[-1]
    for shift in range(1, history + 1):
        past = x[:, history - shift : history - shift + length]
        if offsets is not None:
            past = past * (offsets >= shift).to(x.dtype)[:, None]
        y = torch.addcmul(y, past, taps[-1 - shift])
    return F.silu(y), x[:, length:].transpose(1, 2)


def _last_inputs(x: Tensor, count: int) -> Tensor:
    """The last `count` tokens of x [B, T, D] as [B, D, count], zeros before its first."""
    missing = max(count - x.shape[1], 0)
    last = x[:, x.shape[1] + missing - count :]
    return (F.pad(last, (0, 0, missing, 0)) if missing else last).transpose(1, 2)
