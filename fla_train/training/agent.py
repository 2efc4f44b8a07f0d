"""Start, watch and restart this machine's workers with `torch.distributed.elastic`.

The agent extends torch's agent. A request to stop saves a checkpoint. An error that would recur ends the
run. A new checkpoint resets the count of failures. When a worker fails, the others are killed at once.

Machines meet in torch's c10d rendezvous, whose store the main machine serves at `launch.main_process_port`.
If there is only one machine, the store is in this process and no port is opened.
"""

import hashlib
import logging
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from torch.distributed import HashStore, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    create_handler,
)

from fla_train.training.config import LaunchConfig
from fla_train.training.failures import describe_exit
from fla_train.training.log import log
from fla_train.training.preemption import EXIT_CODE, SIGNALS, Preempted, StopSignals
from fla_train.training.process_group import (
    LOOPBACK,
    STORE_FILE,
    STORE_PREFIX,
    check_address,
    is_loopback,
    is_own_address,
)
from fla_train.training.worker import FINAL
from fla_train.utils.import_ahead import CPU_ONLY, start_worker
from fla_train.utils.processes import available_cores, openmp_threads
from fla_train.utils.timeline import BEGAN

DEFAULT_PORT = 29500
# Seconds between checks of the workers. With several machines each check reads their store.
POLL = 0.1
# Seconds that the main machine keeps its store after a failure, so that the other machines see it.
LINGER = 3.0
READ_TIMEOUT = 15  # timeout in seconds of one operation on the store
RETRY = 1.0  # seconds between attempts to reach the store
# Seconds that a machine whose workers have ended waits for the workers of the other machines.
LONGEST_FINISH = 7 * 24 * 3600.0


class WorkersFailed(RuntimeError):
    """Report that workers failed with no restart left, or that machines did not join.

    Attributes:
        rank: rank of the worker that failed first, if a worker failed.
        final: whether the same command would fail again.
    """

    def __init__(self, line: str, rank: int | None = None, final: bool = False):
        super().__init__(line)
        self.rank, self.final = rank, final


@dataclass(frozen=True)
class Failure:
    """Describe how the first worker failed."""

    rank: int
    line: str
    final: bool

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.line}"


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
        WorkersFailed: no restart is left, or machines did not join.
        Preempted: the workers have saved a checkpoint, or failed while saving it.
        KeyboardInterrupt: on a second Ctrl-C; the workers have been killed.
        ValueError: other machines cannot reach `launch.main_process_ip`.
    """
    if launch.num_machines > 1:
        check_address(launch.main_process_ip)
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            # Our messages replace those of torch.
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Torch has no public way to pass its agent a process that is already running.
    SubprocessHandler._popen = lambda handler, command, environment: start_worker(command, environment)
    with StopSignals() as signals, _environment(launch, began):
        _Launcher(arguments, launch, newest_step, run, scratch, signals).run()


class _Launcher:
    """Run an agent to its end. Start another agent if the connection to the store was lost."""

    def __init__(
        self,
        arguments: Sequence[str],
        launch: LaunchConfig,
        newest_step: Callable[[], int],
        run: str,
        scratch: Path,
        signals: StopSignals,
    ):
        self._arguments, self._launch, self._newest_step = arguments, launch, newest_step
        self._run, self._scratch, self._signals = run, scratch, signals
        self._restarts = launch.max_restarts
        self._port = launch.main_process_port or DEFAULT_PORT
        self._place = f"{launch.main_process_ip}:{self._port}"

    def run(self) -> None:
        several = self._launch.num_machines > 1
        if several:
            log(f"machines     waiting for all {self._launch.num_machines} at {self._place}")
            if is_loopback(self._launch.main_process_ip):
                log("machines     other machines do not reach this address: set launch.main_process_ip")
        deadline = time.monotonic() + self._launch.rendezvous_timeout
        while True:
            agent = None
            try:
                agent = self._agent()
                return self._finish(agent, agent.run())
            except RendezvousTimeoutError:
                assert agent is not None
                joined, expected = _joined(agent.rendezvous), self._launch.num_machines
                raise WorkersFailed(
                    f"{joined} of {expected} machines joined at {self._place} {self._within()}"
                ) from None
            except RendezvousClosedError:
                raise WorkersFailed("another machine has ended the run: see its output") from None
            except RendezvousConnectionError:
                if agent is not None and agent.begun:
                    self._restarts = agent.restarts_left()
                    if not self._restarts:
                        raise WorkersFailed(f"the machine that serves {self._place} has gone") from None
                    self._restarts -= 1
                    log(f"restart      waiting for the machine that serves {self._place}")
                    deadline = time.monotonic() + self._launch.rendezvous_timeout
                elif time.monotonic() > deadline:
                    raise WorkersFailed(f"no store answers at {self._place} {self._within()}") from None
                time.sleep(RETRY)

    def _finish(self, agent: "Agent", result: RunResult) -> None:
        """Return or raise according to how the workers ended."""
        # Close the rendezvous for all machines. After a success all of their workers have ended.
        agent.rendezvous.shutdown()
        if agent.stopped:
            raise Preempted
        if result.is_failed():
            assert agent.failure is not None
            if self._launch.num_machines > 1:
                time.sleep(LINGER)
            if self._signals.requested and not agent.failure.final:
                raise Preempted
            raise WorkersFailed(str(agent.failure), agent.failure.rank, agent.failure.final)

    def _agent(self) -> "Agent":
        launch = self._launch
        several = launch.num_machines > 1
        timeout = max(1, math.ceil(launch.rendezvous_timeout))
        settings: dict[str, object] = {"join_timeout": timeout, "read_timeout": min(READ_TIMEOUT, timeout)}
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=self._place,
            # Hash the path, because torch creates a folder in `scratch` whose name begins with the run id.
            run_id=hashlib.sha256(os.path.abspath(self._run).encode()).hexdigest(),
            min_nodes=launch.num_machines,
            max_nodes=launch.num_machines,
            local_addr=None if several else LOOPBACK,
            **settings,
        )
        backend, store = self._backend(parameters)
        spec = WorkerSpec(
            role="rank",
            local_world_size=launch.num_processes // launch.num_machines,
            entrypoint=sys.executable,
            args=tuple(self._arguments),
            rdzv_handler=create_handler(store, backend, parameters),
            max_restarts=self._restarts,
            monitor_interval=POLL,
            master_addr=launch.main_process_ip if several else None,
            master_port=self._port if several else None,
        )
        return Agent(spec, launch, self._newest_step, self._scratch, self._signals)

    def _backend(self, parameters: RendezvousParameters) -> tuple[RendezvousBackend, Store]:
        """Return the store: in this process, or for several machines the one that the main machine serves."""
        if self._launch.num_machines == 1:
            store = HashStore()
            return C10dRendezvousBackend(store, parameters.run_id), store
        rank = self._launch.machine_rank
        serves = is_own_address(self._launch.main_process_ip) if rank is None else rank == 0
        parameters.config["is_host"] = serves
        try:
            return create_backend(parameters)
        except RendezvousConnectionError:
            if not serves or rank == 0:
                raise
        # An agent that started earlier on this machine serves the store.
        parameters.config["is_host"] = False
        return create_backend(parameters)

    def _within(self) -> str:
        return f"within {self._launch.rendezvous_timeout:g} s (launch.rendezvous_timeout)"


class Agent(LocalElasticAgent):
    """Extend torch's agent of one machine with rules for restarts, requests to stop and final errors.

    Attributes:
        rendezvous: the rendezvous of the machines.
        stopped: whether all workers have ended on request.
        failure: the newest failure.
        begun: whether workers have been started.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        launch: LaunchConfig,
        newest_step: Callable[[], int],
        scratch: Path,
        signals: StopSignals,
    ):
        super().__init__(spec, DefaultLogsSpecs(str(scratch / "errors")), exit_barrier_timeout=LONGEST_FINISH)
        self.rendezvous = spec.rdzv_handler
        self._launch, self._newest_step, self._scratch, self._signals = launch, newest_step, scratch, signals
        # Step of the newest checkpoint when the workers started.
        self._step = 0
        self.stopped, self.begun = False, False
        self.failure: Failure | None = None

    def restarts_left(self) -> int:
        return self._remaining_restarts

    def _processes(self) -> list[Popen]:
        return [handler.proc for handler in self._pcontext.subprocess_handlers.values()]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        # All machines use one name for this start: the machine that asks first chooses it.
        name = worker_group.store.compare_set("start", "", secrets.token_hex(8)).decode()
        if self._launch.num_machines == 1:
            os.environ[STORE_FILE] = str(self._scratch / name)
        else:
            os.environ[STORE_PREFIX] = name
        self._step, self.begun = self._newest_step(), True
        pids = super()._start_workers(worker_group)
        # Torch has installed its signal handlers: replace them again.
        self._signals.pass_to(self._processes())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._signals.repeat()
        codes = {rank: process.poll() for rank, process in enumerate(self._processes())}
        # A request kills a worker that has not installed its handlers yet. Such a worker has nothing to save.
        killed = {-number for number in SIGNALS} if self._signals.requested else set()
        failed = [rank for rank, code in codes.items() if code not in (None, 0, EXIT_CODE, *killed)]
        if not failed and any(code in killed for code in codes.values()):
            return self._stop(worker_group)
        if not failed and EXIT_CODE in codes.values():
            still = None in codes.values()
            return RunResult(state=WorkerState.HEALTHY) if still else self._stop(worker_group)
        if failed:
            self._shutdown()  # the other workers wait for the failed ones
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            ranks = [worker_group.workers[local].global_rank for local in failed]
            self._plan_restart(_first({rank: result.failures[rank] for rank in ranks}))
        elif self._launch.num_machines > 1 and result.state is WorkerState.HEALTHY:
            if self.rendezvous.is_closed():
                raise RendezvousClosedError
        return result

    def _stop(self, worker_group: WorkerGroup) -> RunResult:
        self._shutdown()
        self.stopped = True
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in worker_group.workers}
        )

    def _plan_restart(self, failure: Failure) -> None:
        self.failure = failure
        limit = self._launch.max_restarts
        if failure.final or self._signals.requested:
            self._remaining_restarts = 0
        # After a new checkpoint, earlier failures no longer count.
        elif self._newest_step() > self._step:
            self._remaining_restarts = limit
        if self._remaining_restarts:
            self._signals.pass_to([])
            os.environ[BEGAN] = str(time.time())
            log(f"restart      {limit - self._remaining_restarts + 1} of {limit}, {failure}")

    def _shutdown(self, *_: object, **options: object) -> None:
        """Kill the workers. This is safe because their files are complete or absent after a kill.

        SIGTERM would not reach a worker that waits inside a collective.
        """
        # Torch 2.13 passes a timeout, torch 2.11 passes nothing.
        super()._shutdown(signal.SIGKILL, **options)


def _joined(handler: DynamicRendezvousHandler) -> int:
    """Return the number of machines that waited in a rendezvous that timed out.

    Torch has no public name for it. This machine has just been removed, so it is added again.
    """
    return len(handler._state_holder.state.participants) + 1


def _first(failures: dict[int, ProcessFailure]) -> Failure:
    """Return the earliest failure, by error files. A killed worker leaves none and makes the others fail."""

    def when(rank: int) -> float:
        failure = failures[rank]
        if failure.exitcode < 0:
            return 0.0
        file = Path(failure.error_file)
        return file.stat().st_mtime if file.is_file() else math.inf

    rank = min(failures, key=when)
    failure = failures[rank]
    line = failure.message if 0 < when(rank) < math.inf else describe_exit(failure.exitcode)
    return Failure(rank, line, failure.exitcode == FINAL)


@contextmanager
def _environment(launch: LaunchConfig, began: float | None) -> Iterator[None]:
    """Set the environment of the workers in this process inside the `with` block."""
    before = dict(os.environ)
    local = launch.num_processes // launch.num_machines
    os.environ |= {
        "FLA_TRAIN_LAUNCHER": str(os.getpid()),
        BEGAN: str(began or time.time()),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # workers reuse the store of the rendezvous
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # this package handles the other signals
    }
    os.environ["OMP_NUM_THREADS"] = str(openmp_threads(default=max(1, available_cores() // local)))
    # Threads that spin while they wait slow down a shared CPU several times.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if launch.device == "cpu":
        os.environ |= CPU_ONLY
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ |= before
