"""Start workers that import modules while the launcher still composes and checks the config.

Torch, models and trainer take seconds to import, in the launcher and again in a worker. `import_ahead` starts
as many workers as the command is likely to need. `start_worker` passes the next one its arguments once they
are known. The workers of a restart import when they are started.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from subprocess import PIPE, Popen

from fla_train.utils.processes import module_command

COMMAND = module_command("fla_train.run.worker")
# A module that does not depend on the device. DeepSpeed does, and the worker imports it later.
AHEAD = "fla_train.run.rank"
DEVICES = Path("/dev")

_waiting: list[Popen] = []


def import_ahead(overrides: Sequence[str]) -> None:
    """Start a worker for each visible GPU, or one. They end with this process at the latest.

    Args:
        overrides: overrides of the command. A smaller `launch.num_processes` limits the number.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(list(DEVICES.glob("nvidia[0-9]*")) if listed is None else listed.split(","))
    for text in overrides:
        name, _, value = text.partition("=")
        if name == "launch.num_processes" and value.isdecimal():
            count = min(count, int(value))
    # Threads that spin while they wait slow down a shared CPU. The library reads this when it is loaded.
    variables = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"FLA_TRAIN_LAUNCHER": str(os.getpid())}
    for _ in range(max(1, count)):
        _waiting.append(Popen(COMMAND, stdin=PIPE, env=variables, start_new_session=True))


def start_worker(command: Sequence[str], environment: Mapping[str, str]) -> Popen:
    """Start `command` in a new session. Use a waiting worker if `command` is a worker."""
    if not _waiting or command[: len(COMMAND)] != COMMAND:
        return Popen(command, env=environment, start_new_session=True)
    worker, message = _waiting.pop(), [command[len(COMMAND) :], dict(environment), time.time()]
    with suppress(BrokenPipeError), worker.stdin:  # the worker has died, which the agent sees
        worker.stdin.write(json.dumps(message).encode() + b"\n")
    return worker


def end_waiting_workers() -> None:
    """End the workers that are not needed."""
    while _waiting:
        _waiting.pop().kill()


def wait_for_arguments() -> float:
    """Import modules, then receive arguments and environment from the launcher, unless it has given them.

    Returns:
        Unix time at which the launcher gave them.
    """
    begun = time.time()
    # Collecting garbage while importing would cost a seventh of the time, and afterwards 0.3 s at once.
    gc.disable()
    # The worker repeats a failed import later and logs its error.
    with suppress(Exception):
        import_module(AHEAD)
    gc.freeze()
    gc.enable()
    if len(sys.argv) > 1:
        return begun
    line = sys.stdin.readline()
    if not line:
        sys.exit()  # the launcher does not need this worker, or has ended
    arguments, environment, sent = json.loads(line)
    sys.argv += arguments
    os.environ.clear()
    os.environ.update(environment)
    import torch

    # Torch has already read the variable.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return sent
