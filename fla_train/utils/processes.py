"""Manage this process (cores, memory, end), children that die with it, and background commands."""

import atexit
import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fla_train.utils.ranks import local_world_size, without_ranks

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # constants of malloc.h
POLL = 0.5  # seconds between checks of a command
_MODULE = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
_ROOT = str(Path(__file__).parents[2])  # the folder that holds our package


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cores_of_rank() -> int:
    """Return a rank's number of cores, at least one. A process that is not a rank may use all."""
    return max(1, available_cores() // local_world_size())


def openmp_threads(default: int) -> int:
    """Return the number of threads that OMP_NUM_THREADS asks for, or the default.

    OpenMP allows a list, with a number for each level of nesting, and ignores anything else.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(threads) if threads.isdecimal() and int(threads) > 0 else default


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, even by kill -9.

    Args:
        parent: process id of the parent, to detect that it died before this call.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent died before the call above.
    if os.getppid() != parent:
        os._exit(1)


def end_without_collecting() -> None:
    """End this process without collecting garbage, which costs a second with torch and models."""
    atexit.register(gc.freeze)


def keep_freed_memory() -> None:
    """Keep the memory of freed tensors in this process for later tensors.

    The C library returns blocks of 32 MB and more to the system at once, and the system provides new memory
    page by page when it is first written. That takes longer than most operations on these tensors.
    """
    with suppress(AttributeError):  # only glibc has these settings
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command of a Python process that runs `code`, with `sys` imported and this package.

    It imports nothing from the current folder (`-P`), whose `queue.py` would hide the standard library's.
    Folders that only this process has in `sys.path` come last.
    """
    ours = f"import pathlib, sys; sys.path.insert(0, {_ROOT!r}); import fla_train; del sys.path[0]"
    others = f"sys.path += [path for path in {sys.path!r} if path not in sys.path]"
    return [sys.executable, "-P", "-c", f"{ours}; {others}; {code}", *arguments]


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the `python_command` of a module that is run as `__main__`."""
    return python_command(_MODULE, module, *arguments)


def start_command(name: str, overrides: Sequence[str], log: Path, **variables: str) -> subprocess.Popen:
    """Start `fla-NAME` as a process that is not a rank. It ends with this process, to free its GPU.

    Args:
        log: file for its output.
        variables: additional environment variables.

    Raises:
        OSError: `log` can't be written, or no process started.
    """
    bind = f"from fla_train.utils.processes import die_with_parent; die_with_parent({os.getpid()})"
    code = f"{bind}; from fla_train.cli.{name} import main; main()"
    with log.open("w") as file:
        return subprocess.Popen(
            python_command(code, *overrides),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=without_ranks(os.environ) | variables,
        )
