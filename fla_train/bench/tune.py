"""`fla-bench tune`: find the fastest correct launch options of the Triton kernels on this machine.

Kernels are tuned one after the other. Candidates are compiled in parallel threads, then timed in a whole
forward and backward pass. Finally they are checked, from the fastest on, until one computes the right
numbers.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fla_train.bench.kernels import Problem, make_problem, operator
from fla_train.bench.measure import forward_backward, median_ms, out_of_bounds
from fla_train.bench.report import DTYPES, Report, Row
from fla_train.bench.roofline import Shape
from fla_train.kernels.delta_product import resolve_backend
from fla_train.kernels.delta_product.select import clear_caches, override
from fla_train.kernels.delta_product.selfcheck import relative_rms
from fla_train.kernels.delta_product.triton import launch_table
from fla_train.kernels.delta_product.triton.launch_table import MIN_TILE, Key, LaunchOptions, Options
from fla_train.kernels.precompile import precompile
from fla_train.utils.environment import describe_environment
from fla_train.utils.errors import described
from fla_train.utils.filesystem import write_whole

# `chunk_bwd_state` comes last: in Gluon it also replaces `chunk_bwd_qkg`, whose best options it has to beat.
KERNELS = ("chunk_prepare_wy", "chunk_fwd", "chunk_bwd_qkg", "chunk_bwd_state")
CHECKED_TOKENS = 130  # two chunks and a rest at n_h = 1
THREADS = min(12, os.cpu_count() or 1)  # threads that compile

COLUMNS = ("K", "V", "n_h", "kernel", "options", "both_ms", "before_ms", "tried", "failed")


def run(options: Namespace, report: Report) -> None:
    """Tune the rows of the options, and write them to the table.

    Raises:
        ValueError: the kernels do not run here, or none of a kernel's candidates is right.
    """
    resolve_backend("triton", report.device)
    report.table("rows", COLUMNS, _rows(options, report.device))


def _rows(options: Namespace, device: torch.device) -> Iterator[Row]:
    """Yield a row for each kernel of each shape, and write the table after each shape."""
    dtype, file = DTYPES[options.dtype], options.file or launch_table.user_file()
    table = launch_table.read_table(file) if file.is_file() else {}
    for head_dim, num_householder in product(options.head_dim, options.num_householder):
        sizes = (options.batch, options.tokens, options.heads, head_dim, options.value_dim or head_dim)
        shape = Shape(*sizes, num_householder, gated=True, element_size=dtype.itemsize)
        for row, best in tune(shape, dtype, device):
            yield row
            for line in row["failures"]:
                print(f"failed: {row['kernel']} {line}", file=sys.stderr)
            table[key_of(shape, device)] = best
        write_table(file, table, describe_environment(str(device)))


def write_table(file: Path, table: launch_table.Table, about: Mapping[str, Any]) -> None:
    """Write a table, which `launch_table` reads from now on; `about` says where it comes from."""
    rows = [asdict(key) | asdict(table[key]) for key in sorted(table)]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    clear_caches()


def key_of(shape: Shape, device: torch.device) -> Key:
    """Return the key of the table's row that `shape` tunes."""
    return Key.of(launch_table.architecture(device), shape.key_dim, shape.value_dim, shape.num_householder)


@dataclass(frozen=True)
class Check:
    """Compare results with `reference`, by name, on one problem."""

    problem: Problem
    reference: dict[str, Tensor]
    segment_chunks: int | None = None  # see `select.override`

    def run(self, options: LaunchOptions) -> dict[str, Tensor]:
        """Return outputs and gradients under these options."""
        with override(options=options, segment_chunks=self.segment_chunks):
            return forward_backward(operator, self.problem)

    def error(self, options: LaunchOptions) -> str:
        """Return the errors of the results under these options, or an empty string."""
        try:
            results = self.run(options)
        except Exception as failure:  # raised by the compiler or the device
            return described(failure)[:160]
        errors = {name: relative_rms(results[name], x) for name, x in self.reference.items()}
        return out_of_bounds(errors, self.problem.q.dtype)


def short_check(shape: Shape, dtype: torch.dtype, device: torch.device, gated: bool, norm: bool) -> Check:
    """Return a check against the fp64 recurrence on a short sequence, where each program has few chunks."""
    short = replace(shape, batch=1, tokens=CHECKED_TOKENS, heads=2, gated=gated)
    problem = make_problem(short, dtype, device, norm=norm, seed=1)
    leaves = {name: x.detach().cpu().double().requires_grad_() for name, x in problem.leaves.items()}
    exact = replace(problem, **leaves, do=problem.do.cpu().double())
    return Check(problem, forward_backward(partial(operator, backend="recurrent"), exact))


def tune(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Row, LaunchOptions]]:
    """Tune the row of `shape`. After each kernel yield its row of `COLUMNS` and the best options so far.

    Args:
        shape: the shape to time. It must fill the device, or all candidates are equally fast.
        dtype: dtype of q, k and v, 16 bits wide.

    Raises:
        ValueError: the kernels do not support the shape, or no candidate is right.
    """
    key = key_of(shape, device)
    best, _ = launch_table.lookup(dtype, key)
    checks = [
        short_check(shape, dtype, device, gated, norm) for gated in (True, False) for norm in (True, False)
    ]
    checks += [replace(check, segment_chunks=1) for check in checks]  # kernels of split sequences
    # On the timed problem programs go through many chunks. The results of today's options are the reference
    # there, without `chunk_bwd_fused`, which they have to judge as well.
    timed = Check(make_problem(shape, dtype, device, norm=True), {})
    timed = replace(timed, reference=timed.run(without_fused(best)))
    checks.append(timed)
    tried = {kernel: candidates(kernel, key, getattr(best, kernel)) for kernel in KERNELS}

    def compile_all(checks: Sequence[Check], trials: Sequence[LaunchOptions]) -> None:
        def run() -> None:
            for check, trial in product(checks, trials):
                with suppress(Exception):  # raised again where the trial is timed or checked
                    check.run(trial)

        if device.type == "cuda":  # the interpreter on a CPU compiles nothing
            precompile(run, THREADS)

    def time(trial: LaunchOptions) -> float:
        with override(options=trial):
            return median_ms(partial(forward_backward, operator, timed.problem), device)

    def wrong(trial: LaunchOptions) -> str:
        compile_all(checks, [trial])
        return next(filter(None, (check.error(trial) for check in checks)), "")

    for kernel in KERNELS:
        trials = [_with(best, kernel, options) for options in tried[kernel]]
        compile_all([timed], trials)
        row, options = fastest(kernel, trials, time, wrong)
        best = replace(best, **{kernel: options})
        yield {"K": key.key_dim, "V": key.value_dim, "n_h": key.num_householder} | row, best


def _with(best: LaunchOptions, kernel: str, options: Options) -> LaunchOptions:
    """Return the options to try for one kernel with the best ones of the others."""
    if kernel == "chunk_bwd_qkg":  # `chunk_bwd_fused` would run in its place
        best = without_fused(best)
    return replace(best, **{kernel: options})


def without_fused(options: LaunchOptions) -> LaunchOptions:
    """Return the options without `chunk_bwd_fused`."""
    plain = {name: value for name, value in options.chunk_bwd_state.items() if name != "gluon"}
    return replace(options, chunk_bwd_state=plain)


def fastest(
    kernel: str,
    trials: Sequence[LaunchOptions],
    time: Callable[[LaunchOptions], float],
    wrong: Callable[[LaunchOptions], str],
) -> tuple[Row, Options]:
    """Return the row of the fastest trial that is right, and its options of `kernel`. The first trial is
    today's.

    Raises:
        ValueError: no trial is right.
    """
    times, failures = [], []
    for trial in trials:
        try:
            times.append((time(trial), trial))
        except Exception as failure:  # raised by the compiler or the device
            failures.append(f"{getattr(trial, kernel)}: {described(failure)[:160]}")
    before = next((milliseconds for milliseconds, trial in times if trial is trials[0]), nan)
    for milliseconds, trial in sorted(times, key=lambda pair: pair[0]):
        options = getattr(trial, kernel)
        if not (error := wrong(trial)):
            text = ", ".join(f"{name} {value}" for name, value in options.items())
            row = {"kernel": kernel, "options": text, "both_ms": milliseconds, "before_ms": before}
            return row | {"tried": len(trials), "failed": len(failures), "failures": failures}, options
        failures.append(f"{options}: {error}")
    raise ValueError(f"no options of {kernel} are right on this machine: run fla-doctor")


def candidates(kernel: str, key: Key, present: Options) -> list[Options]:
    """Return today's options, then the others that are known to be safe."""
    widths = [width for width in (MIN_TILE, 2 * MIN_TILE) if width <= key.value_dim]
    columns = [width for width in (MIN_TILE, 2 * MIN_TILE, 4 * MIN_TILE) if width <= key.key_dim]
    loop = {"BV": widths, "num_warps": (4, 8), "num_stages": (1, 2, 3)}
    axes = {
        "chunk_prepare_wy": {"num_warps": (4, 8), "maxnreg": (None, 168, 128)},
        "chunk_fwd": loop,
        "chunk_bwd_state": loop,
        "chunk_bwd_qkg": {"BV": widths, "BKO": columns, "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    }[kernel]
    options = [present]
    for values in product(*axes.values()):
        candidate = {name: x for name, x in zip(axes, values, strict=True) if x is not None}
        if candidate not in options and launch_table.option_error(kernel, candidate, key.value_dim) is None:
            options.append(candidate)
    if has_gluon(kernel, key) and "gluon" not in present:
        options.append(present | {"gluon": 1})
    return options


def has_gluon(kernel: str, key: Key) -> bool:
    """Return whether the row's kernel has a version in Gluon, for Hopper."""
    if kernel not in launch_table.IN_GLUON or not key.architecture.startswith("9."):
        return False
    return launch_table.gluon_obstacle(kernel, key.key_dim, key.value_dim) is None
