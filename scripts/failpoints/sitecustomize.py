"""A failpoint: with this folder on PYTHONPATH, a process of the drill fails where it first calls a function.

DRILL_POINTS names a folder of points. The first `*.json` there, such as
`{"role": "worker-1", "at": "engine.py:train_step", "do": "SIGKILL"}`, is watched for by the process of that
role: from its start if the file is there by then, else from SIGUSR2 on. `write!rename` is the call of a
built-in `rename` by `write`. Before the process fails it renames the file to `*.fired`.
"""

import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

ROLES = {"fla_train.training.worker": "worker", "fla_train.training.async_writer": "writer"}


def role() -> str | None:
    """`worker-0`, `writer-1` or None, by the command and the rank."""
    names = [name for module, name in ROLES.items() if module in sys.orig_argv]
    return f"{names[0]}-{os.environ.get('RANK')}" if names else None


def arm(*_: object) -> None:
    file = min(Path(os.environ["DRILL_POINTS"]).glob("*.json"), default=None)
    point = {} if file is None else json.loads(file.read_text())
    if point.get("role") != role():
        return
    path, _, name = point["at"].partition(":")
    caller, _, builtin = name.partition("!")

    def is_there(code: CodeType, event: str, called: object) -> bool:
        if code.co_qualname != caller or not code.co_filename.endswith(path):
            return False
        return called.__name__ == builtin if event == "c_call" else event == "call" and not builtin

    def watch(frame: FrameType, event: str, called: object) -> None:
        if is_there(frame.f_code, event, called):
            sys.setprofile(None)
            threading.setprofile(None)
            try:
                file.rename(file.with_suffix(".fired"))
            except FileNotFoundError:  # another thread came first
                return
            fail(point["do"])

    threading.setprofile(watch)
    sys.setprofile(watch)


def fail(how: str) -> None:
    kind, _, value = how.partition(" ")
    if kind == "exit":
        os._exit(int(value))
    elif kind == "sleep":
        time.sleep(1e6)
    elif kind == "close":  # as if every connection and file had broken
        os.closerange(3, 4096)
    elif kind == "raise" and value in dir(errno):
        raise OSError(getattr(errno, value), os.strerror(getattr(errno, value)))
    elif kind == "raise":
        raise {"MemoryError": MemoryError, "ValueError": ValueError, "KeyError": KeyError}[value]("drill")
    else:
        os.kill(os.getpid(), signal.Signals[how])


if role() is not None:
    signal.signal(signal.SIGUSR2, arm)
    arm()
