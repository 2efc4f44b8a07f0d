"""`fla-bench fused_ops`: time the fused ops beside their PyTorch definitions and peers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fla_train.bench.compare import Entry, Finding, compare, worst
from fla_train.bench.fused_op_cases import Case
from fla_train.bench.implementations import Implementation
from fla_train.bench.measure import forward_backward
from fla_train.bench.roofline import Ceilings
from fla_train.kernels.delta_product.selfcheck import relative_rms

HEADER = (
    "| function | kernel | forward ms | GB | floor ms | % of floor | fwd+bwd ms | GB | floor ms | % of floor "
    "| extra memory MiB | output error | worst gradient |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True, kw_only=True)
class Row(Finding):
    """What was found of one kernel on one case."""

    function: str
    case: str
    forward_bytes: int  # at least: inputs read, outputs written
    both_bytes: int  # forward and backward
    forward_floor_ms: float
    both_floor_ms: float
    output_errors: dict[str, float]  # relative RMS by tensor
    gradient_errors: dict[str, float]

    def markdown(self) -> str:
        """The row of the table under `HEADER`."""
        if self.refused is None:
            forward = _cells(self.forward_ms, self.forward_bytes, self.forward_floor_ms)
            both = _cells(self.both_ms, self.both_bytes, self.both_floor_ms)
            measured = f"{forward} | {both} | {self.memory_bytes / 2**20:.4g}"
        else:
            measured = f"no speed: {self.refused}" + " |" * 8
        errors = f"{worst(self.output_errors)} | {worst(self.gradient_errors)}"
        return f"| {self.case} | {self.kernel} | {measured} | {errors} |"


def _cells(milliseconds: float, traffic: int, floor: float) -> str:
    return f"{milliseconds:.4g} | {traffic / 1e9:.3g} | {floor:.3g} | {100 * floor / milliseconds:.1f}"


def ours(device: torch.device) -> list[Implementation[Case]]:
    """The Triton kernels where they run, and the definitions in PyTorch."""
    backends = ["triton", "torch"] if device.type == "cuda" else ["torch"]
    return [
        Implementation(f"fla_train {backend}", partial(Case.run, backend=backend)) for backend in backends
    ]


def bench_case(
    case: Case,
    implementations: Sequence[Implementation[Case]],
    dtype: torch.dtype,
    device: torch.device,
    ceilings: Ceilings,
    *,
    rounds: int,
) -> Iterator[Row]:
    """Measure the implementations on `case`; one that fails or is wrong gets no time.

    Args:
        dtype: of the activations, which says what error is rounding.
        rounds: samples of each time on a CPU.
    """
    expected = forward_backward(partial(Case.run, backend="torch"), case.exact())
    forward_floor, both_floor = case.bounds(ceilings)
    entries = [_entry(implementation, case, expected) for implementation in implementations]
    for found in compare(entries, dtype, device, rounds=rounds, graphs=case.graph):
        outputs = {name: error for name, error in found.errors.items() if name in case.output_gradients}
        yield Row(
            **vars(found),
            function=case.function,
            case=case.name,
            forward_bytes=case.forward_bytes,
            both_bytes=case.forward_bytes + case.backward_bytes,
            forward_floor_ms=forward_floor * 1e3,
            both_floor_ms=both_floor * 1e3,
            output_errors=outputs,
            gradient_errors={name: x for name, x in found.errors.items() if name not in outputs},
        )


def _entry(implementation: Implementation[Case], case: Case, expected: dict[str, Tensor]) -> Entry:
    own = {name: case.leaves[name].detach().clone().requires_grad_() for name in implementation.overwrites}
    untouched, written = case.detached(), replace(case, leaves=case.leaves | own)

    def restore() -> None:
        with torch.no_grad():
            for name, x in own.items():
                x.copy_(case.leaves[name])

    def forward() -> None:
        with torch.no_grad():
            implementation.run(untouched)

    def both() -> dict[str, Tensor]:
        restore()
        return forward_backward(implementation.run, written)

    def errors() -> dict[str, float]:
        found = both()
        return {name: relative_rms(found[name], x) for name, x in expected.items()}

    limit, aside = implementation.limit(case), restore if own else None
    return Entry(implementation.name, forward, both, errors, limit, aside)
