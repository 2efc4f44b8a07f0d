"""Start this machine's workers; stop them when one fails here or elsewhere; pass on requests to stop."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fla_train.data.workers import available_cores
from fla_train.training.failures import describe_exit
from fla_train.training.machines import Failure
from fla_train.training.preemption import EXIT_CODE, SIGNALS, Preempted, answer, restore
from fla_train.training.schema import LaunchConfig

POLL = 0.1  # seconds between looks at the workers
REPEAT = 1.0  # seconds after which a request to stop is passed on again
GRACE = 1.0  # seconds in which the others' failures are gathered, to name the first one


def choose_port(launch: LaunchConfig) -> int:
    """A port of this machine for rank 0: the given one, or a free one; with several machines, whose launchers
    meet at the given one, always a free one.

    Raises:
        ValueError: the given port is in use.
    """
    several = launch.num_machines > 1
    port = 0 if several else launch.main_process_port or 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if several else launch.main_process_ip, port))
        except OSError as error:
            raise ValueError(
                f"launch.main_process_port={port} on {launch.main_process_ip} is taken ({error.strerror}): "
                "give a free port, or null for any free one"
            ) from None
        return probe.getsockname()[1]


def run_workers(
    arguments: Sequence[str],
    launch: LaunchConfig,
    *,
    port: int,
    attempt: str,
    elsewhere: Callable[[], Failure | None],
    inherited: Sequence[int] = (),
) -> Failure | None:
    """Run `python -m fla_train.training.worker ARGUMENTS` for each rank of this machine until all have ended.

    Args:
        port: of machine 0, where the ranks meet.
        attempt: its name.
        elsewhere: tells of a failure on another machine.
        inherited: descriptors the workers keep open; the run's lock is held as long as one of them lives.

    Returns:
        None when all succeeded, else the first failure; by then no worker is left.

    SIGUSR1, SIGTERM and SIGHUP have the workers save a checkpoint and end, however often they come.

    Raises:
        Preempted: the workers have done so, or failed meanwhile in a way that another start may mend.
        KeyboardInterrupt: on SIGINT, after the workers have been killed.
    """
    local = launch.num_processes // launch.num_machines
    first = launch.machine_rank * local
    with tempfile.TemporaryDirectory(prefix="fla-train-") as errors:
        error_files = {first + i: Path(errors, f"rank-{first + i}.json") for i in range(local)}
        workers: dict[int, subprocess.Popen] = {}
        forward = _Forward(workers)
        previous = answer(forward)
        try:
            for i, (rank, error_file) in enumerate(error_files.items()):
                environment = os.environ | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(i),
                    "WORLD_SIZE": str(launch.num_processes),
                    "LOCAL_WORLD_SIZE": str(local),
                    "MASTER_ADDR": launch.main_process_ip,
                    "MASTER_PORT": str(port),
                    "FLA_TRAIN_ATTEMPT": attempt,
                    "FLA_TRAIN_LAUNCHER": str(os.getpid()),
                    "FLA_TRAIN_ERROR_FILE": str(error_file),
                    "TOKENIZERS_PARALLELISM": "false",
                }
                environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // local)))
                # Threads that spin while they wait slow a shared CPU down several times over.
                environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
                if launch.device == "cpu":
                    environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
                command = [sys.executable, "-m", "fla_train.training.worker", *arguments]
                # Their own session: Ctrl-C reaches the launcher only, which then stops them in order.
                workers[rank] = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=inherited,
                )
            failure = _wait(workers, forward, elsewhere)
            if isinstance(failure, int):
                time.sleep(GRACE)
                failure = _first_failure(workers, error_files, failure)
        finally:
            _kill(workers)
            restore(previous)
        # Only here, where no request can come too late: who is to leave does not start again.
        if failure is not None and not failure.final and forward.requested:
            raise Preempted
        return failure


class _Forward:
    """Signal handler: passes a request to stop on to the workers."""

    def __init__(self, workers: dict[int, subprocess.Popen]):
        self._workers = workers
        self._sent = 0.0
        self.requested = False

    def __call__(self, number: int, frame: object) -> None:
        self.requested = True
        self._send()

    def again(self) -> None:
        """Every REPEAT seconds from a request on: a worker that was compiling may not have heard it."""
        if self.requested and time.monotonic() - self._sent >= REPEAT:
            self._send()

    def _send(self) -> None:
        self._sent = time.monotonic()
        for worker in self._workers.values():
            worker.send_signal(SIGNALS[0])


def _wait(
    workers: dict[int, subprocess.Popen], forward: _Forward, elsewhere: Callable[[], Failure | None]
) -> int | Failure | None:
    """The first rank seen to have failed, a failure elsewhere, or None once all have ended well.

    Raises:
        Preempted: all have left on request.
    """
    left = [EXIT_CODE]
    while True:
        forward.again()
        codes = {rank: worker.poll() for rank, worker in workers.items()}
        if forward.requested:  # a signal kills a worker that does not listen yet, and has nothing to save
            left = [EXIT_CODE, *(-number for number in SIGNALS)]
        for rank, code in codes.items():
            if code not in (None, 0, *left):
                return rank
        if any(code in left[1:] for code in codes.values()):
            raise Preempted
        if all(code is not None for code in codes.values()):
            if EXIT_CODE in codes.values():
                raise Preempted(agreed=True)
            return None
        if failure := elsewhere():
            return failure
        time.sleep(POLL)


def _first_failure(
    workers: dict[int, subprocess.Popen], error_files: dict[int, Path], failed: int
) -> Failure:
    """The earliest reported failure. A killed rank reports nothing, and makes the others fail."""
    code = workers[failed].poll()
    if code is not None and code < 0:
        return Failure(f"rank {failed}", describe_exit(code))
    reports = {rank: json.loads(f.read_text()) for rank, f in error_files.items() if f.is_file()}
    for rank, worker in workers.items():
        if (worker.poll() or 0) < 0:
            return Failure(f"rank {rank}", describe_exit(worker.poll()))
    if not reports:
        return Failure(f"rank {failed}", describe_exit(code))
    rank = min(reports, key=lambda r: reports[r]["time"])
    return Failure(f"rank {rank}", reports[rank]["line"], reports[rank]["final"])


def _kill(workers: dict[int, subprocess.Popen]) -> None:
    """A killed worker loses nothing: what it has left on disk is complete or absent."""
    for worker in workers.values():
        if worker.poll() is None:
            worker.kill()
    for worker in workers.values():
        worker.wait()
