"""Register a launcher as `torch.library.custom_op` under torch.compile; call it directly in eager mode.

An eager call skips the dispatcher of a registered operator, which costs host time at every call: a training
step at a small batch waits for the host (docs/dev/kernels.md, "Measured").
"""

import functools
import re
from collections.abc import Callable, Sequence

import torch

# Namespace of the operators. It contains the package's name, because a process may import several copies of
# this code: the Python files of an export are modules of another package.
NAMESPACE = re.sub(r"\W", "_", __name__.split(".kernels.")[0], flags=re.ASCII)


def custom_op(mutates: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function that fills tensors of its caller and returns nothing.

    It runs with the device of its first argument, a tensor, as the current one.
    torch.compile sees a call as one node without a graph break, the operator `fla_train::<function name>`.
    Its fake version does nothing, because the caller has made the outputs in their shapes.

    Args:
        mutates: names of the arguments that are written. The annotations of all arguments give the schema.
            Arguments are passed by position.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def launch(*arguments: object) -> None:
            with torch.cuda.device_of(arguments[0]):
                function(*arguments)

        operator = torch.library.custom_op(f"{NAMESPACE}::{function.__name__}", launch, mutates_args=mutates)
        operator.register_fake(lambda *arguments: None)

        @functools.wraps(function)
        def call(*arguments: object) -> None:
            (operator if torch.compiler.is_compiling() else launch)(*arguments)

        return call

    return decorate
