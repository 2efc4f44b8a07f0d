"""Describe and report failures of a rank in one sentence, and tell whether a restart may help.

This module does not import torch, not even indirectly, so that it can describe a failure to import torch.
"""

import json
import os
import re
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fla_train.utils.errors import Interrupted
from fla_train.utils.filesystem import write_whole

if TYPE_CHECKING:
    from fla_train.training.config import TrainConfig

# Exit statuses of a rank: another start may help (RETRY), or would fail again (FINAL).
RETRY, FINAL = 1, 2
# Messages about exhausted memory of torch, cuBLAS, NCCL and the system, which use various classes.
OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|not enough memory|can(?:no|')t allocate memory|ALLOC_FAILED|MemoryAllocation", re.I
)
GPU = re.compile(r"OutOfMemoryError|cuda|cublas|nccl", re.I)
ALLOCATION = re.compile(r"\ballocate ([\d.]+ [KMGT]iB)")


class TrainingStopped(RuntimeError):
    """Report to the user that training cannot continue, and would fail again after a restart."""


class TrainingFailed(RuntimeError):
    """Report that training started and did not finish, in one message for the user.

    Attributes:
        rank: rank of the worker that failed first, if a worker failed.
        final: whether the same command would fail again.
    """

    def __init__(self, line: str, rank: int | None = None, final: bool = False):
        super().__init__(line)
        self.rank, self.final = rank, final


def report(failure: BaseException, config: "TrainConfig | None" = None, *, has_log: bool = True) -> int:
    """Write the failure as one line for the agent, and in full to the log, as far as disks have space.

    Returns:
        This rank's exit status.
    """
    if has_log:
        with suppress(OSError):
            traceback.print_exception(failure)
    line, final = describe_failure(failure, config)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # Write the file atomically, because the agent may read it at any moment.
        with suppress(OSError):
            write_whole(Path(file), json.dumps({"message": line, "timestamp": int(time.time())}))
    return FINAL if final else RETRY


def describe_failure(failure: BaseException, config: "TrainConfig | None" = None) -> tuple[str, bool]:
    """Describe an exception that ended a rank.

    Args:
        config: config of the run, with its device resolved; None: it could not be read.

    Returns:
        One line, and whether the failure is final: a restart would fail in this way again.
    """
    if (memory := _out_of_memory(failure)) is not None:
        return _memory_advice(memory, config), True
    line = " ".join(str(failure).split())
    final = isinstance(failure, ValueError | TrainingStopped) and not isinstance(failure, Interrupted)
    clear = final or type(failure).__module__.startswith("fla_train.")  # our messages need no class
    name = type(failure).__name__
    return ((line or name) if clear else f"{name}: {line}".removesuffix(": ")), final


def describe_exit(code: int) -> str:
    """Describe the end of a rank that left only its exit code (for a signal, its negative number)."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
    line = f"was killed by {names.get(-code, f'signal {-code}')}"
    if -code != signal.SIGKILL:
        return line
    return f"{line} (if nobody did, the system ran out of memory: see dmesg, and give the job more)"


def _out_of_memory(failure: BaseException) -> str | None:
    """Return class and message of the out-of-memory exception that led to `failure`, or None."""
    cause: BaseException | None = failure
    while cause is not None:
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        if isinstance(cause, MemoryError):
            return text
        if isinstance(cause, RuntimeError | OSError) and OUT_OF_MEMORY.search(text):
            return text
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def _memory_advice(text: str, config: "TrainConfig | None") -> str:
    on_gpu = GPU.search(text) is not None
    line = "out of GPU memory" if on_gpu else "out of host memory"
    if size := ALLOCATION.search(text):
        line += f" (tried to allocate {size[1]})"
    if config is None:
        return line
    if not on_gpu and config.launch.device == "cuda":
        staged = "checkpoints are staged there, 12 bytes per parameter over all ranks"
        return f"{line}: give the job more of it; {staged}"
    return (
        f"{line}: lower trainer.micro_batch_size (now {config.trainer.micro_batch_size}), set "
        f"trainer.activation_checkpointing=true (now {str(config.trainer.activation_checkpointing).lower()}) "
        f"or raise launch.num_processes (now {config.launch.num_processes}); docs/hardware.md lists more"
    )
