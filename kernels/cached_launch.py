"""Launches of Triton kernels that the host is done with sooner.

`kernel[grid](...)` works out the type and the divisibility of each of 30 to 40 arguments, makes text of the
options and compares every global constant that the kernel reads, only to find what it had compiled before; a
small call takes longer for that than the kernels run (docs/kernels.md, "Measured"). Here compiled kernels are
kept under a key that takes the host less, and are launched as Triton lets one launch what it has compiled:
`compiled[grid](*arguments)`.
"""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

ALIGNMENT = 16  # bytes: how pointers lie to it decides how wide loads and stores may be


def run_kernel(
    kernel: triton.JITFunction, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: int
) -> None:
    """`kernel[grid](**arguments, **options)` on the current device; the grid has one or two dimensions.

    Arguments that the kernel does not have are left out, so that several can share theirs. Nothing but
    arguments and options may decide what is compiled: Triton's own knobs are read at the first call.
    """
    given = {**arguments, **options}
    named = {name: given[name] for name in kernel.arg_names}
    if not isinstance(kernel, triton.JITFunction):  # the interpreter's
        kernel[grid](**(named | options))
        return
    constants, variables, variants = _parameters(kernel)
    key = (
        torch.cuda.current_device(),
        *options.items(),
        *[named[name] for name in constants],
        *[_trait(named[name]) for name in variables],
    )
    compiled = variants.get(key)
    if compiled is None:
        variants[key] = kernel[grid](**(named | options))
    else:
        compiled[(*grid, 1, 1)[:3]](*named.values())


@cache
def _parameters(kernel: triton.JITFunction) -> tuple[list[str], list[str], dict[Hashable, Any]]:
    """Names of the arguments that are constants in the code, of all others, and what has been compiled."""
    constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    variables = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    return constants, variables, {}


def _trait(argument: Any) -> Hashable:
    """All of an argument, which is no constant in the code, that may decide what is compiled."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT
    if argument is None:
        return None
    if isinstance(argument, int):
        return argument == 1, argument % ALIGNMENT == 0, argument.bit_length() // 32
    if isinstance(argument, float):
        return float
    return argument.base.dtype, *argument.block_shape  # of a descriptor for the copy engine
