"""This process (its cores, memory and end), children that die with it, and commands beside training."""

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
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
POLL = 0.5  # seconds between looks at a command
_BIND = "from fla_train.utils.processes import die_with_parent; die_with_parent({parent})"
_RUN = "from fla_train.cli.{name} import main; main()"
_MODULE = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
_ROOT = str(Path(__file__).parents[2])  # the folder that holds our package


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_rank() -> int:
    """A rank's share of them, at least one; of a process that is no rank all."""
    return max(1, available_cores() // local_world_size())


def openmp_threads(default: int) -> int:
    """Return the number of threads that OMP_NUM_THREADS asks for, or the default.

    OpenMP allows a list, with a number for each level of nesting, and ignores anything else.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(threads) if threads.isdecimal() and int(threads) > 0 else default


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


def end_without_collecting() -> None:
    """Have this process end without looking for garbage: a second, with the objects of torch and models."""
    atexit.register(gc.freeze)


def keep_freed_memory() -> None:
    """Have this process keep the memory of freed tensors for the next ones, up to the most it has needed.

    The C library gives blocks of 32 MB and more back at once, and the system hands the next ones out page by
    page as they are first written. That takes longer than what most operations do with them.
    """
    with suppress(AttributeError):  # only glibc has these settings
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command of a Python process that runs `code`, with `sys` imported and our package.

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
    """Start `fla-NAME` as no rank of a run. It ends with this process, lest a restart finds it on its GPU.

    Args:
        log: file for its output.
        variables: of its environment, besides those of this process.

    Raises:
        OSError: `log` can't be written, or no process started.
    """
    code = f"{_BIND.format(parent=os.getpid())}; {_RUN.format(name=name)}"
    with log.open("w") as file:
        return subprocess.Popen(
            python_command(code, *overrides),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=without_ranks(os.environ) | variables,
        )
