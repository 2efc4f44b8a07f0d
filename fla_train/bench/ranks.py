"""Run a function on several processes of this machine, one per GPU."""

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn

from fla_train.training.process_group import STORE_FILE


def on_ranks(count: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run `work(*arguments)` in `count` new processes with the environment of a process group.

    The first failure ends all processes. Their output goes to stderr.

    Returns:
        Rank 0's result.

    Raises:
        RuntimeError: a process failed; with the message of its exception.
    """
    with tempfile.TemporaryDirectory(prefix="fla-bench-") as folder:
        try:
            spawn(_rank, (count, Path(folder), work, arguments), nprocs=count, daemon=True)
        except (ProcessRaisedException, ProcessExitedException) as failure:
            raise RuntimeError(str(failure).strip().splitlines()[-1]) from failure
        return pickle.loads(Path(folder, "result").read_bytes())  # noqa: S301 (our ranks wrote it)


def _rank(rank: int, count: int, folder: Path, work: Callable[..., Any], arguments: tuple) -> None:
    os.dup2(2, 1)  # stdout is for the tables
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    # They meet at a file, because another process could take a free port before they listen.
    os.environ |= {"LOCAL_WORLD_SIZE": str(count), STORE_FILE: str(folder / "store")}
    result = work(*arguments)
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
    if dist.is_initialized():  # its threads could keep this process from ending
        dist.destroy_process_group()
