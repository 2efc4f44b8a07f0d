"""`fla-bench kernels`: every backend and peer on the same inputs, in one run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fla_train.bench.compare import Entry, Finding, compare, worst
from fla_train.bench.implementations import Implementation, Problem, make_problem
from fla_train.bench.measure import errors, forward_backward
from fla_train.bench.roofline import Ceilings, Shape, forward_bound, training_bound

HEADER = (
    "| kernel | n_h | gate | forward ms | fwd+bwd ms | ns per token-head | ps per byte of q, k, v "
    "| % of bound, fwd | fwd+bwd | extra memory MiB | error of o | worst gradient |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True, kw_only=True)
class Row(Finding):
    """What was found of one kernel on one shape."""

    num_householder: int
    gated: bool
    forward_bound_ms: float
    both_bound_ms: float  # forward and backward
    ns_per_token_head: float | None  # forward and backward
    ps_per_byte: float | None  # of q, k and v, forward and backward

    def markdown(self) -> str:
        """The row of the table under `HEADER`."""
        error = f"{self.errors['o']:.1e}" if self.errors else "-"
        gradients = {name: value for name, value in self.errors.items() if name != "o"}
        gradient = worst(gradients)
        gate = "yes" if self.gated else "no"
        if self.refused is not None:
            return (
                f"| {self.kernel} | {self.num_householder} | {gate} | no speed: {self.refused} | | | | | | | "
                f"{error} | {gradient} |"
            )
        return (
            f"| {self.kernel} | {self.num_householder} | {gate} | {self.forward_ms:.3f} | {self.both_ms:.3f} "
            f"| {self.ns_per_token_head:.2f} | {self.ps_per_byte:.2f} "
            f"| {100 * self.forward_bound_ms / self.forward_ms:.1f} "
            f"| {100 * self.both_bound_ms / self.both_ms:.1f} | {self.memory_bytes / 2**20:.0f} "
            f"| {error} | {gradient} |"
        )


def bench_shape(
    shape: Shape,
    implementations: Sequence[Implementation],
    dtype: torch.dtype,
    device: torch.device,
    ceilings: Ceilings,
    *,
    norm: bool,
    rounds: int,
    graphs: bool = False,
    patience: float = 0,
) -> Iterator[Row]:
    """Measure the implementations that take this shape; a kernel that fails or is wrong gets no time.

    Args:
        norm: the L2 norm of q and k is part of the kernel's work; otherwise they are unit vectors.
        rounds: samples of each time on a CPU.
        graphs: on a GPU, time CUDA graphs: what is left when the host does not have to launch.
        patience: seconds a kernel gets to compile and to tune itself; 0: any number.
    """
    problem = make_problem(shape, dtype, device, norm=norm)
    entries = [_entry(implementation, problem) for implementation in implementations]
    for found in compare(entries, dtype, device, rounds=rounds, graphs=graphs, patience=patience):
        yield Row(
            **vars(found),
            num_householder=shape.num_householder,
            gated=shape.gated,
            forward_bound_ms=forward_bound(shape, ceilings) * 1e3,
            both_bound_ms=training_bound(shape, ceilings) * 1e3,
            ns_per_token_head=found.both_ms and found.both_ms * 1e6 / shape.token_heads,
            ps_per_byte=found.both_ms and found.both_ms * 1e9 / shape.token_heads / shape.input_bytes,
        )


def _entry(implementation: Implementation[Problem], problem: Problem) -> Entry:
    def forward() -> None:
        with torch.no_grad():
            implementation.run(problem)

    return Entry(
        implementation.name,
        forward,
        both=partial(forward_backward, implementation.run, problem),
        errors=partial(errors, implementation.run, problem),
        limit=implementation.limit(problem),
    )
