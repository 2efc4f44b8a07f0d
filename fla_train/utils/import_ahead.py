"""Start workers that import modules while the launcher still composes and checks the config.

Torch, models and trainer take seconds to import, in the launcher and again in a worker. `importing_workers`
starts as many workers as the command is likely to need. `start_worker` passes the next worker its arguments
once they are known. The workers of a restart import when they are started.
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Thread

from fla_train.utils.processes import available_cores, module_command

COMMAND = module_command("fla_train.training.worker")
AHEAD = ("fla_train.models.modeling", "fla_train.training.trainer", "accelerate")
# DeepSpeed reads these variables when it is imported.
CPU_ONLY = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
# Environment variable with the number of the GPU that a waiting worker opens.
GPU = "FLA_TRAIN_GPU"
LONGEST_OPENING = 60.0  # seconds
DEVICES = Path("/dev")

_waiting: list[tuple[Popen, dict[str, str]]] = []  # processes and their environments, the next one first


@contextmanager
def importing_workers(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Let workers import and wait for `start_worker` inside the `with` block. End unused workers after it.

    Args:
        overrides: overrides of the command, of which those of `launch` set number and device of the expected
            workers. The default is one worker for each GPU, or one on the CPU.
    """
    given = dict(text.split("=", 1) for text in overrides if "=" in text)
    gpus = 0 if given.get("launch.device") == "cpu" else _count_gpus()
    # Threads that spin while they wait slow down a shared CPU. The library reads this when it is loaded.
    variables = {"FLA_TRAIN_LAUNCHER": str(os.getpid()), "OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    variables |= CPU_ONLY if gpus == 0 else {}
    try:
        expected = int(given["launch.num_processes"]) // int(given.get("launch.num_machines", 1))
    except (KeyError, ValueError, ZeroDivisionError):
        expected = gpus
    for number in range(max(1, min(expected, available_cores() - 1))):
        own = variables | ({GPU: str(number)} if number < gpus else {})
        _waiting.append((Popen(COMMAND, stdin=PIPE, env=own, start_new_session=True), own))
    try:
        yield
    finally:
        while _waiting:
            _end(_waiting.pop()[0])


def _count_gpus() -> int:
    """Return the likely number of GPUs before torch is imported: 1 under WSL (dxg) or with AMD (kfd)."""
    there = len(list(DEVICES.glob("nvidia[0-9]*"))) or len(
        list(DEVICES.glob("dxg")) + list(DEVICES.glob("kfd"))
    )
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if listed is None else min(there, len([name for name in listed.split(",") if name]))


def start_worker(command: Sequence[str], environment: Mapping[str, str]) -> Popen:
    """Start `command` in a new session. Use a waiting worker if `command` is a worker.

    A worker that has imported for a device other than the environment's is not used.
    """
    if list(command[: len(COMMAND)]) == COMMAND:
        while _waiting:
            worker, own = _waiting.pop(0)
            if worker.poll() is None and all(own.get(name) == environment.get(name) for name in CPU_ONLY):
                message = json.dumps([command[len(COMMAND) :], dict(environment), time.time()])
                with suppress(BrokenPipeError):  # the worker has died, which the agent sees
                    worker.stdin.write(message.encode() + b"\n")
                    worker.stdin.close()
                return worker
            _end(worker)
    return Popen(command, env=environment, start_new_session=True)


def _end(worker: Popen) -> None:
    worker.kill()
    worker.communicate()


def wait_for_arguments() -> float:
    """Import modules, open the GPU, then receive arguments and environment from the launcher.

    Returns:
        Unix time at which the launcher sent them.
    """
    opening = Thread(target=_open_gpu, daemon=True)
    opening.start()
    # Collecting garbage while importing would cost a seventh of the time.
    gc.disable()
    for name in AHEAD:
        # The worker repeats the import later and logs its error.
        with suppress(Exception):
            import_module(name)
    gc.enable()
    # The driver reads the environment, which is replaced below.
    opening.join(LONGEST_OPENING)
    line = sys.stdin.readline()
    if not line:
        sys.exit()  # the launcher has ended
    sys.argv[1:], environment, given = json.loads(line)
    os.environ.clear()
    os.environ.update(environment)
    # Torch has already read the variable.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return given


def _open_gpu() -> None:
    """Create the context that torch will use. It needs a second, in parallel to the imports (no GIL).

    Errors recur when torch uses the GPU.
    """
    with suppress(KeyError, OSError):
        number, cuda = int(os.environ[GPU]), ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), number) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
