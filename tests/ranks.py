"""Processes of one job, as a launcher would start them."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path


def free_port() -> int:
    """One below those that the system hands out to outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def environments(world: int) -> list[dict[str, str]]:
    """Return the variables that a launcher sets for each rank."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def start_ranks(arguments: Sequence[str], world: int) -> list[subprocess.Popen]:
    """Start `python ARGUMENTS` once per rank, with pipes for what it prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([sys.executable, *arguments], env=os.environ | environment, **pipes)
        for environment in environments(world)
    ]


def fork_ranks(work: Callable[[], None], world: int, folder: Path) -> list[tuple[int, str, str]]:
    """Run `work` once per rank in forks of this process, which have its imports.

    Returns:
        exit status, stdout and stderr of each rank, which are written to files in `folder`.
    """
    files = [[folder / f"rank-{rank}.{name}" for name in ("out", "err")] for rank in range(world)]
    started = []
    for environment, outputs in zip(environments(world), files, strict=True):
        if not (process := os.fork()):
            _run_and_exit(work, environment, outputs)
        started.append(process)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]
    return [(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, files, strict=True)]


def _run_and_exit(work: Callable[[], None], environment: dict[str, str], outputs: list[Path]) -> None:
    code = 1
    try:
        os.environ |= environment
        sys.stdout, sys.stderr = (output.open("w", buffering=1) for output in outputs)
        for descriptor, stream in enumerate((sys.stdout, sys.stderr), start=1):
            os.dup2(stream.fileno(), descriptor)
        work()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
