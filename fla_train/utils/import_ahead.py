"""A worker that imports while the launcher still composes and checks the config.

Torch, models and trainer take seconds to import, in the launcher and again in a worker. `importing_worker`
starts one worker with the command; `start_worker` gives it its arguments once they are known. The other
workers, and those of a restart, import when they are started.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from subprocess import PIPE, Popen

COMMAND = [sys.executable, "-m", "fla_train.training.worker"]
# Not the engine: DeepSpeed chooses the device when it is imported.
AHEAD = ("fla_train.models.modeling", "fla_train.training.model")

_waiting: Popen | None = None


@contextmanager
def importing_worker() -> Iterator[None]:
    """Inside, a worker imports and waits for `start_worker`. One that is not needed ends with the block."""
    global _waiting
    # Threads that spin while they wait slow a shared CPU down; the library reads it when it is loaded.
    variables = {"FLA_TRAIN_LAUNCHER": str(os.getpid()), "OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    _waiting = Popen(COMMAND, stdin=PIPE, env=variables, start_new_session=True)
    try:
        yield
    finally:
        if _waiting is not None:
            _waiting.kill()
            _waiting.communicate()
            _waiting = None


def start_worker(command: Sequence[str], environment: Mapping[str, str]) -> Popen:
    """Start `command` in a session of its own: as the worker that waits, if one does and it is for one."""
    global _waiting
    if _waiting is None or list(command[: len(COMMAND)]) != COMMAND or _waiting.poll() is not None:
        return Popen(command, env=environment, start_new_session=True)
    worker, _waiting = _waiting, None
    with suppress(BrokenPipeError):  # it has died, which the agent sees
        worker.stdin.write(json.dumps([command[len(COMMAND) :], dict(environment)]).encode() + b"\n")
        worker.stdin.close()
    return worker


def wait_for_arguments() -> None:
    """In that worker: import, then take arguments and environment from the launcher."""
    for name in AHEAD:
        with suppress(Exception):  # comes again where it goes to the log
            import_module(name)
    line = sys.stdin.readline()
    if not line:
        sys.exit()  # the launcher has ended
    sys.argv[1:], environment = json.loads(line)
    os.environ.clear()
    os.environ.update(environment)
    if (torch := sys.modules.get("torch")) is not None:  # which has read the variable already
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
