"""Compare kernels on one problem: check each one's numbers, then time those that are right."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from fla_train.bench.measure import median_times, peak_memory, recorded, tolerance


@dataclass(frozen=True)
class Entry:
    """A kernel with its inputs at hand."""

    name: str
    forward: Callable[[], object]  # a pass that keeps nothing for a backward pass
    both: Callable[[], object]  # forward and backward
    errors: Callable[[], dict[str, float]]  # relative RMS by tensor
    limit: str | None = None  # why the problem is beyond it
    aside: Callable[[], object] | None = None  # what `both` does besides the kernel: its time is taken off


@dataclass(frozen=True)
class Finding:
    """What was found of one kernel. No speed is given where `refused` says why."""

    kernel: str
    errors: dict[str, float] = field(default_factory=dict)  # relative RMS by tensor: o, dq, dk, ...
    refused: str | None = None
    forward_ms: float | None = None
    both_ms: float | None = None
    memory_bytes: int | None = None  # peak of forward and backward beyond the inputs


def compare(
    entries: Sequence[Entry],
    dtype: torch.dtype,
    device: torch.device,
    *,
    rounds: int,
    graphs: bool = False,
    patience: float = 0,
) -> Iterator[Finding]:
    """Measure the entries; one that fails or is wrong gets no time.

    Args:
        dtype: of the inputs, which says what error is rounding.
        rounds: samples of each time on a CPU.
        graphs: on a GPU, time CUDA graphs: for kernels that are shorter than their launch.
        patience: seconds an entry gets to compile, to tune itself and to be checked; 0: any number.
    """
    found: dict[str, dict[str, float]] = {}
    memory, sound = {}, []
    for entry in entries:
        name = entry.name
        if entry.limit is not None:
            yield Finding(name, refused=entry.limit)
            continue
        try:
            with _limited(patience) if patience else nullcontext():
                entry.both()  # compiles and warms up too
                timed = _recorded(entry, device) if graphs else entry
                found[name], memory[name] = entry.errors(), peak_memory(entry.both, device)
        except Exception as failure:  # of any kind a compiler, a launch or a peer's own check may raise
            line = " ".join(str(failure).split())[:160]
            yield Finding(name, refused=f"{type(failure).__name__}: {line}")
            continue
        if (error := validation_error(found[name], dtype)) is not None:
            yield Finding(name, found[name], error)
            continue
        sound.append(timed)
    forward = median_times({entry.name: entry.forward for entry in sound}, device, rounds)
    both = median_times({entry.name: entry.both for entry in sound}, device, rounds)
    asides = {entry.name: entry.aside for entry in sound if entry.aside is not None}
    for name, time in median_times(asides, device, rounds).items():
        both[name] -= time
    for entry in sound:
        name = entry.name
        yield Finding(name, found[name], None, forward[name], both[name], memory[name])


def validation_error(found: dict[str, float], dtype: torch.dtype) -> str | None:
    """Which errors are out of bounds, NaN included; None if the kernel is right."""
    wrong = [
        f"{name} {error:.1e} > {tolerance(name, dtype):.0e}"
        for name, error in found.items()
        if not error <= tolerance(name, dtype)
    ]
    return f"wrong by {', '.join(wrong)}" if wrong else None


def worst(errors: dict[str, float]) -> str:
    """The largest error and whose it is, for a table."""
    name = max(errors, key=errors.__getitem__, default=None)
    return "-" if name is None else f"{name} {errors[name]:.1e}"


def _recorded(entry: Entry, device: torch.device) -> Entry:
    aside = None if entry.aside is None else recorded(entry.aside, device)
    return replace(
        entry, forward=recorded(entry.forward, device), both=recorded(entry.both, device), aside=aside
    )


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after `seconds`, once it is back from compiled code."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"was not ready after {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
