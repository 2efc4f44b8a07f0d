"""Start, watch and restart this machine's workers with `torch.distributed.elastic`.

Torch's `SimpleElasticAgent` lets the machines meet, restarts the workers, and waits for the other machines at
the end. `Agent` adds our processes and rules: a request to stop saves a checkpoint, an error that would recur
ends the run, a new checkpoint resets the count of failures, and a failed worker's peers are killed at once.

Machines meet in torch's c10d rendezvous, whose store the main machine serves at `launch.main_process_port`.
If there is only one machine, the store is in this process and no port is opened.
"""

import json
import logging
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from torch.distributed import HashStore
from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.agent import server
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from fla_train.run.import_ahead import end_waiting_workers, start_worker
from fla_train.training import process_group
from fla_train.training.config import LaunchConfig
from fla_train.training.failures import FINAL, TrainingFailed, describe_exit
from fla_train.training.log import log
from fla_train.training.preemption import EXIT_CODE, SIGNALS, Preempted, StopSignals
from fla_train.utils.processes import available_cores, openmp_threads
from fla_train.utils.timeline import BEGAN

# Seconds between checks of the workers. With several machines each check reads their store.
POLL = 0.1
# Seconds that the main machine keeps its store after a failure, so that the other machines see it.
LINGER = 3.0
READ_TIMEOUT = 15  # timeout in seconds of one operation on the store
RETRY = 1.0  # seconds between attempts to reach the store
# Seconds that a machine whose workers have ended waits for the workers of the other machines.
LONGEST_FINISH = 7 * 24 * 3600.0
# Seconds for a killed worker to end. One that hangs in a driver may never end.
LONGEST_DEATH = 30.0


def run_workers(
    arguments: Sequence[str],
    launch: LaunchConfig,
    *,
    newest_step: Callable[[], int],
    run: str,
    scratch: Path,
    began: float | None = None,
) -> None:
    """Run `python ARGUMENTS` for each rank of this machine until all have ended.

    SIGUSR1, SIGTERM, SIGHUP and a first Ctrl-C make the workers save a checkpoint and end.

    Args:
        newest_step: returns the step of the newest checkpoint. When it grows, earlier failures no longer
            count.
        run: the run's folder. Agents of different runs do not join each other.
        scratch: folder on this machine for stores and error files.
        began: Unix time from which the first workers count their startup; None: now.

    Raises:
        TrainingFailed: no restart is left, or machines did not join.
        Preempted: the workers have saved a checkpoint, or failed while saving it.
        KeyboardInterrupt: on a second Ctrl-C; the workers have been killed.
        ValueError: other machines cannot reach `launch.main_process_ip`.
    """
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            # Our messages replace those of torch.
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the workers use the store of the rendezvous
    address = f"{launch.main_process_ip}:{launch.main_process_port}"
    within = f"within {launch.rendezvous_timeout:g} s (launch.rendezvous_timeout)"
    if launch.num_machines > 1:
        process_group.check_address(launch.main_process_ip)
        log(f"machines     waiting for all {launch.num_machines} at {address}")
    restarts, deadline = launch.max_restarts, time.monotonic() + launch.rendezvous_timeout
    with StopSignals() as signals:
        while True:
            agent = None
            try:
                rendezvous = _rendezvous(launch, address, os.path.abspath(run))
                command = [sys.executable, *arguments]
                agent = Agent(command, launch, rendezvous, restarts, newest_step, scratch, signals, began)
                return agent.run_to_end()
            except elastic.RendezvousTimeoutError:
                # Torch has no public name for the machines that waited. This one has just been removed.
                joined = len(rendezvous._state_holder.state.participants) + 1
                raise TrainingFailed(
                    f"{joined} of {launch.num_machines} machines joined at {address} {within}"
                ) from None
            except elastic.RendezvousClosedError:
                raise TrainingFailed("another machine has ended the run: see its output") from None
            except elastic.RendezvousConnectionError:
                if agent is not None and agent.begun:
                    restarts = agent._remaining_restarts - 1
                    if restarts < 0:
                        raise TrainingFailed(f"the machine that serves {address} has gone") from None
                    log(f"restart      waiting for the machine that serves {address}")
                    deadline = time.monotonic() + launch.rendezvous_timeout
                elif time.monotonic() > deadline:
                    raise TrainingFailed(f"no store answers at {address} {within}") from None
                time.sleep(RETRY)


def _rendezvous(launch: LaunchConfig, address: str, run: str) -> DynamicRendezvousHandler:
    """Return the machines' rendezvous, with the store in this process if there is only one machine."""
    several = launch.num_machines > 1
    timeout = max(1, math.ceil(launch.rendezvous_timeout))
    parameters = elastic.RendezvousParameters(
        backend="c10d",
        endpoint=address,
        run_id=run,
        min_nodes=launch.num_machines,
        max_nodes=launch.num_machines,
        local_addr=None if several else process_group.LOOPBACK,
        join_timeout=timeout,
        read_timeout=min(READ_TIMEOUT, timeout),
    )
    if not several:
        store = HashStore()
        return create_handler(store, C10dRendezvousBackend(store, run), parameters)
    rank = launch.machine_rank
    serves = process_group.is_own_address(launch.main_process_ip) if rank is None else rank == 0
    parameters.config["is_host"] = serves
    try:
        backend, store = create_backend(parameters)
    except elastic.RendezvousConnectionError:
        if not serves or rank == 0:
            raise
        # An agent that started earlier on this machine serves the store.
        parameters.config["is_host"] = False
        backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


class Agent(server.SimpleElasticAgent):
    """Run the workers of one machine, with rules for restarts, requests to stop and final errors.

    Attributes:
        begun: whether workers have been started.
    """

    def __init__(
        self,
        command: Sequence[str],
        launch: LaunchConfig,
        rendezvous: DynamicRendezvousHandler,
        restarts: int,
        newest_step: Callable[[], int],
        scratch: Path,
        signals: StopSignals,
        began: float | None,
    ):
        spec = server.WorkerSpec(
            role="rank",
            local_world_size=launch.num_processes // launch.num_machines,
            entrypoint=command[0],
            rdzv_handler=rendezvous,
            max_restarts=restarts,
            monitor_interval=POLL,
            master_addr=launch.main_process_ip,
            master_port=launch.main_process_port,
        )
        super().__init__(spec, exit_barrier_timeout=LONGEST_FINISH)
        self._command, self._launch, self._newest_step = command, launch, newest_step
        self._scratch, self._signals = scratch, signals
        self._began = began or time.time()
        self._workers: list[Popen] = []
        # Step of the newest checkpoint when the workers started.
        self._step = 0
        self._stopped, self.begun = False, False
        self._failure: TrainingFailed | None = None

    def run_to_end(self) -> None:
        """Run the workers until they have ended on all machines. Raise as `run_workers`."""
        result = self.run()
        # Close the rendezvous for all machines. After a success all of their workers have ended.
        self._worker_group.spec.rdzv_handler.shutdown()
        if self._stopped:
            raise Preempted
        if result.is_failed():
            assert self._failure is not None
            if self._launch.num_machines > 1:
                time.sleep(LINGER)
            if self._signals.requested and not self._failure.final:
                raise Preempted
            raise self._failure

    def _start_workers(self, worker_group: server.WorkerGroup) -> dict[int, int]:
        # All machines use one name for this start, which the first machine chooses.
        name = worker_group.store.compare_set("start", "", secrets.token_hex(8)).decode()
        self._folder = self._scratch / name
        self._folder.mkdir(parents=True)
        local_world = worker_group.spec.local_world_size
        common = {
            "FLA_TRAIN_LAUNCHER": str(os.getpid()),
            BEGAN: str(self._began),
            "LOCAL_WORLD_SIZE": str(local_world),
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": str(worker_group.master_port),
            "OMP_NUM_THREADS": str(openmp_threads(default=max(1, available_cores() // local_world))),
            # Threads that spin while they wait slow down a shared CPU several times.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            "TOKENIZERS_PARALLELISM": "false",
            # A rank ends when one of its collectives fails, as under torchrun.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        if self._launch.num_machines == 1:
            common[process_group.STORE_FILE] = str(self._folder / "store")
        else:
            common[process_group.STORE_PREFIX] = name
        if self._launch.device == "cpu":
            # DeepSpeed reads these variables when it is imported.
            common |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self._step, self.begun = self._newest_step(), True
        for worker in worker_group.workers:
            variables = {
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                "TORCHELASTIC_ERROR_FILE": str(self._error_file(worker.local_rank)),
            }
            self._workers.append(start_worker(self._command, os.environ | common | variables))
        end_waiting_workers()
        self._signals.workers = self._workers
        return {rank: process.pid for rank, process in enumerate(self._workers)}

    def _error_file(self, local_rank: int) -> Path:
        return self._folder / f"error-{local_rank}.json"

    def _monitor_workers(self, worker_group: server.WorkerGroup) -> server.RunResult:
        self._signals.repeat()
        codes = [process.poll() for process in self._workers]
        # A request kills a worker that has not installed its handlers yet. Such a worker has nothing to save.
        killed = {-number for number in SIGNALS} if self._signals.requested else set()
        failed = {rank: code for rank, code in enumerate(codes) if code not in (None, 0, EXIT_CODE, *killed)}
        if failed:
            self._shutdown()  # the other workers wait for the failed ones
            self._plan_restart(self._first(failed))
            return server.RunResult(server.WorkerState.FAILED)
        if None in codes and not killed & {*codes}:
            if self._launch.num_machines > 1 and worker_group.spec.rdzv_handler.is_closed():
                raise elastic.RendezvousClosedError
            return server.RunResult(server.WorkerState.HEALTHY)
        self._shutdown()
        self._stopped = any(codes)
        return server.RunResult(
            server.WorkerState.SUCCEEDED, {w.global_rank: None for w in worker_group.workers}
        )

    def _first(self, failed: dict[int, int]) -> TrainingFailed:
        """Return the earliest failure, by error files. A killed worker leaves none and makes the others fail.

        Args:
            failed: exit codes by local rank.
        """
        files = {rank: self._error_file(rank) for rank in failed if self._error_file(rank).is_file()}
        times = {rank: file.stat().st_mtime for rank, file in files.items()}
        first = min(failed, key=lambda rank: 0.0 if failed[rank] < 0 else times.get(rank, math.inf))
        line = describe_exit(failed[first])
        if first in files:
            line = json.loads(files[first].read_text())["message"]
        rank = self._worker_group.workers[first].global_rank
        return TrainingFailed(f"rank {rank}: {line}", rank, final=failed[first] == FINAL)

    def _plan_restart(self, failure: TrainingFailed) -> None:
        self._failure = failure
        limit = self._launch.max_restarts
        if failure.final or self._signals.requested:
            self._remaining_restarts = 0
        # After a new checkpoint, earlier failures no longer count.
        elif self._newest_step() > self._step:
            self._remaining_restarts = limit
        if self._remaining_restarts:
            self._signals.workers = ()
            self._began = time.time()
            log(f"restart      {limit - self._remaining_restarts + 1} of {limit}, {failure}")

    def _shutdown(self, *_: object, **__: object) -> None:
        """Kill the workers. This is safe because their files are complete or absent after a kill.

        SIGTERM would not reach a worker that waits inside a collective.
        """
        for worker in self._workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            with suppress(TimeoutExpired):
                worker.wait(LONGEST_DEATH)
        self._workers = []

    _stop_workers = _shutdown  # of the base class: before a restart, and at the end
