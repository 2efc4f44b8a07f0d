"""From a composed config to a finished run: check, prepare the data, print the plan, start the workers."""

import os
import re
import shlex
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

from fla_train.data.cache import PreparedData, find_prepared
from fla_train.data.prepare import check_first_document, prepare
from fla_train.hub.push import check_access
from fla_train.hub.pushes import HubPushes
from fla_train.models.build import architecture, build_model_config, is_zoo
from fla_train.training import checkpoint, worker
from fla_train.training.agent import WorkersFailed, run_workers
from fla_train.training.config import (
    AUTO,
    TrainConfig,
    resolve,
    to_yaml,
    validate,
    with_run_paths,
    with_task_sizes,
    with_vocabulary,
    with_warmup,
)
from fla_train.training.log import log
from fla_train.training.plan import make_plan, plan_lines
from fla_train.training.preemption import Preempted, StopRequest
from fla_train.training.resume import (
    check_before_preparing,
    check_same_run,
    check_steps_left,
    choose_checkpoint,
    completion_lines,
    has_checkpoint,
    is_complete,
    newest_readable,
    saved_commits,
    with_saved_sizes,
)
from fla_train.training.run_data import task_data
from fla_train.training.run_folder import RunFolder, RunLock, new_run_dir
from fla_train.utils.import_ahead import COMMAND
from fla_train.utils.import_class import named_classes
from fla_train.utils.overrides import assign
from fla_train.utils.processes import die_with_parent
from fla_train.utils.ranks import is_first, is_rank
from fla_train.utils.scratch import scratch_folder
from fla_train.utils.timeline import BEGAN, Timeline


class TrainingFailed(RuntimeError):
    """Training started and did not finish; the message is one line.

    Attributes:
        final: the same command would fail again.
    """

    def __init__(self, line: str, final: bool = False):
        super().__init__(line)
        self.final = final


def launch(config: TrainConfig) -> RunFolder | None:
    """Run `config` on this machine, from the checks to the summary.

    Where torchrun or accelerate has started this process as a rank, it becomes the worker itself.

    Returns:
        The run's folder; None: it was a `dry_run`.

    Raises:
        ValueError: the config, the data or the run folder does not allow it; nothing was started.
        TrainingFailed: workers failed and no restart is left, or machines did not join.
        Preempted: SIGUSR1, SIGTERM, SIGHUP or Ctrl-C came while workers ran; a checkpoint has been saved.
        KeyboardInterrupt: Ctrl-C came before, or a second time; the workers have been killed.
        SystemExit: this process was a rank, and has ended.
    """
    began = float(os.environ.pop(BEGAN, time.time()))  # only a sweep's first job finds it in the environment
    given = config.launch.num_processes
    config = _checked(config)
    if config.dry_run:
        _show(config)
        return None
    config, data = _prepare(config)
    for line in plan_lines(config, make_plan(config, data)):
        log(line)
    config, folder = _with_folder(config)
    if not _is_left_to_train(config, folder, data):
        return folder
    # The number of processes stays open in the run's config: where it is resumed, that machine has its own.
    recorded = replace(config, launch=replace(config.launch, num_processes=given))
    if is_rank():
        die_with_parent(os.getppid())
        timeline = Timeline(began)
        timeline.mark("launcher")
        worker.run(recorded, data.folder, StopRequest(), timeline)
    with scratch_folder("fla-train-") as scratch:
        file = scratch / "config.yaml"
        file.write_text(to_yaml(recorded))
        try:
            run_workers(
                [*COMMAND[1:], str(file), str(data.folder)],
                config.launch,
                newest_step=lambda: checkpoint.newest_step(folder.checkpoints),
                run=str(folder.root),
                scratch=scratch,
                began=began,
            )
        except WorkersFailed as failure:
            logged = failure.rank is not None and folder.log(failure.rank).is_file()
            details = f" (details in {folder.log(failure.rank)})" if logged else ""
            raise TrainingFailed(f"{failure}{details}", failure.final) from None
        except Preempted:
            classes = named_classes(asdict(config))
            options = [f"run.dir={folder.root}", *(assign(*item) for item in classes.items())]
            command = " ".join(["fla-train", *map(shlex.quote, options)])
            raise Preempted(f"stopped      to resume: {command}") from None
    return folder


def with_data(config: TrainConfig) -> tuple[TrainConfig, PreparedData]:
    """`config` with what it leaves open filled in, and its data, which are prepared if they are not there.

    Raises:
        ValueError: the config or the data can't be used.
    """
    return _prepare(_checked(config))


def _checked(config: TrainConfig) -> TrainConfig:
    """`config` without errors, with sizes of its task or of the run that it resumes, and without "auto".

    A `dry_run` of several processes on a machine without a GPU plans for GPUs.
    """
    config = with_saved_sizes(with_task_sizes(with_run_paths(config)))
    if config.dry_run and config.launch.device == AUTO and config.launch.num_processes not in (AUTO, 1):
        config = replace(config, launch=replace(config.launch, device="cuda"))
    validate(config)
    return resolve(config)


def _show(config: TrainConfig) -> None:
    """Print the plan, with what prepared data there are. Nothing is fetched or written."""
    if config.init_from is not None and os.path.exists(config.init_from):
        _check_weights(config)
    config = with_warmup(config)
    if config.run.dir is not None:
        RunFolder(Path(config.run.dir)).check()
    check_before_preparing(config)
    if config.task is None:
        check_first_document(config.data)
    config = with_vocabulary(config, offline=True)
    data = find_prepared(config.data) if config.task is None else task_data(config.task, config.seed)
    for line in plan_lines(config, make_plan(config, data)):
        log(line)
    if config.run.dir is not None:
        _tell_new(RunFolder(Path(config.run.dir)))
    log(f"run folder   {config.run.dir or 'runs/' + _label(config) + '-<time>'}")
    log("dry run      nothing was started; --cfg job in place of dry_run=true prints the config")


def _tell_new(folder: RunFolder) -> None:
    """A line for a folder without a run: who meant to resume one may have misspelt it."""
    if not folder.config.is_file():
        log(f"new run      {folder.root} holds none yet")


def _prepare(config: TrainConfig) -> tuple[TrainConfig, PreparedData]:
    """Refuse what can be refused before hours of tokenizing, then prepare the data."""
    if config.run.dir is not None:
        folder = RunFolder(Path(config.run.dir))
        folder.check()
        _tell_new(folder)
    elif is_rank():
        raise ValueError("give run.dir: ranks that another launcher has started can't agree on a new one")
    config = with_warmup(config)
    check_before_preparing(config)
    if config.task is None:
        check_first_document(config.data)
    if _pushes_here(config):
        _check_hub(config)
    if config.init_from is not None:
        _check_weights(config)
    config = with_vocabulary(config)
    if config.task is None:
        data = prepare(config.data, log=log, commits=saved_commits(config))
    else:
        data = task_data(config.task, config.seed)
    return config, data


def _check_weights(config: TrainConfig) -> None:
    if not has_checkpoint(config):
        from fla_train.training.model import check_initial_weights  # imports the models: seconds

        check_initial_weights(config)


def _pushes_here(config: TrainConfig) -> bool:
    """Whether rank 0, which pushes, may be on this machine."""
    return config.hub.repo_id is not None and is_first() and config.launch.machine_rank in (None, 0)


def _check_hub(config: TrainConfig) -> None:
    """Learn before hours of work whether exports can be pushed. A Hub that can't be reached is a line.

    Raises:
        ValueError: there is no token, or the Hub refuses it.
    """
    try:
        check_access(config.hub.repo_id, private=config.hub.private)
    except ConnectionError as failure:
        log(f"hub          {failure}; training starts, and pushes try again")


def _with_folder(config: TrainConfig) -> tuple[TrainConfig, RunFolder]:
    """Make the run's folder, if it is not there, and name it in the config.

    Raises:
        ValueError: it can't be made, or another trainer writes it.
    """
    root = Path(config.run.dir) if config.run.dir else new_run_dir(_label(config))
    folder = RunFolder(root)
    folder.create()
    if not is_rank():
        RunLock(folder).close()  # rank 0 will hold it; who can't have it need not start
    return replace(config, run=replace(config.run, dir=str(root))), folder


def _is_left_to_train(config: TrainConfig, folder: RunFolder, data: PreparedData) -> bool:
    """Refuse a checkpoint that does not fit; False, with a line, if the run is complete."""
    if config.trainer.resume != "auto":
        choose_checkpoint(config, folder, log)
    changes: list[str] = []
    if (newest := newest_readable(config)) is not None:
        changes = check_same_run(config, data, newest)
    complete = is_complete(folder, config)
    if not complete:
        check_steps_left(config, folder)
    for change in changes:
        log(f"{'not applied' if complete else 'changed':<13}{change}")
    if complete:
        for line in completion_lines(folder, config):
            log(line)
        if _pushes_here(config):
            step = checkpoint.newest_step(folder.checkpoints)
            pushes = HubPushes(config.hub, folder.root, config.model.get("mixer"), log)
            pushes.resume(step)
            pushes.add(step)
            pushes.finish(lambda doing: None)
        return False
    return True


def _label(config: TrainConfig) -> str:
    """A run's name from its model: architecture, width and depth."""
    model = config.model
    sizes = build_model_config(model) if is_zoo(model) else SimpleNamespace(**model)
    name = re.sub("[_+]", "-", architecture(model))
    return f"{name}-{sizes.hidden_size}x{sizes.num_hidden_layers}"
