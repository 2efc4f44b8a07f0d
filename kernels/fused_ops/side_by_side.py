"""Tensors side by side in one wide tensor: row strides, and gradients that are also written side by side.

A matrix product with several weights at once returns columns of one tensor. The Triton kernels take such
columns as they are. Their backward passes write gradients into columns of one buffer, so that the product's
own backward pass is one product as well.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """Return x [..., D] if its rows are dense and evenly spaced, as in a slice of columns; else a copy."""
    if x.is_contiguous():
        return x
    outer = range(x.dim() - 2)
    even = x.stride(-1) == 1 and all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in outer)
    return x if even else x.contiguous()


def row_stride(x: Tensor) -> int:
    """Return elements from a row of x [..., D] to the next; x is one of `as_rows`."""
    return x.shape[-1] if x.is_contiguous() else x.stride(-2)


class SideBySideGradients:
    """Memory for the gradients of all outputs [..., size] of an autograd function, as columns of one tensor.

    The function's context stores this as its attribute `side_by_side`, which `empty_gradient` reads.

    Args:
        sizes: columns of each output, and the number of columns of zeros after them.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.wide: Tensor | None = None
        self.free: dict[int, Tensor] = {}  # columns that `take` has not returned yet, by index

    def take(self, index: int, like: Tensor) -> Tensor:
        """Return uninitialized memory for gradient `index`; new memory if called again for this index."""
        if index not in self.free:
            self.wide = like.new_empty(*like.shape[:-1], sum(self.sizes))
            *columns, padding = self.wide.split(self.sizes, -1)
            padding.zero_()
            self.free = dict(enumerate(columns))
        return self.free.pop(index)

    def collect(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """Return all gradients and the zeros as one tensor; None if they are not in this memory.

        A gradient elsewhere is copied to its columns, unless `take` has returned them: they may be in use.
        """
        wide, free, self.wide, self.free = self.wide, self.free, None, {}
        if wide is None:
            return None
        *places, _ = wide.split(self.sizes, -1)
        for index, (gradient, columns) in enumerate(zip(gradients, places, strict=True)):
            if index in free:
                columns.copy_(gradient)
            elif columns.data_ptr() != gradient.data_ptr():
                return None
        return wide


def empty_gradient(x: Tensor) -> Tensor:
    """Return uninitialized memory for the gradient of x, in its `SideBySideGradients` if x has one."""
    compiling = torch.compiler.is_compiling()  # tracing does not support attributes of gradient functions
    gradients = None if compiling else getattr(x.grad_fn, "side_by_side", None)
    return x.new_empty(x.shape) if gradients is None else gradients.take(x.output_nr, x)
