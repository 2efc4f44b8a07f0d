"""One rank of a run: `python -m fla_train.training.worker CONFIG DATA [CHECKPOINT]`, started by the launcher.

Stdout and stderr go to train.log; rank 0 keeps the terminal for progress. A failure is written to the file
that FLA_TRAIN_ERROR_FILE names, for the launcher to show.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from fla_train.training.failures import describe_failure
from fla_train.training.preemption import EXIT_CODE, StopRequest
from fla_train.training.watchdog import Watchdog, end_process

PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Have the kernel kill this process when the launcher dies, even by kill -9 (Linux)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["FLA_TRAIN_LAUNCHER"]):  # it died before the call above
        os._exit(1)


def report(failure: BaseException, config_path: Path | None = None) -> None:
    """Leave the failure as one line for the launcher, and whole in train.log, as far as disks have room."""
    with suppress(OSError):
        traceback.print_exc()
    config = None
    if config_path is not None:
        with suppress(Exception):
            from fla_train.training.schema import load_config

            config = load_config(config_path)
    line, final = describe_failure(failure, config)
    content = {"time": time.time(), "line": line, "final": final}
    file = Path(os.environ["FLA_TRAIN_ERROR_FILE"])
    aside = file.with_suffix(".tmp")  # the launcher may look at any moment
    with suppress(OSError):
        aside.write_text(json.dumps(content))
        os.replace(aside, file)


def train(
    config_path: Path, data_path: Path, resume: Path | None, console: TextIO, request: StopRequest
) -> bool:
    """Train as the rank that the environment names; False when `request` ended it before the last step."""
    from fla_train.data import open_prepared
    from fla_train.training.loop import Trainer
    from fla_train.training.schema import load_config
    from fla_train.training.task_data import task_data
    from fla_train.training.task_loop import TaskTrainer

    config = load_config(config_path)
    watchdog = Watchdog(config.trainer.hang_timeout, end_process(report))
    common = (resume, console, watchdog, request)
    if config.task is None:
        finished = Trainer(config, open_prepared(data_path), *common).run()
    else:
        finished = TaskTrainer(config, task_data(config.task, config.seed), *common).run()
    watchdog.close()
    return finished


def main() -> None:
    die_with_launcher()
    request = StopRequest()  # before the imports, which take seconds
    config_path, data_path, *rest = map(Path, sys.argv[1:])
    from fla_train.training.console import redirect_output
    from fla_train.training.runfolder import RunFolder

    machine = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    console = redirect_output(RunFolder(config_path.parent).log(machine))
    try:
        finished = train(config_path, data_path, rest[0] if rest else None, console, request)
    except BaseException as failure:
        report(failure, config_path)
        with suppress(OSError):
            if console.isatty():
                console.write("\n")  # below the bar
            sys.stderr.flush()
        os._exit(1)  # without waiting for communication threads that wait for the other ranks
    with suppress(OSError):
        console.flush()
    import torch.distributed as dist

    dist.destroy_process_group()
    if not finished:
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
