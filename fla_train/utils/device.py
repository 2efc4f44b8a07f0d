"""Choose a torch device and dtype by the names that commands accept."""

import torch


def pick_device(name: str) -> str:
    """Return the device of that name; `auto` prefers CUDA. Raise `ValueError` if it does not exist."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as failure:
        cause = str(failure).splitlines()[0]
        raise ValueError(f"device={name} can't be used ({cause}): try device=cpu") from failure
    return name


def pick_dtype(name: str) -> torch.dtype | None:
    """Return the torch dtype of a name in `eval.config.DTYPES`; None for `auto`: keep the stored dtype."""
    return None if name == "auto" else getattr(torch, name)
