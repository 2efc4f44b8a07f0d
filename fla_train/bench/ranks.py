"""Run the same function on several processes of this machine, one a GPU, by torch.multiprocessing."""

import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn

from fla_train.training.process_group import STORE_FILE


def on_ranks(count: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """`work(*arguments)` in `count` new processes with the environment of a process group; rank 0's result.

    What they print goes to stderr. None outlives this process, nor the first failure, which is raised here;
    its cause holds the process's traceback.

    Raises:
        RuntimeError: a process died, or failed with an exception that can't be pickled.
    """
    with tempfile.TemporaryDirectory(prefix="fla-bench-") as folder:
        try:
            spawn(_rank, (count, Path(folder), work, arguments), nprocs=count, daemon=True)
        except ProcessRaisedException as failure:
            raise _read(folder, failure.error_index) from failure
        except ProcessExitedException as failure:
            raise RuntimeError(f"rank {failure.error_index} died: {failure}") from None
        return _read(folder, 0)


def _rank(rank: int, count: int, folder: Path, work: Callable[..., Any], arguments: tuple) -> None:
    """Leave what `work` returns or raises in a file of `folder`."""
    os.dup2(2, 1)  # stdout holds the tables
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    # They meet at a file: a port found free could be taken before they listen there.
    os.environ |= {"LOCAL_WORLD_SIZE": str(count), STORE_FILE: str(folder / "store")}
    threading.Thread(target=_end_with_parent, daemon=True).start()
    outcome = folder / f"rank-{rank}"
    try:
        outcome.write_bytes(pickle.dumps(work(*arguments)))
    except Exception as failure:
        outcome.write_bytes(_pickled(failure))
        raise
    if dist.is_initialized():  # its threads might keep this process from ending
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """torch only interrupts a rank whose parent was killed; one that waits for another would not hear it."""
    parent_process().join()
    os._exit(1)


def _pickled(failure: Exception) -> bytes:
    """`failure`, or a RuntimeError in place of one that doesn't survive."""
    try:
        content = pickle.dumps(failure)
        if type(pickle.loads(content)) is type(failure):
            return content
    except Exception:
        pass
    return pickle.dumps(RuntimeError(f"{type(failure).__name__}: {failure}"))


def _read(folder: str, rank: int) -> Any:
    return pickle.loads(Path(folder, f"rank-{rank}").read_bytes())
