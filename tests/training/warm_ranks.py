"""Ranks that stay: processes that have paid for their imports do one piece of work after another.

For tests of what a run computes and writes. Those of how workers start, fail and end use `launch` itself.
"""

import contextlib
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fla_train.run.agent import run_workers
from fla_train.run.launch import launch
from fla_train.training.config import LaunchConfig, TrainConfig
from fla_train.training.process_group import STORE_FILE
from fla_train.utils.timeline import Timeline

TWO_RANKS = [
    *("launch.num_processes=2", "launch.device=cpu", "trainer.precision=fp32"),
    *("trainer.checkpoint_every=5", "trainer.log_every=2"),
]
TIMEOUT = 300.0  # seconds for a piece of work
ON_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
# Coverage watches them even if the test that needs them first is one of those `unwatched`.
WATCHED = {key: value for key, value in os.environ.items() if key.startswith("COVERAGE_")}


class WarmRanks:
    """As many ranks on the CPU as were ever needed at once."""

    def __init__(self) -> None:
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def launch(self, config: TrainConfig) -> None:
        """`fla_train.run.launch.launch` with these ranks as its workers, if it trains on the CPU."""
        with self.as_workers():
            launch(config)

    @contextlib.contextmanager
    def as_workers(self) -> Iterator[None]:
        """Inside, training on the CPU is done by these ranks."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fla_train.run.launch.run_workers", self._run_workers)
            yield

    def run(self, world: int, work: Callable, *arguments: object) -> list:
        """What `work(*arguments)` returns on each of `world` ranks.

        Their environment and working directory are those of a worker.
        """
        self._ranks += [_start() for _ in range(world - len(self._ranks))]
        ranks = self._ranks[:world]
        results = []
        with tempfile.TemporaryDirectory() as folder, self._ended_on_failure():
            common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, STORE_FILE: Path(folder, "store")}
            for rank, (_, connection) in enumerate(ranks):
                environment = common | {"RANK": rank, "LOCAL_RANK": rank}
                connection.send((work, arguments, os.getcwd(), environment))
            for rank, (_, connection) in enumerate(ranks):
                assert connection.poll(TIMEOUT), f"rank {rank} is still at it"
                error, result = connection.recv()
                assert error is None, f"rank {rank}: {error}"
                results.append(result)
        return results

    @contextlib.contextmanager
    def _ended_on_failure(self) -> Iterator[None]:
        """Kill the ranks if one fails, so that the next test starts new ones."""
        try:
            yield
        except BaseException:
            for process, _ in self._ranks:
                process.kill()
            self._ranks = []
            raise

    def close(self) -> None:
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            process.join()

    def _run_workers(self, arguments: Sequence[str], config: LaunchConfig, **how: Any) -> None:
        if config.device != "cpu":
            return run_workers(arguments, config, **how)
        self.run(config.num_processes, train_plan, Path(arguments[-1]))


def _start() -> tuple[BaseProcess, Connection]:
    # The forks of one server share its imports. Coverage watches processes that begin anew.
    context = multiprocessing.get_context("spawn" if WATCHED else "forkserver")
    if not WATCHED:
        names = ("training.trainer", "models.modeling", "utils.figure_style")
        context.set_forkserver_preload(["deepspeed", *(f"fla_train.{name}" for name in names)])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with pytest.MonkeyPatch.context() as patch:  # before anything is imported there
        for key, value in (ON_CPU | WATCHED).items():
            patch.setenv(key, value)
        process.start()
    theirs.close()
    return process, ours


def _serve(connection: Connection) -> None:
    """In a rank's process: do what `connection` asks for, until it is closed or something fails."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            work, arguments, folder, environment = connection.recv()
            os.chdir(folder)
            gc.freeze()  # The trainer collects garbage and thaws what imports have left, each run.
            try:
                connection.send((None, _as_rank(work, arguments, environment)))
            except BaseException:
                connection.send((traceback.format_exc(), None))
                return


def _as_rank(work: Callable, arguments: Sequence[object], environment: Mapping[str, object]) -> object:
    """Do it, and leave the process as it was before it joined any group."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState
    from deepspeed.utils import groups

    os.environ |= {key: str(value) for key, value in environment.items()}
    result = work(*arguments)
    dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    groups._WORLD_GROUP = None
    return result


def train_plan(file: Path) -> None:
    from fla_train.run import rank
    from fla_train.training.plan import read_plan

    plan = read_plan(file)
    with (Path(plan.config.run.dir) / "train.log").open("a") as log:
        rank.train(plan, log, SimpleNamespace(arrived=lambda: False), Timeline())
