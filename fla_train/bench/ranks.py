"""The same work on several processes of this machine, one a GPU, which end together."""

import os
import pickle
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fla_train.training.process_group import STORE_FILE

FAREWELL = 10.0  # seconds for a process to end by itself, its result sent


def on_ranks(count: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """`work(*arguments)` in `count` new processes with the environment of a process group; rank 0's result.

    What they print goes to stderr. None outlives this process, nor the first failure, which is raised here
    with the process's traceback as a note.

    Raises:
        RuntimeError: if a process died.
    """
    with tempfile.TemporaryDirectory(prefix="fla-bench-") as folder:
        return _run(count, Path(folder, "store"), work, arguments)


def _run(count: int, store: Path, work: Callable[..., Any], arguments: tuple) -> Any:
    context = get_context("spawn")
    processes, pending, first = [], {}, None
    try:
        for rank in range(count):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(sender, rank, count, store, work, arguments), daemon=True
            )
            process.start()
            processes.append(process)
            sender.close()  # the process has its own: when it dies, the pipe ends
            pending[receiver] = rank
        while pending:
            for receiver in wait(list(pending)):
                rank = pending.pop(receiver)
                try:
                    result = receiver.recv()
                except (EOFError, OSError):  # OSError: in the middle of a result
                    raise RuntimeError(f"the process of rank {rank} died") from None
                if isinstance(result, Exception):
                    raise result
                first = result if rank == 0 else first
        for process in processes:
            process.join(FAREWELL)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return first


def _rank(
    sender: Connection, rank: int, count: int, store: Path, work: Callable[..., Any], arguments: tuple
) -> None:
    os.dup2(2, 1)  # stdout holds the tables
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    # They meet at a file: a port found free could be taken before they listen there.
    os.environ |= {"LOCAL_WORLD_SIZE": str(count), STORE_FILE: str(store)}
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result = work(*arguments)
        sender.send(result)
    except Exception as failure:
        sent = failure if _survives(failure) else RuntimeError(f"{type(failure).__name__}: {failure}")
        sent.add_note(f"On rank {rank}:\n{traceback.format_exc()}")  # a pickled exception has no traceback
        sender.send(sent)


def _end_with_parent() -> None:
    """Who kills the parent kills its ranks, which might wait for each other for good."""
    parent_process().join()
    os._exit(1)


def _survives(failure: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(failure))) is type(failure)
    except Exception:
        return False
