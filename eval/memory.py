"""Halve a batch that exceeds the GPU's memory."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def in_halves(work: Callable[[Sequence[T]], list[R]], batch: Sequence[T], remedy: str = "") -> list[R]:
    """Return `work(batch)`, computed in halves where the GPU's memory is too small for the batch.

    Raises:
        ValueError: it is too small for a single item; the message is `remedy`.
        torch.OutOfMemoryError: the same without `remedy`.
    """
    try:
        return work(batch)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            if remedy:
                raise ValueError(remedy) from None
            raise
    # After the block above, because the exception holds the tensors of the failed call.
    torch.cuda.empty_cache()
    half = len(batch) // 2
    return in_halves(work, batch[:half], remedy) + in_halves(work, batch[half:], remedy)
