"""`fla-train`: compose the config, print the plan, train. `fla-train debug=smoke` tries it out."""

import gc
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from datetime import datetime
from pathlib import Path

import psutil

from fla_train.cli.app import HydraJob, fail, leave, run_hydra
from fla_train.cli.base import check_run_or_start, with_base
from fla_train.run.import_ahead import import_ahead
from fla_train.training.config import TrainConfig, register, to_config
from fla_train.training.failures import TrainingFailed
from fla_train.training.log import log
from fla_train.training.metrics import last_value
from fla_train.training.preemption import EXIT_CODE, Preempted, leaving_at_once
from fla_train.training.run_folder import RunFolder
from fla_train.utils.processes import end_without_collecting
from fla_train.utils.ranks import is_rank
from fla_train.utils.timeline import BEGAN

LONGEST_NAME = 80  # characters of a job's overrides in the name of its folder
LONGEST_TAG = 64  # characters, W&B's limit


@contextmanager
def output_to(folder: Path) -> Iterator[None]:
    """Append the standard output of this process, and of those that it starts, to `folder`/output.txt."""
    RunFolder(folder).create()
    terminal = os.dup(1)
    try:
        with (folder / "output.txt").open("a") as file, redirect_stdout(file):
            os.dup2(file.fileno(), 1)
            yield
    except Exception:
        with suppress(OSError):
            os.write(terminal, b"failed\n")
        raise
    finally:
        os.dup2(terminal, 1)
        os.close(terminal)


def train(job: HydraJob) -> int:
    """Train one composed config.

    In a sweep (`-m`) each job has a separate run folder, which receives its output, and prints one line.
    """
    # Collecting garbage while importing would cost a seventh of the time.
    gc.disable()
    from fla_train import api

    gc.freeze()
    gc.enable()
    config, output = to_config(job.config, job.overrides), None
    if job.swept is not None:
        if config.run.job is not None and not 0 <= config.run.job < job.count:
            sys.exit(fail(f"this sweep has no job {config.run.job}: its jobs are 0 to {job.count - 1}"))
        if config.run.job not in (None, job.number):
            return 0
        place_job(config, job.number, job.swept)
        if config.run.job is None and config.run.dir and not config.dry_run:
            output = Path(config.run.dir)
        line = f"job {job.number + 1}/{job.count}: {', '.join(job.swept) or 'nothing is swept'}"
        log(line, end=" ... " if output else "\n")
    elif config.run.job is not None:
        raise ValueError(f"run.job={config.run.job} is a job of a sweep: add -m")
    try:
        with leaving_at_once(), output_to(output) if output else nullcontext():
            run = api.train(config)
    except TrainingFailed as failure:
        return fail(failure, 2 if failure.final else 1)
    except Preempted as stop:
        log(str(stop))
        leave(EXIT_CODE)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("repeat the command with this run.dir to resume") from None
    if output:
        losses = {key: last_value(run.files.metrics, key) for key in ("loss", "validation_loss")}
        final = [f"{key.replace('_', ' ')} {value:.4f}" for key, value in losses.items() if value is not None]
        log(", ".join([run.status, *final]))
        if job.number + 1 == job.count:
            log(f"Compare the jobs: fla-runs {shlex.quote(str(output.parent))}")
    return 0


def place_job(config: TrainConfig, number: int, swept: Sequence[str]) -> None:
    """Give job `number` (from 0) of a sweep its run folder, its W&B group and tags, and its name on the Hub.

    The folder is `run.dir/3-optimizer.lr=3e-3`, or `run.dir/3` if nothing is swept.

    Raises:
        ValueError: `run.job` without `run.dir`.
    """
    if config.run.job is not None and config.run.dir is None:
        raise ValueError("give run.dir: a job that is queued again resumes from there")
    if not config.run.dir:
        return
    sweep = Path(config.run.dir).expanduser()
    text = re.sub(r"[^\w.=+-]+", "_", "_".join(swept))  # no comma: Hydra would read two values
    config.run.dir = str(sweep / "-".join(filter(None, (str(number), text[:LONGEST_NAME]))))
    if config.hub.repo_id is not None:
        config.hub.repo_id += f"-{number}"
    wandb = config.logger.wandb
    wandb.group = wandb.group or sweep.name
    wandb.tags = wandb.tags or [text[:LONGEST_TAG] for text in swept]


def extend(overrides: Sequence[str], *, sweep: bool = False, config_dir: str | None = None) -> list[str]:
    """Check `run.dir` and add the base config. A sweep without `run.dir` gets a folder in runs/."""
    if not sweep:
        check_run_or_start(overrides)
    overrides = with_base(overrides, sweep=sweep, config_dir=config_dir)
    if sweep and not any(text.startswith(("run.dir=", "run.job=")) for text in overrides):
        overrides = [*overrides, f"run.dir=runs/sweep-{datetime.now():%Y%m%d-%H%M%S}"]
    return overrides


def main() -> None:
    """Run the console command."""
    os.environ[BEGAN] = str(psutil.Process().create_time())
    end_without_collecting()
    # The command starts the workers of a single run itself.
    if not is_rank() and not any(word.startswith(("-", "dry_run=")) for word in sys.argv[1:]):
        import_ahead(sys.argv[1:])
    run_hydra("train", register, train, extend)


if __name__ == "__main__":
    main()
