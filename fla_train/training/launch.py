"""From a composed config to a finished run: check, prepare the data, print the plan, start the workers."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch

from fla_train.data import PreparedData, check_vocabulary, prepare
from fla_train.kernels.delta_product.check import check_backend, model_cases
from fla_train.training import checkpoint
from fla_train.training.checkpoint import TrainState
from fla_train.training.plan import Plan, make_plan, plan_lines
from fla_train.training.preemption import leaving_at_once
from fla_train.training.runfolder import RunFolder, new_run_dir, write_environment, write_whole
from fla_train.training.schedule import warmup_steps
from fla_train.training.schema import TrainConfig, load_config, to_yaml
from fla_train.training.supervise import Failure, choose_port, run_workers
from fla_train.training.task_data import has_reached, task_data, with_task_sizes
from fla_train.training.validate import resolve_device, validate

# These fix what a checkpoint holds and, with the prepared data, the stream of tokens: a resume keeps them.
FIXED_KEYS = (
    *("seed", "trainer.seq_len", "trainer.global_batch_tokens", "model.", "optimizer.name"),
    *("task.kind", "task.options", "task.train", "task.batch_size", "task.curriculum", "baseline."),
)
SEQUENCE_KEYS = ("data.document_boundaries",)  # of the data keys, what no fingerprint covers
# These say where and how a run is carried out, not what it computes: nobody asks whether they changed.
FREE_KEYS = (
    *("run.", "launch.", "logger.", "data.", "trainer.resume", "dry_run"),
    *("model.backend", "model.recompute_operator"),
)


class TrainingFailed(RuntimeError):
    """Training started and did not finish; the message is one line."""


def launch(config: TrainConfig) -> None:
    """Run `config` on this machine, from the checks to the summary.

    Raises:
        ValueError: the config, the data, the port or the run folder does not allow it; nothing was started.
        TrainingFailed: a worker failed, and `launch.max_restarts` did not help.
        Preempted: SIGUSR1 or SIGTERM came; if it was training, a checkpoint has been saved.
    """
    with leaving_at_once():
        _launch(config)


def _launch(config: TrainConfig) -> None:
    config = with_task_sizes(config)
    validate(config)
    config = resolve(config)
    if config.task is None:
        data = prepare(config.data, log=_say)
        check_vocabulary(data.tokenizer(), config.model["vocab_size"])
    else:
        data = task_data(config.task, config.seed)
    plan = make_plan(config, data)
    if config.dry_run:
        _say(to_yaml(config))
    for line in plan_lines(config, plan):
        _say(line)
    if not config.dry_run:
        _train(config, data, plan)


def resolve(config: TrainConfig) -> TrainConfig:
    """`config` with every "auto" and null that stands for a derived value replaced by it, but for run.dir."""
    device = resolve_device(config)
    precision = config.trainer.precision
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    warmup = warmup_steps(config.schedule, config.trainer.max_steps)
    run_dir, resume = (
        None if path is None else os.path.expanduser(path)  # a shell leaves the ~ of run.dir=~/runs
        for path in (config.run.dir, config.trainer.resume)
    )
    return replace(
        config,
        launch=replace(config.launch, device=device),
        trainer=replace(config.trainer, precision=precision, resume=resume),
        schedule=replace(config.schedule, warmup_steps=warmup),
        run=replace(config.run, dir=run_dir),
    )


def _train(config: TrainConfig, data: PreparedData, plan: Plan) -> None:
    port = choose_port(config.launch)
    root = Path(config.run.dir) if config.run.dir else new_run_dir(_label(config))
    config = replace(config, run=replace(config.run, dir=str(root)))
    folder = RunFolder(root)
    folder.create()
    with folder.locked() if config.launch.machine_rank == 0 else nullcontext() as lock:
        resume = checkpoint.choose(config.trainer.resume, folder.checkpoints)
        if resume is not None:
            _check_same_run(config, data, resume)
            if _is_complete(folder, resume, config):
                return
        if config.trainer.check_backend and config.baseline is None:
            _check_backend(config)
        write_whole(folder.config(config.launch.machine_rank), to_yaml(config))
        if lock is not None:
            _write_main_files(folder, config, plan)
        failure = _run(config, data, folder, resume, port, lock)
        limit = config.launch.max_restarts
        for restart in range(1, limit + 1):
            if failure is None or failure.final:
                break
            _say(f"restart      {restart} of {limit}, rank {failure.rank}: {failure.line}")
            if lock is not None:
                checkpoint.clean(folder.checkpoints)
            if checkpoint.checkpoints(folder.checkpoints):
                resume = checkpoint.choose("auto", folder.checkpoints)
            failure = _run(config, data, folder, resume, choose_port(config.launch), lock)
    if failure is not None:
        log = folder.log(config.launch.machine_rank)
        raise TrainingFailed(f"rank {failure.rank}: {failure.line} (details in {log})")


def _run(
    config: TrainConfig,
    data: PreparedData,
    folder: RunFolder,
    resume: Path | None,
    port: int,
    lock: int | None,
) -> Failure | None:
    """Train once from `resume` with this machine's workers, and say so."""
    launch, processes = config.launch, config.launch.num_processes
    _say(f"run          {folder.root}" + (f", from {resume}" if resume else ""))
    if resume is not None and (saved := checkpoint.world_size(resume)) != processes:
        _say(f"resume       checkpoint of {saved} process(es), optimizer state cut anew for {processes}")
    if launch.num_machines > 1:
        _say(f"machines     waiting for all {launch.num_machines} at {_address(config, port)}")
    if lock is not None:
        state = TrainState() if resume is None else checkpoint.read_state(resume)
        folder.note_start(state.step, state.tokens, processes)
    config_file = folder.config(launch.machine_rank)
    arguments = [str(config_file), str(data.folder), *([str(resume)] if resume else [])]
    return run_workers(arguments, launch, port=port, inherited=() if lock is None else (lock,))


def _write_main_files(folder: RunFolder, config: TrainConfig, plan: Plan) -> None:
    """What only the first machine writes before training."""
    checkpoint.clean(folder.checkpoints)
    write_environment(folder, config.launch.device)
    write_whole(folder.plan, json.dumps(asdict(plan), indent=2) + "\n")
    with folder.log(0).open("a") as log:
        log.writelines(line + "\n" for line in plan_lines(config, plan))


def _label(config: TrainConfig) -> str:
    """A run's name from its model: householder count, gate, width."""
    model = config.model
    if config.baseline is not None:
        return f"{config.baseline.kind}-{model['hidden_size']}x{model['num_hidden_layers']}"
    gate = "gated-" if model["use_forget_gate"] else ""
    kind = "delta-net" if model["num_householder"] == 1 else f"delta-product{model['num_householder']}"
    return f"{gate}{kind}-{model['hidden_size']}x{model['num_hidden_layers']}"


def _address(config: TrainConfig, port: int) -> str:
    return f"{config.launch.main_process_ip}:{port}"


def _is_complete(folder: RunFolder, checkpoint_folder: Path, config: TrainConfig) -> bool:
    """Whether nothing is left to do; says so. A run killed in its last moments still lacks export or plot."""
    step = checkpoint.read_state(checkpoint_folder).step
    export = folder.export(step)
    reached = config.task is not None and has_reached(config.task, folder, step)
    if step < config.trainer.max_steps and not reached:
        return False
    if not export.is_dir() or not folder.loss_plot.is_file():
        return False
    _say(f"run          {folder.root} is complete: {step:,} steps, model in {export}")
    more = "another task.stop_at" if reached else f"a trainer.max_steps above {step}"
    _say(f"             to train on, give {more}")
    return True


def _check_same_run(config: TrainConfig, data: PreparedData, resume: Path) -> None:
    """Refuse to go on from a checkpoint of another model or another stream of tokens; say what else changed.

    Raises:
        ValueError: naming each key that differs and the value to use.
    """
    earlier = RunFolder(resume.resolve().parent.parent)
    fingerprint = checkpoint.read_state(resume).data or _data_fingerprint(earlier)
    other_data = fingerprint not in (None, data.folder.name)
    if not earlier.config(0).is_file():
        if other_data:
            raise ValueError(f"{resume} is of other prepared data: restore them or use another checkpoint")
        _say(f"resume       {resume} lies in no run folder: its model and seed can't be compared")
        return
    before, now = dict(_flat(asdict(load_config(earlier.config(0))))), dict(_flat(asdict(config)))
    changed = {
        key: f"{key}={now.get(key)} (was {before.get(key)})"
        for key in sorted(before | now)
        if now.get(key) != before.get(key)
    }
    faults = [
        text
        for key, text in changed.items()
        if key in SEQUENCE_KEYS or (key.startswith(FIXED_KEYS) and not key.startswith(FREE_KEYS))
    ]
    if other_data:
        of_data = [text for key, text in changed.items() if key.startswith("data.")]
        faults += of_data or ["the text itself or the tokenizer has changed since"]
    if faults:
        raise ValueError(
            f"{resume} belongs to another run: {', '.join(faults)}; restore them or use another run.dir"
        )
    for key, text in changed.items():
        if not key.startswith(FREE_KEYS):
            _say(f"changed      {text}")


def _data_fingerprint(earlier: RunFolder) -> str | None:
    """Name of the prepared data a run was begun with: it covers the text, the tokenizer and the split.

    For checkpoints that were written before they named it themselves.
    """
    try:
        return Path(json.loads(earlier.plan.read_text())["data_folder"]).name
    except (OSError, ValueError, KeyError):
        return None


def _flat(node: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of every leaf."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _check_backend(config: TrainConfig) -> None:
    """Refuse to train with kernels that disagree with the fp64 reference on this machine.

    Raises:
        ValueError: with the report's verdict, and how to go on all the same.
    """
    model = config.model
    report = check_backend(
        model["backend"],
        config.launch.device,
        torch.bfloat16 if config.trainer.precision == "bf16" else torch.float32,
        cases=model_cases(model["num_householder"], model["use_forget_gate"]),
        head_dims=(model["head_dim"], int(model["head_dim"] * model["expand_v"])),
    )
    if not report.ok:
        raise ValueError(
            f"backend check failed: {report.summary()}; unset TRITON_PTXAS_PATH if it is set, set another "
            "model.backend, or trainer.check_backend=false to train all the same"
        )
    _say(f"backend      {report.summary()}")


def _say(text: str) -> None:
    print(text, flush=True)
