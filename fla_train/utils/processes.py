"""CPU cores of this process, and child processes that die with their parent."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_rank() -> int:
    """A rank's share of them, at least one; of a process that is no rank all."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it dies, even by kill -9 (Linux).

    Args:
        parent: its id, to tell whether it died before this call.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)
