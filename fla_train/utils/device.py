"""Torch device and dtype from the names that commands take."""

import torch


def pick_device(name: str) -> str:
    """`auto` is CUDA if there is one. Raises `ValueError` for a device that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as failure:
        raise ValueError(
            f"device={name} cannot be used here ({str(failure).splitlines()[0]}): try device=cpu"
        ) from failure
    return name


def pick_dtype(name: str) -> torch.dtype | None:
    """The torch type of that name; None for `auto`, the stored one."""
    known = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    if name not in known:
        raise ValueError(f"dtype={name} must be one of {', '.join(known)}")
    return known[name]
