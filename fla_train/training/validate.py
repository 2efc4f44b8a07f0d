"""Validation errors of a composed training config that types cannot show, all reported together."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import torch

from fla_train.models.configuration import build_config
from fla_train.models.zoo.build import baseline_errors
from fla_train.tasks import task_errors
from fla_train.training.config import TrainConfig
from fla_train.training.resolve import accumulation_steps, resolve_device, with_batch, with_processes
from fla_train.training.schedule import warmup_steps

CHOICES = {
    "optimizer.name": ("adamw", "muon"),
    "schedule.name": ("cosine", "linear", "wsd", "constant"),
    "trainer.precision": ("auto", "bf16", "fp32"),
    "launch.device": ("auto", "cuda", "cpu"),
    "logger.wandb.mode": ("offline", "online", "disabled"),
}
AT_LEAST_ONE = (
    "trainer.max_steps",
    "trainer.seq_len",
    "trainer.target_batch_tokens",
    "trainer.micro_batch_size",
    "trainer.log_every",
    "trainer.eval_tokens",
    "trainer.eval_buckets",
    "trainer.max_skipped_steps",
    "launch.num_machines",
)
NOT_NEGATIVE = (
    "seed",
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.max_grad_norm",
    "trainer.eval_every",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.export_every",
    "trainer.suite_every",
    "trainer.keep_every",
    "trainer.spike_deviations",
    "trainer.stats_every",
    "trainer.hang_timeout",
    "launch.max_restarts",
)
LONGEST_WAIT = 1e9  # seconds; torch's store counts nanoseconds in 64 bits
BETAS = ("optimizer.beta1", "optimizer.beta2")


def validate(config: TrainConfig) -> None:
    """Check every value against the others and against this machine.

    Raises:
        ValueError: one line per fault, each naming the key and a value that would do.
    """
    sizes = [f"{key}={v} must be at least 1" for key in AT_LEAST_ONE if (v := _read(config, key)) < 1]
    config = with_processes(config)
    if isinstance(processes := config.launch.num_processes, str):
        sizes.append(f"launch.num_processes={processes} must be a number of processes, or auto")
    elif processes < 1:
        sizes.append(f"launch.num_processes={processes} must be at least 1")
    if not sizes:  # a number where it is auto, so that what is said below of a batch holds for the run's
        config = with_batch(config)
    batch = config.trainer.global_batch_tokens
    if isinstance(batch, str):
        sizes.append(f"trainer.global_batch_tokens={batch} must be a number of tokens, or auto")
    elif batch < 1:
        sizes.append(f"trainer.global_batch_tokens={batch} must be at least 1")
    data = config.data.validation_errors() if config.task is None else [] if sizes else _task(config)
    faults = [*sizes, *_values(config), *data, *_model(config), *_suite(config), *_resume(config)]
    faults += _packages(config)
    if not sizes:  # the arithmetic below divides by them
        if config.task is None or not data:  # sizes follow from a task without faults
            faults += [*_batch(config), *_graph(config)]
        faults += [*_schedule(config), *_machines(config)]
        faults += device_errors(config)
    if faults:
        raise ValueError("\n  ".join(faults))


def _read(config: TrainConfig, key: str) -> object:
    node: object = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _numbers(key: str, value: object) -> Iterator[str]:
    """Numbers that neither a timer nor a tensor or a random generator takes, wherever they stand."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(f"{key}.{name}".removeprefix("."), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(key, inner)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key}={value} must be a finite number"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield f"{key}={value} must lie in -2^63..2^63 - 1"


def _values(config: TrainConfig) -> list[str]:
    faults = [*_numbers("", asdict(config))]
    for key, names in CHOICES.items():
        if (value := _read(config, key)) not in names:
            faults.append(f"{key}={value} is not one of {', '.join(names)}")
    faults += [f"{key}={v} must not be negative" for key in NOT_NEGATIVE if (v := _read(config, key)) < 0]
    if not 0 < (eps := config.optimizer.eps) < math.inf:
        faults.append(f"optimizer.eps={eps} must be positive: a weight without a gradient would become 0 / 0")
    momentum = config.optimizer.momentum
    if config.optimizer.name != "muon" and momentum is not None:
        faults.append(f"optimizer.momentum={momentum} is for optimizer=muon only: leave it at null")
    elif config.optimizer.name == "muon" and (momentum is None or not 0 <= momentum < 1):
        faults.append(f"optimizer.momentum={momentum} must lie in [0, 1) for optimizer=muon")
    if (peak := config.launch.peak_tflops) is not None and not peak > 0:
        faults.append(f"launch.peak_tflops={peak} must be positive, or null")
    if not 0 < (wait := config.launch.rendezvous_timeout) <= LONGEST_WAIT:
        faults.append(f"launch.rendezvous_timeout={wait} must be positive, at most {LONGEST_WAIT:g} seconds")
    if config.trainer.keep_every and not config.trainer.keep_checkpoints:
        faults.append("trainer.keep_every has no effect with trainer.keep_checkpoints=0, which keeps all")
    steps = config.trainer.max_steps
    if outside := [step for step in config.trainer.profile_steps if not 1 <= step <= steps]:
        faults.append(f"trainer.profile_steps={outside} must lie in 1..{steps}, the steps of the run")
    if config.trainer.seq_len == 1:
        faults.append("trainer.seq_len=1 leaves no token to predict: use at least 2")
    faults += [f"{key}={v} must lie in [0, 1)" for key in BETAS if not 0 <= (v := _read(config, key)) < 1]
    return faults


def _model(config: TrainConfig) -> list[str]:
    try:
        build_config(config.model)
    except ValueError as fault:
        return [str(fault)]
    if config.baseline is None:
        return []
    of_text = (
        []
        if config.task is not None
        else [f"baseline={config.baseline.kind} trains on tasks only: choose task="]
    )
    return [*of_text, *baseline_errors(config.baseline, config.model)]


def _task(config: TrainConfig) -> list[str]:
    faults, task, processes = task_errors(config.task), config.task, config.launch.num_processes
    unit = config.trainer.micro_batch_size * processes
    if not faults and unit > 0 and task.batch_size % unit:
        faults.append(
            f"task.batch_size={task.batch_size} is not a multiple of {unit} = micro_batch_size x processes"
        )
    if 1 <= task.test_sequences < processes:
        faults.append(f"task.test_sequences={task.test_sequences} leaves processes without a sequence")
    return faults


def _suite(config: TrainConfig) -> list[str]:
    if not config.trainer.suite_every:
        return []
    if config.task is not None:
        return ["trainer.suite_every is for training on text: a task has its own test sets"]
    known = sorted(
        file.name.removesuffix(".yaml") for file in (files("fla_train.configs") / "suite").iterdir()
    )
    name = config.trainer.suite
    return [] if name in known else [f"trainer.suite={name} is none of {', '.join(known)}"]


def _batch(config: TrainConfig) -> list[str]:
    trainer, world = config.trainer, config.launch.num_processes
    unit = trainer.seq_len * trainer.micro_batch_size * world
    if trainer.global_batch_tokens % unit == 0:
        return []
    below = trainer.global_batch_tokens // unit * unit
    fits = f"{below} or {below + unit}" if below else f"{unit}"
    return [
        f"trainer.global_batch_tokens={trainer.global_batch_tokens} is not a multiple of {unit} = seq_len "
        f"{trainer.seq_len} x micro_batch_size {trainer.micro_batch_size} x {world} process(es): use {fits}"
    ]


def _graph(config: TrainConfig) -> list[str]:
    """A graph holds one pass of one process, of inputs whose shapes stay."""
    if not config.trainer.cuda_graph:
        return []
    against = {
        "launch.num_processes above 1": config.launch.num_processes > 1,
        "several micro-batches a step": accumulation_steps(config) > 1,
        "trainer.activation_checkpointing": config.trainer.activation_checkpointing,
        "data.document_boundaries": config.task is None and config.data.document_boundaries,
    }
    return [
        f"trainer.cuda_graph=true cannot be had with {what}: set it to false"
        for what, there in against.items()
        if there
    ]


def _schedule(config: TrainConfig) -> list[str]:
    schedule, steps = config.schedule, config.trainer.max_steps
    warmup, decay = warmup_steps(schedule, steps), schedule.decay_steps
    faults = [
        f"schedule.{key}={ratio} must lie in [0, 1]"
        for key in ("start_ratio", "min_ratio")
        if not 0 <= (ratio := getattr(schedule, key)) <= 1
    ]
    if schedule.name == "constant" and schedule.min_ratio != 1:
        faults.append(
            f"schedule.min_ratio={schedule.min_ratio} has no effect with schedule=constant: leave it at 1"
        )
    if warmup < 0:
        faults.append(f"schedule.warmup_steps={warmup} must not be negative")
    elif warmup > steps:
        faults.append(
            f"schedule.warmup_steps={warmup} is longer than the run: use at most trainer.max_steps={steps}"
        )
    if decay is not None and schedule.name != "wsd":
        faults.append(f"schedule.decay_steps={decay} is for schedule=wsd only: leave it at null")
    elif decay is not None and not 0 <= decay <= steps - warmup:
        faults.append(
            f"schedule.decay_steps={decay} must lie in 0..{steps - warmup}, which the warm-up leaves"
        )
    return faults


def device_errors(config: TrainConfig) -> list[str]:
    """What this machine lacks for its part."""
    if resolve_device(config) != "cuda":
        return []
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked = config.launch.num_processes // config.launch.num_machines
    if present == 0:
        return ["launch.device=cuda, but this machine has no usable GPU: use launch.device=cpu"]
    if asked > present:
        return [
            f"launch.num_processes={config.launch.num_processes} asks for {asked} GPUs on this machine, "
            f"which has {present}: use launch.num_processes={present * config.launch.num_machines}"
        ]
    return []


def _packages(config: TrainConfig) -> list[str]:
    """Packages that training would import only once the data are prepared, and that are not installed."""
    needed = dict.fromkeys(("accelerate", "deepspeed", "matplotlib"), ("training", ""))
    if (mode := config.logger.wandb.mode) != "disabled":
        needed["wandb"] = (f"logger.wandb.mode={mode}", ", or train without it: logger=none")
    if config.logger.tensorboard:
        needed["tensorboard"] = ("logger.tensorboard=true", ", or leave that at false")
    specs = {name: find_spec(name) for name in needed}
    # A spec without an origin is a bare folder of that name, such as W&B's ./wandb.
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]
    return [f"{needed[name][0]} needs a package: pip install {name}{needed[name][1]}" for name in missing]


def _machines(config: TrainConfig) -> list[str]:
    launch, faults = config.launch, []
    if launch.num_processes % launch.num_machines:
        faults.append(
            f"launch.num_processes={launch.num_processes} (all machines together) is not a multiple of "
            f"launch.num_machines={launch.num_machines}"
        )
    if launch.machine_rank is not None and not 0 <= launch.machine_rank < launch.num_machines:
        faults.append(
            f"launch.machine_rank={launch.machine_rank} must lie in 0..{launch.num_machines - 1} "
            f"(launch.num_machines={launch.num_machines})"
        )
    if launch.num_machines > 1 and config.run.dir is None:
        faults.append(
            "launch.num_machines > 1 needs run.dir: the same folder, on a file system all machines share"
        )
    if launch.main_process_port is not None and not 0 < launch.main_process_port < 65536:
        faults.append(f"launch.main_process_port={launch.main_process_port} must lie in 1..65535")
    return faults


def _resume(config: TrainConfig) -> list[str]:
    resume = config.trainer.resume
    if resume in ("auto", "none") or Path(resume).expanduser().is_dir():
        return []
    return [f"trainer.resume={resume} is no checkpoint folder: use auto, none or an existing path"]
