"""From a composed config to a finished run: check, prepare the data, print the plan, start the workers."""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from fla_train.data import PreparedData, check_vocabulary, find_commits, find_prepared, prepare
from fla_train.training.attempts import Attempts, meet, say
from fla_train.training.machines import AttemptEnded, Machines
from fla_train.training.plan import Plan, make_plan, plan_lines
from fla_train.training.preemption import leaving_at_once
from fla_train.training.resuming import saved_commits, saved_warmup
from fla_train.training.runfolder import RunFolder, new_run_dir
from fla_train.training.schedule import warmup_steps
from fla_train.training.schema import TrainConfig, to_yaml
from fla_train.training.supervise import choose_port
from fla_train.training.task_data import task_data, with_task_sizes
from fla_train.training.validate import device_faults, resolve_device, validate


class TrainingFailed(RuntimeError):
    """Training started and did not finish; the message is one line."""


def launch(config: TrainConfig) -> None:
    """Run `config` on this machine, from the checks to the summary.

    Raises:
        ValueError: the config, the data, the port or the run folder does not allow it; nothing was started.
        TrainingFailed: a worker failed, and `launch.max_restarts` did not help; or a machine did not come.
        Preempted: SIGUSR1, SIGTERM or SIGHUP came; if it was training, a checkpoint has been saved.
    """
    with leaving_at_once():
        config = with_task_sizes(config)
        validate(config)
        config = resolve(config)
        if config.dry_run:
            _show(config)
        else:
            _launch(config)


def _show(config: TrainConfig) -> None:
    """Print the config and its plan, with what prepared data there are. Nothing is fetched or written."""
    config = _with_warmup(config, saved_warmup(config))
    data = find_prepared(config.data) if config.task is None else task_data(config.task, config.seed)
    if data is not None:
        _check_vocabulary(config, data)
    say(to_yaml(config))
    for line in plan_lines(config, make_plan(config, data)):
        say(line)


def _launch(config: TrainConfig) -> None:
    with Machines(config.launch, config.run.dir) as machines:
        main = config.launch.machine_rank == 0
        faults = device_faults(config)
        for fault in faults:
            say(f"refused      {fault}")
        greeting = {"commits": _commits(config), "warmup": saved_warmup(config)} if main else {}
        try:
            meet(machines, config.launch, greeting)
        except AttemptEnded as ended:
            raise TrainingFailed(str(ended)) from None
        if faults:  # only now, when the others hear of it
            raise ValueError("\n  ".join(faults))
        config = _with_warmup(config, machines.greeting["warmup"])
        if config.task is None:
            data = prepare(config.data, log=say, commits=machines.greeting["commits"])
        else:
            data = task_data(config.task, config.seed)
        _check_vocabulary(config, data)
        plan = make_plan(config, data)
        for line in plan_lines(config, plan):
            say(line)
        _train(config, data, plan, machines, greeting)


def _commits(config: TrainConfig) -> dict[str, str]:
    """The commits of the Hub's datasets that all machines are to read, by part of a mixture.

    Of one machine without checkpoints none: the preparation looks up those that it needs.
    """
    if config.task is not None:
        return {}
    commits = saved_commits(config)
    return commits if commits or config.launch.num_machines == 1 else find_commits(config.data)


def _check_vocabulary(config: TrainConfig, data: PreparedData) -> None:
    if config.task is None:
        check_vocabulary(data.tokenizer(), config.model["vocab_size"])


def resolve(config: TrainConfig) -> TrainConfig:
    """`config` with "auto" and null replaced by what they stand for, but for run.dir and the warm-up."""
    device = resolve_device(config)
    precision = config.trainer.precision
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    run_dir, resume = (
        None if path is None else os.path.expanduser(path)  # a shell leaves the ~ of run.dir=~/runs
        for path in (config.run.dir, config.trainer.resume)
    )
    return replace(
        config,
        launch=replace(config.launch, device=device),
        trainer=replace(config.trainer, precision=precision, resume=resume),
        run=replace(config.run, dir=run_dir),
    )


def _with_warmup(config: TrainConfig, saved: int | None) -> TrainConfig:
    """`config` with its number of warm-up steps; where it is null, `saved`, of the run that it goes on with.

    A share of trainer.max_steps would take a run that goes on for longer back into its warm-up.
    """
    schedule = config.schedule
    if schedule.warmup_steps is None:
        schedule = replace(schedule, warmup_steps=saved)
    steps = warmup_steps(schedule, config.trainer.max_steps)
    return replace(config, schedule=replace(schedule, warmup_steps=steps))


def _train(
    config: TrainConfig, data: PreparedData, plan: Plan, machines: Machines, greeting: dict[str, object]
) -> None:
    choose_port(config.launch)  # one that is taken is a fault before there is a folder
    root = Path(config.run.dir) if config.run.dir else new_run_dir(_label(config))
    config = replace(config, run=replace(config.run, dir=str(root)))
    folder = RunFolder(root)
    folder.create()
    machine = config.launch.machine_rank
    with folder.locked() if machine == 0 else nullcontext() as lock:
        failure = Attempts(config, data, plan, folder, machines, greeting, lock).train()
    if failure is not None:
        raise TrainingFailed(f"{failure} (details in {folder.log(machine)})")


def _label(config: TrainConfig) -> str:
    """A run's name from its model: householder count, gate, width."""
    model = config.model
    if config.baseline is not None:
        return f"{config.baseline.kind}-{model['hidden_size']}x{model['num_hidden_layers']}"
    gate = "gated-" if model["use_forget_gate"] else ""
    kind = "delta-net" if model["num_householder"] == 1 else f"delta-product{model['num_householder']}"
    return f"{gate}{kind}-{model['hidden_size']}x{model['num_hidden_layers']}"
