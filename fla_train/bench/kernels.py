"""`fla-bench kernels`: every backend and peer on the same inputs, in one run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from fla_train.bench.contenders import Contender, Problem, make_problem
from fla_train.bench.measure import errors, forward_backward, median_times, peak_memory, tolerance
from fla_train.bench.roofline import Ceilings, Shape, forward_bound, training_bound

HEADER = (
    "| kernel | n_h | gate | forward ms | fwd+bwd ms | ns per token-head | % of bound, fwd | fwd+bwd "
    "| extra memory MiB | error of o | worst gradient |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Row:
    """What was found of one kernel on one shape. No speed is given where `refused` says why."""

    kernel: str
    substeps: int
    gated: bool
    errors: dict[str, float]  # relative RMS by tensor: o, dq, dk, ...
    refused: str | None = None
    forward_ms: float | None = None
    both_ms: float | None = None  # forward and backward
    forward_bound_ms: float | None = None
    both_bound_ms: float | None = None
    ns_per_token_head: float | None = None  # forward and backward
    memory_bytes: int | None = None  # peak of forward and backward beyond the inputs

    def markdown(self) -> str:
        """The row of the table under `HEADER`."""
        error = f"{self.errors['o']:.1e}" if self.errors else "-"
        gradients = {name: value for name, value in self.errors.items() if name != "o"}
        worst = max(gradients, key=gradients.__getitem__, default=None)
        gradient = "-" if worst is None else f"{worst} {gradients[worst]:.1e}"
        gate = "yes" if self.gated else "no"
        if self.refused is not None:
            return (
                f"| {self.kernel} | {self.substeps} | {gate} | no speed: {self.refused} | | | | | | "
                f"{error} | {gradient} |"
            )
        return (
            f"| {self.kernel} | {self.substeps} | {gate} | {self.forward_ms:.3f} | {self.both_ms:.3f} "
            f"| {self.ns_per_token_head:.2f} | {100 * self.forward_bound_ms / self.forward_ms:.1f} "
            f"| {100 * self.both_bound_ms / self.both_ms:.1f} | {self.memory_bytes / 2**20:.0f} "
            f"| {error} | {gradient} |"
        )

    def record(self) -> dict:
        """The row as plain JSON."""
        return asdict(self)


def bench_shape(
    shape: Shape,
    contenders: Sequence[Contender],
    dtype: torch.dtype,
    device: torch.device,
    ceilings: Ceilings,
    *,
    norm: bool,
    rounds: int,
) -> Iterator[Row]:
    """Measure the contenders that take this shape; a kernel that fails or is wrong gets no time.

    Args:
        norm: the L2 norm of q and k is part of the kernel's work; otherwise they are unit vectors.
        rounds: samples of each time on a CPU.
    """
    problem = make_problem(shape, dtype, device, norm=norm)
    found: dict[str, dict[str, float]] = {}
    memory, sound = {}, []
    for contender in contenders:
        if (limit := contender.limit(problem)) is not None:
            yield Row(contender.name, shape.substeps, shape.gated, {}, limit)
            continue
        try:
            forward_backward(contender.run, problem)  # compiles and warms up too
        except Exception as failure:  # of any kind a compiler, a launch or a peer's own check may raise
            line = " ".join(str(failure).split())[:160]
            reason = f"{type(failure).__name__}: {line}"
            yield Row(contender.name, shape.substeps, shape.gated, {}, reason)
            continue
        found[contender.name] = errors(contender.run, problem)
        if (fault := fault_of(found[contender.name], dtype)) is not None:
            yield Row(contender.name, shape.substeps, shape.gated, found[contender.name], fault)
            continue
        memory[contender.name] = peak_memory(lambda c=contender: forward_backward(c.run, problem), device)
        sound.append(contender)
    forward, both = _times(sound, problem, device, rounds)
    for contender in sound:
        name = contender.name
        yield Row(
            name,
            shape.substeps,
            shape.gated,
            found[name],
            forward_ms=forward[name],
            both_ms=both[name],
            forward_bound_ms=forward_bound(shape, ceilings) * 1e3,
            both_bound_ms=training_bound(shape, ceilings) * 1e3,
            ns_per_token_head=both[name] * 1e6 / shape.token_heads,
            memory_bytes=memory[name],
        )


def fault_of(found: dict[str, float], dtype: torch.dtype) -> str | None:
    """Which errors are out of bounds, NaN included; None if the kernel is right."""
    wrong = [
        f"{name} {error:.1e} > {tolerance(name, dtype):.0e}"
        for name, error in found.items()
        if not error <= tolerance(name, dtype)
    ]
    return f"wrong by {', '.join(wrong)}" if wrong else None


def _times(
    contenders: Sequence[Contender], problem: Problem, device: torch.device, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds by name: of the forward pass alone, which keeps nothing, and with the backward."""

    def forward(contender: Contender):
        def run() -> None:
            with torch.no_grad():
                contender.run(problem)

        return run

    ahead = median_times({c.name: forward(c) for c in contenders}, device, rounds)
    both = {c.name: lambda c=c: forward_backward(c.run, problem) for c in contenders}
    return ahead, median_times(both, device, rounds)
