"""One neighbour of the operator on one shape: its tensors, its backends, and the least it has to move."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor

from fla_train.bench.roofline import Ceilings
from fla_train.kernels.fused_ops.backend import BACKEND_VARIABLE


@dataclass(frozen=True)
class Case:
    """One neighbour on one shape: a function of named tensors that returns its outputs."""

    function: str
    name: str  # as the table has it
    definition: Callable[..., tuple[Tensor, ...]]  # of the leaves and the fixed tensors, by name
    leaves: dict[str, Tensor]  # get gradients
    fixed: dict[str, Tensor] = field(default_factory=dict)
    output_gradients: dict[str, Tensor] = field(default_factory=dict)  # in the order of the outputs
    kept: tuple[str, ...] | None = None  # inputs and outputs that a backward pass must read; None: all inputs
    flops: float = 0.0  # of the forward pass's matrix products; a backward pass takes twice as many
    graph: bool = True  # short enough for the time of launches to count

    def run(self, backend: str = "auto") -> tuple[Tensor, ...]:
        """The outputs, by one of this project's backends."""
        with using(backend):
            return self.definition(**self.leaves, **self.fixed)

    def detached(self) -> "Case":
        """The same where nothing gets a gradient."""
        return replace(self, leaves={name: x.detach() for name, x in self.leaves.items()})

    def exact(self) -> "Case":
        """The same in fp64, with tensors of its own."""
        leaves = {name: x.detach().double().requires_grad_() for name, x in self.leaves.items()}
        gradients = {name: x.double() for name, x in self.output_gradients.items()}
        return replace(self, leaves=leaves, output_gradients=gradients)

    @property
    def forward_bytes(self) -> int:
        """Least traffic of a forward pass: inputs read, outputs written."""
        return _size(self.leaves | self.fixed | self.output_gradients)

    @property
    def backward_bytes(self) -> int:
        """Least traffic of a backward pass: its inputs and the outputs' gradients read, others written."""
        tensors = self.leaves | self.fixed
        if self.kept is not None:
            tensors |= self.output_gradients  # of the size of the outputs
            tensors = {name: tensors[name] for name in self.kept}
        return _size(tensors) + _size(self.output_gradients) + _size(self.leaves)

    def bounds(self, ceilings: Ceilings) -> tuple[float, float]:
        """Least seconds of a forward pass, and of forward and backward."""
        forward = ceilings.seconds(self.flops, self.forward_bytes)
        return forward, forward + ceilings.seconds(2 * self.flops, self.backward_bytes)


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(x.nbytes for x in tensors.values())


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Let `auto` be this backend: the loss has no argument for it."""
    before = os.environ.get(BACKEND_VARIABLE)
    os.environ[BACKEND_VARIABLE] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ[BACKEND_VARIABLE]
        else:
            os.environ[BACKEND_VARIABLE] = before
