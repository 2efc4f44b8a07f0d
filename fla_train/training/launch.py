"""From a composed config to a finished run: check, prepare the data, print the plan, start the workers."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from fla_train.data import PreparedData, find_commits, find_prepared, prepare
from fla_train.training.attempts import Attempts, meet
from fla_train.training.console import say
from fla_train.training.machines import AttemptEnded, Machines
from fla_train.training.plan import Plan, make_plan, plan_lines
from fla_train.training.preemption import leaving_at_once
from fla_train.training.resolve import resolve, with_saved, with_vocabulary, with_warmup
from fla_train.training.resuming import check_before_preparing, has_checkpoint, saved_commits, saved_sizes
from fla_train.training.runfolder import RunFolder, new_run_dir
from fla_train.training.schema import TrainConfig, to_yaml
from fla_train.training.supervise import choose_port
from fla_train.training.task_data import task_data, with_task_sizes
from fla_train.training.validate import device_faults, validate


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
        config = with_saved(with_task_sizes(config), saved_sizes(config))
        validate(config)
        config = resolve(config)
        if config.dry_run:
            _show(config)
        else:
            _launch(config)


def _show(config: TrainConfig) -> None:
    """Print the config and its plan, with what prepared data there are. Nothing is fetched or written."""
    config = with_vocabulary(with_warmup(config), offline=True)
    data = find_prepared(config.data) if config.task is None else task_data(config.task, config.seed)
    say(to_yaml(config))
    for line in plan_lines(config, make_plan(config, data)):
        say(line)


def _launch(config: TrainConfig) -> None:
    if config.run.dir is not None:
        RunFolder(Path(config.run.dir)).check()
        if not RunFolder(Path(config.run.dir)).config(0).is_file():
            say(f"new run      {config.run.dir} holds none yet")
    with Machines(config.launch, config.run.dir) as machines:
        main = config.launch.machine_rank == 0
        faults = device_faults(config)
        for fault in faults:
            say(f"refused      {fault}")
        greeting = {"commits": _commits(config), "sizes": saved_sizes(config)} if main else {}
        try:
            meet(machines, config.launch, greeting)
        except AttemptEnded as ended:
            raise TrainingFailed(str(ended)) from None
        if faults:  # only now, when the others hear of it
            raise ValueError("\n  ".join(faults))
        config = with_warmup(with_saved(config, machines.greeting["sizes"]))
        check_before_preparing(config)
        if config.init_from is not None and not has_checkpoint(config):
            from fla_train.training.initial_weights import check_initial_weights  # imports the models

            check_initial_weights(config)
        config = with_vocabulary(config)
        if config.task is None:
            data = prepare(config.data, log=say, commits=machines.greeting["commits"])
        else:
            data = task_data(config.task, config.seed)
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
