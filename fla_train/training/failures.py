"""Failures of a rank: described in one line, with whether a restart may help; and a watchdog for hangs.

Imports neither torch nor what needs it, so that a failure to import them can be described too.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from fla_train.utils.errors import Interrupted

if TYPE_CHECKING:
    from fla_train.training.config import TrainConfig

# What torch, cuBLAS, NCCL and the system call it; the classes that they raise it with vary.
OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|not enough memory|can(?:no|')t allocate memory|ALLOC_FAILED|MemoryAllocation", re.I
)
OF_A_GPU = re.compile(r"OutOfMemoryError|cuda|cublas|nccl", re.I)
ALLOCATION = re.compile(r"\ballocate ([\d.]+) (\w+)")

FIRST_TIMES = 3  # of each kind of work: kernels are compiled and tuned, memory is allocated
LONGER = 5  # times `timeout` for those, and for work without a kind


class TrainingStopped(RuntimeError):
    """Training can't continue, nor could it when started again; the message is one line for the user."""


def describe_failure(failure: BaseException, config: "TrainConfig | None" = None) -> tuple[str, bool]:
    """Describe an exception that ended a rank.

    Args:
        config: of the run, with its device resolved; None: it could not be read.

    Returns:
        One line, and whether the failure is final: started again, the ranks would end the same way.
    """
    if (memory := _out_of_memory(failure)) is not None:
        return _of_memory(memory, config), True
    line = " ".join(str(failure).split())
    final = isinstance(failure, ValueError | TrainingStopped) and not isinstance(failure, Interrupted)
    ours = final or type(failure).__module__.startswith("fla_train.")  # our lines need no class
    name = type(failure).__name__
    return (line or name) if ours else f"{name}: {line}".removesuffix(": "), final


def describe_exit(code: int) -> str:
    """Describe the end of a rank that left only its exit code (for a signal, its negative number)."""
    if code >= 0:
        return f"ended with exit code {code}"
    line = f"was killed by {signal.Signals(-code).name}"
    if -code != signal.SIGKILL:
        return line
    return f"{line} (if nobody did, the system ran out of memory: see dmesg, and give the job more)"


def _out_of_memory(failure: BaseException) -> str | None:
    """Class and message of the exception by which memory ran out, if it led to `failure`; else None."""
    cause: BaseException | None = failure
    while cause is not None:
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        if isinstance(cause, MemoryError):
            return text
        if isinstance(cause, RuntimeError | OSError) and OUT_OF_MEMORY.search(text):
            return text
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def _of_memory(text: str, config: "TrainConfig | None") -> str:
    on_gpu = OF_A_GPU.search(text) is not None
    wanted = ALLOCATION.search(text)
    line = f"out of {'GPU' if on_gpu else 'host'} memory"
    if wanted is not None:
        number, unit = wanted.groups()
        size = f"{float(number) / 2**30:,.1f} GiB" if unit == "bytes" else f"{number} {unit}"
        line += f" (tried to allocate {size})"
    if config is None:
        return f"{line}: lower trainer.micro_batch_size, or set trainer.activation_checkpointing=true"
    if not on_gpu and config.launch.device == "cuda":
        return (
            f"{line}: give the job more of it; checkpoints are staged there, 12 bytes per parameter over all "
            "ranks"
        )
    return f"{line}: set {', or '.join(_savings(config))}"


def _savings(config: "TrainConfig") -> list[str]:
    """What lowers the peak of memory, the least costly first. None of the first three changes the batch."""
    trainer, size = config.trainer, config.trainer.micro_batch_size
    # A graph holds the whole batch, and no layer that is computed again.
    graph = "trainer.cuda_graph=false with " if trainer.cuda_graph else ""
    found = []
    if size > 1:
        half = next(part for part in range(size // 2, 0, -1) if size % part == 0)  # divides the batch too
        found.append(f"{graph}trainer.micro_batch_size={half} (now {size})")
    if not trainer.activation_checkpointing:
        found.append(f"{graph}trainer.activation_checkpointing=true (now false)")
    if config.model.get("recompute_operator") is False:
        found.append("model.recompute_operator=true (now false)")
    if size == 1:
        found.append(f"a shorter trainer.seq_len (now {trainer.seq_len})")
        processes = config.launch.num_processes
        found.append(
            f"a larger launch.num_processes (now {processes}): ZeRO-2 shards the optimizer over the GPUs"
        )
    return found


class RankHung(RuntimeError):
    """A rank made no progress; the message is one line for the user."""


class Watchdog:
    """Calls `give_up` with one line when no `beat` has followed the last one in time.

    Work that repeats, such as a training step, names its kind, and has `timeout` seconds. It has `LONGER`
    times as many the first `FIRST_TIMES` that its kind occurs in this process: compiling and tuning kernels
    takes minutes. Work without a kind, which waits for disks or other processes, always has as many.

    Before the first beat, while the ranks meet and read their checkpoint, only the process group's own
    timeout counts. The watch runs in a thread, since a rank that waits for another, or for a GPU, hangs
    inside a call. The rank that hangs beat last before the others, which wait for it, so its line is the
    first.

    Args:
        timeout: seconds; 0: no watch.
        give_up: gets the line, in the watch's thread.
    """

    def __init__(self, timeout: float, give_up: Callable[[str], None]):
        self._timeout, self._give_up = timeout, give_up
        self._times: Counter[Hashable] = Counter()  # that each kind of work has occurred
        self._now = ("", float("inf"), 0.0)  # what is done, until when (monotonic), and the seconds it has
        self._closed = threading.Event()
        if timeout:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str, kind: Hashable = None) -> None:
        """Progress: what this rank does from now on.

        Args:
            doing: for the line.
            kind: equal for work that takes the same kernels; None: may always take long.
        """
        usual = kind is not None and self._times[kind] >= FIRST_TIMES
        self._times[kind] += 1
        seconds = self._timeout * (1 if usual else LONGER)
        self._now = (doing, time.monotonic() + seconds, seconds)

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout / 10)):
            doing, until, seconds = self._now
            if time.monotonic() > until:
                faulthandler.dump_traceback(file=sys.stderr)  # of all threads: where it hangs
                self._give_up(f"no progress for {seconds:g} s while {doing}")
                return


def end_process(report: Callable[[BaseException], None]) -> Callable[[str], None]:
    """A `give_up` that reports a `RankHung` and ends the process without waiting for any thread."""

    def give_up(line: str) -> None:
        report(RankHung(line))
        os._exit(1)

    return give_up
