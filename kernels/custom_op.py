"""How a function that launches kernels stands in a graph of torch.compile: as one node, without a break.

Eager calls go straight to the function. The dispatcher of a registered operator takes the host's time at
every call, and a training step at a small batch waits for the host (docs/kernels.md, "Measured").
"""

import functools
from collections.abc import Callable, Sequence

import torch


def opaque(mutates: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function that fills tensors its caller made, and returns nothing.

    While torch.compile traces, a call becomes the operator `fla_train::<name of the function>`. It does
    nothing with fake tensors, since its outputs have their shapes from the caller.

    Args:
        mutates: names of the arguments that are written; annotations of all arguments give the schema.
            Arguments are passed by position.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        operator = torch.library.custom_op(f"fla_train::{function.__name__}", function, mutates_args=mutates)
        operator.register_fake(lambda *arguments: None)

        @functools.wraps(function)
        def call(*arguments: object) -> None:
            if torch.compiler.is_compiling():
                operator(*arguments)
            else:
                function(*arguments)

        return call

    return decorate
