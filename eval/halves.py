"""Halve a batch that exceeds the GPU's memory."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def in_halves(work: Callable[[Sequence[T]], list[R]], batch: Sequence[T], remedy: str = "") -> list[R]:
    """`work(batch)`; where the GPU's memory is too small for all at once, the results of its parts, joined.

    Raises:
        ValueError: it is too small for a single one; says `remedy`. Without that: torch.OutOfMemoryError.
    """
    try:
        return work(batch)
    except torch.OutOfMemoryError:
        if len(batch) == 1 and remedy:
            raise ValueError(remedy) from None
        if len(batch) == 1:
            raise
    torch.cuda.empty_cache()  # outside of the block above: the exception holds the tensors of the failed call
    half = len(batch) // 2
    return in_halves(work, batch[:half], remedy) + in_halves(work, batch[half:], remedy)
