"""Compare kernels on the same inputs: check each kernel's results, then time it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fla_train.bench import measure
from fla_train.bench.report import Report, Row

if TYPE_CHECKING:
    from fla_train.bench.fused_op_cases import Case
    from fla_train.bench.implementations import Problem

COLUMNS = (
    *("kernel", "forward_ms", "forward_%_of_bound", "both_ms", "both_%_of_bound", "extra_memory_MiB"),
    *("output_error", "worst_gradient", "note"),
)


@dataclass(frozen=True)
class Implementation:
    """A kernel under its name: a function of a `Problem` or a fused op's `Case`.

    `limit` returns why it does not support some inputs, or None.
    """

    name: str
    run: Callable[[Any], Tensor | tuple[Tensor, ...]]
    limit: Callable[[Any], str | None] = lambda inputs: None


def compare(
    work: "Problem | Case",
    implementations: Sequence[Implementation],
    report: Report,
    *,
    graphs: bool = False,
) -> Iterator[Row]:
    """Measure the implementations. One that fails or computes wrong numbers gets no time.

    Args:
        report: has the device and the dtype of the inputs, which decides what error is rounding.
        graphs: time CUDA graphs on a GPU, for kernels that are shorter than their launch.
    """
    for implementation in implementations:
        row: Row = {"kernel": implementation.name}
        if reason := implementation.limit(work):
            yield row | {"note": reason}
            continue
        try:
            row |= _measure(implementation, work, report, graphs)
        except Exception as failure:  # raised by a compiler, a launch, or a peer's own check
            row["note"] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:160]}"
        yield row


def _measure(implementation: Implementation, work: "Problem | Case", report: Report, graphs: bool) -> Row:
    errors = work.errors(implementation.run)
    outputs = {name: error for name, error in errors.items() if name in work.output_gradients}
    gradients = {name: error for name, error in errors.items() if name not in outputs}
    row = {"errors": errors, "output_error": worst(outputs), "worst_gradient": worst(gradients)}
    if wrong := out_of_bounds(errors, report.dtype):
        return row | {"note": f"wrong: {wrong}"}

    def forward() -> None:
        with torch.no_grad():
            implementation.run(work)

    both = partial(measure.forward_backward, implementation.run, work)
    if report.device.type == "cuda":
        row["extra_memory_MiB"] = measure.peak_memory(both) / 2**20
    for name, run in (("forward", forward), ("both", both)):
        timed = measure.recorded(run, report.device) if graphs else run
        row[f"{name}_ms"] = measure.median_ms(timed, report.device)
    if report.ceilings:
        forward_bound, both_bound = work.bounds(report.ceilings)
        row["forward_%_of_bound"] = 1e5 * forward_bound / row["forward_ms"]
        row["both_%_of_bound"] = 1e5 * both_bound / row["both_ms"]
    return row


def out_of_bounds(errors: dict[str, float], dtype: torch.dtype) -> str:
    """Return the errors above their tolerance as text; a NaN is above any."""
    bounds = {name: measure.tolerance(name, dtype) for name in errors}
    wrong = [name for name, error in errors.items() if not error <= bounds[name]]
    return ", ".join(f"{name} {errors[name]:.1e} > {bounds[name]:.0e}" for name in wrong)


def worst(errors: dict[str, float]) -> str:
    """Return the largest error with the name of its tensor."""
    name = max(errors, key=errors.__getitem__)
    return f"{name} {errors[name]:.1e}"
