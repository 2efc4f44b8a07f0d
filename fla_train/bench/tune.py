"""`fla-bench tune`: find the fastest correct launch options of the Triton kernels on this machine.

Kernels are tuned one after the other. Every safe candidate is timed in a whole forward and backward pass.
Then candidates are checked, from the fastest on, until one computes the right numbers. Several processes
compile them beforehand (`fla_train.bench.precompile`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import nan

import torch
from torch import Tensor

from fla_train.bench.implementations import Problem, make_problem, operator
from fla_train.bench.measure import allocated, forward_backward, median_times, tolerance
from fla_train.bench.precompile import Precompiler, Trial
from fla_train.bench.roofline import Shape
from fla_train.kernels.delta_product.select import override
from fla_train.kernels.delta_product.selfcheck import relative_rms
from fla_train.kernels.delta_product.triton.launch_table import (
    IN_GLUON,
    MIN_TILE,
    Key,
    LaunchOptions,
    Options,
    architecture,
    hopper_keys,
    lookup,
    option_error,
    square,
    value_tiles,
)

# `chunk_bwd_state` comes last: in Gluon it replaces `chunk_bwd_qkg`, too, whose best options it has to beat.
KERNELS = ("chunk_prepare_wy", "chunk_fwd", "chunk_bwd_qkg", "chunk_bwd_state")
JUDGED_TOKENS = 130  # two chunks and a rest at n_h = 1
Timer = Callable[[Callable[[], object]], float]  # milliseconds of a function

HEADER = (
    "| K | V | n_h | kernel | options | forward + backward ms | before | tried | refused |",
    "|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Outcome:
    """What was found of one kernel. Times are those of a whole forward and backward pass."""

    key: Key
    kernel: str
    options: Options
    milliseconds: float
    before: float
    tried: int
    refused: tuple[str, ...]  # options that could not be launched or computed wrong numbers, with the reason

    def markdown(self) -> str:
        """The row of the table under `HEADER`."""
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        key = self.key
        return (
            f"| {key.key_dim} | {key.value_dim} | {key.num_householder} | {self.kernel} | {options} "
            f"| {self.milliseconds:.3f} | {self.before:.3f} | {self.tried} | {len(self.refused)} |"
        )


def key_of(shape: Shape, device: torch.device) -> Key:
    """The row of the table that `shape` tunes."""
    return Key.of(architecture(device), shape.key_dim, shape.value_dim, shape.num_householder)


def tune(
    shape: Shape, dtype: torch.dtype, device: torch.device, timer: Timer | None = None
) -> Iterator[tuple[Outcome, LaunchOptions]]:
    """Tune the row of `shape`: after each kernel its outcome, and the best options so far.

    Args:
        shape: what is timed: large enough to fill the device, or differences drown.
        dtype: of q, k and v, 16 bits wide.
        timer: default the median of many runs.

    Raises:
        ValueError: for a shape that the kernels do not take, or if nothing that was tried is right.
    """
    timer = timer or (lambda run: median_times({"run": run}, device, rounds=5)["run"])
    key = key_of(shape, device)
    best, _ = lookup(dtype, key)
    problem = make_problem(shape, dtype, device, norm=True)
    step = partial(forward_backward, operator, problem)
    with override(options=without_fused(best)):  # whose results judge a Gluon kernel, too
        present = Judge(problem, step())  # a shape that cannot run fails here, not with each candidate
    judges = [
        short_judge(shape, dtype, device, gated, norm) for gated in (True, False) for norm in (True, False)
    ]
    judges += [
        replace(judge, segment_chunks=1) for judge in judges
    ]  # their kernels run under the same options
    judges.append(present)
    tried = {kernel: candidates(kernel, key, getattr(best, kernel)) for kernel in KERNELS}

    def time(trial: LaunchOptions) -> float:
        with override(options=trial):
            return timer(step)

    def wrong(trial: LaunchOptions) -> str | None:
        precompiler.run([judge.trial(trial) for judge in judges])
        return next(filter(None, (judge.error(trial) for judge in judges)), None)

    with Precompiler(dtype, device, needed=allocated(device)) as precompiler:
        everything = [trial for kernel in KERNELS for trial in trials(best, kernel, tried[kernel])]
        precompiler.run([judge.trial(best) for judge in judges] + [present.trial(x) for x in everything])
        for kernel in KERNELS:
            outcome = fastest(key, kernel, trials(best, kernel, tried[kernel]), time, wrong)
            best = replace(best, **{kernel: outcome.options})
            yield outcome, best


def trials(best: LaunchOptions, kernel: str, tried: list[Options]) -> list[LaunchOptions]:
    """The options to try of one kernel, beside the best of the others."""
    if kernel == "chunk_bwd_qkg":  # which might not run at all beside `chunk_bwd_fused`
        best = without_fused(best)
    return [replace(best, **{kernel: options}) for options in tried]


def without_fused(options: LaunchOptions) -> LaunchOptions:
    """The options without `chunk_bwd_fused`."""
    plain = {name: value for name, value in options.chunk_bwd_state.items() if name != "gluon"}
    return replace(options, chunk_bwd_state=plain)


def fastest(
    key: Key,
    kernel: str,
    tried: list[LaunchOptions],
    time: Callable[[LaunchOptions], float],
    wrong: Callable[[LaunchOptions], str | None],
) -> Outcome:
    """The fastest of the trials that is right; the first is what there was before.

    Raises:
        ValueError: if none is.
    """
    times, refused = [], []
    for trial in tried:
        try:
            times.append((time(trial), trial))
        except Exception as failure:  # the compiler's or the device's: whatever it is, not this one
            refused.append(f"{getattr(trial, kernel)}: {_first_line(failure)}")
    before = next((milliseconds for milliseconds, trial in times if trial is tried[0]), nan)
    for milliseconds, trial in sorted(times, key=lambda pair: pair[0]):
        options = getattr(trial, kernel)
        if (reason := wrong(trial)) is None:
            return Outcome(key, kernel, options, milliseconds, before, len(tried), tuple(refused))
        refused.append(f"{options}: {reason}")
    raise ValueError(f"no options of {kernel} are right on this machine: see fla-doctor")


def candidates(kernel: str, key: Key, present: Options) -> list[Options]:
    """The present options, then the others that are known to be safe."""
    widths = [width for width in (MIN_TILE, 2 * MIN_TILE) if width <= key.value_dim]
    columns = [width for width in (MIN_TILE, 2 * MIN_TILE, 4 * MIN_TILE) if width <= key.key_dim]
    axes = {
        "chunk_prepare_wy": {"num_warps": (4, 8), "maxnreg": (None, 168, 128)},
        "chunk_fwd": {"BV": widths, "num_warps": (4, 8), "num_stages": (1, 2, 3)},
        "chunk_bwd_state": {"BV": widths, "num_warps": (4, 8), "num_stages": (1, 2, 3)},
        "chunk_bwd_qkg": {"BV": widths, "BKO": columns, "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    }[kernel]
    found = [present]
    for values in product(*axes.values()):
        options = {name: x for name, x in zip(axes, values, strict=True) if x is not None}
        if options not in found and option_error(kernel, options, key.value_dim) is None:
            found.append(options)
    if has_gluon(kernel, key) and "gluon" not in present:
        found.append(present | {"gluon": 1})  # Hopper's own kernel
    return found


def has_gluon(kernel: str, key: Key) -> bool:
    """Whether there is a kernel in Gluon for a row."""
    if kernel not in IN_GLUON or not key.architecture.startswith("9."):
        return False
    if kernel == "chunk_bwd_qkg":
        return square(key.key_dim, key.value_dim)
    return hopper_keys(key.key_dim) and (kernel == "chunk_prepare_wy" or value_tiles(key.value_dim) > 0)


@dataclass(frozen=True)
class Judge:
    """Compares calls with what is right: `reference` by name, of `problem`."""

    problem: Problem
    reference: dict[str, Tensor]
    segment_chunks: int | None = None  # as of `select.override`

    def trial(self, options: LaunchOptions) -> Trial:
        """What `error` runs."""
        return Trial(self.problem.shape, self.problem.norm, options, self.segment_chunks)

    def error(self, options: LaunchOptions) -> str | None:
        """What is wrong with results under these options, None if nothing."""
        shape, dtype = self.problem.shape, self.problem.q.dtype
        try:
            with override(options=options, segment_chunks=self.segment_chunks):
                results = forward_backward(operator, self.problem)
        except Exception as failure:
            return _first_line(failure)
        for name, expected in self.reference.items():
            off = relative_rms(results[name], expected)
            if not off <= tolerance(name, dtype):  # a NaN is wrong
                case = f"{'gate' if shape.gated else 'no gate'}, {'norm' if self.problem.norm else 'no norm'}"
                return f"{name} is off by {off:.1e} ({case}{', in segments' if self.segment_chunks else ''})"
        return None


def short_judge(shape: Shape, dtype: torch.dtype, device: torch.device, gated: bool, norm: bool) -> Judge:
    """By the fp64 recurrence on a short sequence.

    Programs that go through chunks have one each there. Where they have many, on the timed problem, what the
    options before compute stands in for the recurrence.
    """
    short = replace(shape, batch=1, tokens=JUDGED_TOKENS, heads=2, gated=gated)
    problem = make_problem(short, dtype, device, norm=norm, seed=1)
    leaves = {name: x.detach().cpu().double().requires_grad_() for name, x in problem.leaves.items()}
    exact = replace(problem, **leaves, do=problem.do.cpu().double())
    return Judge(problem, forward_backward(partial(operator, backend="recurrent"), exact))


def _first_line(failure: Exception) -> str:
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"
