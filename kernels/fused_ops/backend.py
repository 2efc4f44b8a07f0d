"""Choice of backend for the fused ops: the PyTorch definition or the Triton kernels."""

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fla_train.kernels.optional_triton import INSTALLED

BACKENDS = ("torch", "triton")
BACKEND_VARIABLE = "FLA_TRAIN_FUSED_OPS"
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def resolve_backend(backend: str, x: Tensor, limit: str | None = None) -> str:
    """Return the backend: the argument, else `FLA_TRAIN_FUSED_OPS`, else triton where it can, else torch.

    Args:
        backend: "torch", "triton" or "auto".
        x: an input of the op; its device and dtype count.
        limit: why the kernel cannot run this call ("takes at most ..."), or None if it can.

    Raises:
        ValueError: the name is not in `BACKENDS`, or triton cannot run this call.
    """
    source = "backend"
    if backend == "auto":
        backend, source = os.environ.get(BACKEND_VARIABLE) or "auto", BACKEND_VARIABLE
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"{source}={backend!r} is unknown: choose auto, {', '.join(BACKENDS)}")
    if backend == "torch":
        return backend
    if x.dtype not in TRITON_DTYPES:
        limit = f"takes no {x.dtype}"
    if not INSTALLED:
        limit = "needs the package triton"
    on_gpu = x.device.type == "cuda"
    if backend == "auto":
        return "triton" if on_gpu and limit is None else "torch"
    if limit is not None:
        raise ValueError(f"{source}='triton' {limit}: choose auto or torch")
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"{source}='triton' needs a CUDA device, got {x.device}: choose auto or torch")
    return backend


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of x. The meta device does not have autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
