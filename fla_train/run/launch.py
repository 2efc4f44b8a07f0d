"""Launch a run: resolve the request, print the plan, start the workers."""

import os
import re
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from fla_train.models.build import architecture, model_settings
from fla_train.run import worker
from fla_train.run.agent import run_workers
from fla_train.run.import_ahead import COMMAND
from fla_train.run.resolve import pushes_here, resolve
from fla_train.training.checkpoint import step_of
from fla_train.training.config import TrainConfig, named_classes
from fla_train.training.failures import TrainingFailed
from fla_train.training.features.pushes import Pushes
from fla_train.training.log import log
from fla_train.training.plan import RunPlan, plan_lines
from fla_train.training.preemption import Preempted, StopRequest
from fla_train.training.resume import find_changes, has_reached, is_complete
from fla_train.training.run_folder import RunFolder, RunLock, new_run_dir
from fla_train.utils.overrides import assign
from fla_train.utils.processes import die_with_parent
from fla_train.utils.ranks import is_rank
from fla_train.utils.timeline import BEGAN, Timeline


def launch(request: TrainConfig) -> RunFolder | None:
    """Run `request` on this machine, from the checks to the summary.

    In a rank that torchrun or accelerate has started, this process becomes the worker itself.

    Returns:
        The run's folder; None after a `dry_run`.

    Raises:
        ValueError: the request, the data or the run folder has an error; nothing was started.
        TrainingFailed: workers failed and no restart is left, or machines did not join.
        Preempted: SIGUSR1, SIGTERM, SIGHUP or Ctrl-C arrived while workers ran; a checkpoint has been saved.
        KeyboardInterrupt: Ctrl-C arrived earlier, or a second time; the workers have been killed.
        SystemExit: this process was a rank, and has ended.
    """
    # Only the first job of a sweep has this variable in its environment.
    began = float(os.environ.pop(BEGAN, time.time()))
    plan = resolve(request, data="find" if request.dry_run else "prepare")
    for line in plan_lines(plan):
        log(line)
    if request.dry_run:
        log(f"run folder   {plan.config.run.dir or 'runs/' + _label(plan.config) + '-<time>'}")
        log("dry run      nothing was started; --cfg job in place of dry_run=true prints the config")
        return None
    folder = _make_folder(plan)
    if not _is_left_to_train(plan, folder):
        return folder
    if is_rank():
        die_with_parent(os.getppid())
        timeline = Timeline(began)
        timeline.mark("launcher")
        worker.run(plan, StopRequest(), timeline)
    with TemporaryDirectory(prefix="fla-train-", ignore_cleanup_errors=True) as scratch:
        file = Path(scratch, folder.plan.name)
        file.write_text(plan.to_json())
        try:
            run_workers(
                [*COMMAND[1:], str(file)],
                plan.config.launch,
                newest_step=lambda: max((step_of(path.name) for path in folder.store.list()), default=0),
                run=str(folder.root),
                scratch=Path(scratch),
                began=began,
            )
        except TrainingFailed as failure:
            logged = failure.rank is not None and folder.log(failure.rank).is_file()
            details = f" (details in {folder.log(failure.rank)})" if logged else ""
            raise TrainingFailed(f"{failure}{details}", failure.rank, failure.final) from None
        except Preempted:
            classes = named_classes(asdict(plan.config))
            options = [f"run.dir={folder.root}", *(assign(*item) for item in classes.items())]
            raise Preempted(f"stopped      to resume: fla-train {shlex.join(options)}") from None
    return folder


def _make_folder(plan: RunPlan) -> RunFolder:
    """Create the run's folder if it is missing, and set `run.dir` in the plan.

    Raises:
        ValueError: it can't be created, or another trainer writes it.
    """
    folder = RunFolder(Path(plan.config.run.dir) if plan.config.run.dir else new_run_dir(_label(plan.config)))
    folder.create()
    if not is_rank():
        # Rank 0 will hold this lock. If it is not available, starting the workers is pointless.
        RunLock(folder).close()
    plan.config.run.dir = plan.request.run.dir = str(folder.root)
    return folder


def _is_left_to_train(plan: RunPlan, folder: RunFolder) -> bool:
    """Return whether the run has steps left. Log if it is complete, and which settings have changed."""
    config = plan.config
    if config.trainer.resume != "auto":
        folder.store.choose(config.trainer.resume, log)
    newest = folder.store.newest_state(config.trainer.resume)
    if newest is None:
        return True
    complete = is_complete(folder, config, *newest)
    for change in find_changes(config, newest[1], None):
        log(f"{'not applied' if complete else 'changed':<13}{change}")
    step = newest[1].step
    if complete:
        further = f"a trainer.max_steps above {step}"
        if config.task and has_reached(config.task.stop_at, folder, step):
            further = "another task.stop_at"
        log(f"run          {folder.root} is complete: {step:,} steps, model in {folder.export(step)}")
        log(f"             to train on, give {further}")
        if pushes_here(config):
            pushes = Pushes(config, folder, log)
            pushes.resume(step)
            pushes.add(step)
            pushes.wait(lambda doing: None)
    elif step > config.trainer.max_steps and folder.store.choose(config.trainer.resume, log) == newest[0]:
        raise ValueError(f"trainer.max_steps={config.trainer.max_steps} is below the {step} of {newest[0]}")
    return not complete


def _label(config: TrainConfig) -> str:
    """Return a name for a run from its model: architecture, width and depth."""
    model = config.model
    sizes = model_settings(model)
    name = re.sub("[_+]", "-", architecture(model))
    return f"{name}-{sizes.hidden_size}x{sizes.num_hidden_layers}"
