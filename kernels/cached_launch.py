"""Cached kernel launcher that skips Triton's per-call specialization to cut host time.

`kernel[grid](...)` works out the type and divisibility of each of 30 to 40 arguments, turns the options into
text and compares every global constant that the kernel reads, only to look up a compiled kernel. For a small
call this takes longer than the kernels (docs/dev/kernels.md, "Measured"). Here compiled kernels are kept
under a key that is cheaper to make, and launched in Triton's way for compiled kernels,
`compiled[grid](*arguments)`.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fla_train.kernels.optional_triton import triton

ALIGNMENT = 16  # bytes; a pointer's alignment decides how wide its loads and stores may be


def run_kernel(kernel: triton.JITFunction, grid: tuple[int, ...], **arguments: Any) -> None:
    """Run `kernel[grid](**arguments)` on the current device; the grid has one to three dimensions.

    The arguments are all those of the kernel, and launch options: num_warps, num_stages, maxnreg, launch_pdl.
    The compiled kernel may depend on these arguments only: Triton's knobs are read at the first call.
    """
    if not isinstance(kernel, triton.JITFunction):  # Triton's interpreter has another class
        kernel[grid](**arguments)
        return
    names, constants, variables, variants = _parameters(kernel)
    key = (
        torch.cuda.current_device(), arguments.get("num_warps"),
        arguments.get("num_stages"), arguments.get("maxnreg"), arguments.get("launch_pdl"),
        *[arguments[name] for name in constants],
        *[_trait(arguments[name]) for name in variables],
    )  # fmt: skip
    compiled = variants.get(key)
    if compiled is None:
        variants[key] = kernel[grid](**arguments)  # raises for unknown arguments
    else:
        compiled[(*grid, 1, 1)[:3]](*[arguments[name] for name in names])


@cache
def _parameters(kernel: triton.JITFunction) -> tuple[list[str], list[str], list[str], dict[Hashable, Any]]:
    """Return all arguments' names, the constexpr ones, the others, and the compiled variants by key."""
    constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    variables = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    return kernel.arg_names, constants, variables, {}


def _trait(argument: Any) -> Hashable:
    """Return the properties of a non-constexpr argument that Triton may specialize on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT
    if argument is None:
        return None
    if isinstance(argument, int):
        return argument == 1, argument % ALIGNMENT == 0, argument.bit_length() // 32
    if isinstance(argument, float):
        return float
    return argument.base.dtype, *argument.block_shape  # a TMA descriptor
