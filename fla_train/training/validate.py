"""Faults of a composed training config that types cannot show. All of them are reported together."""

import math
from pathlib import Path

import torch

from fla_train.data import data_faults
from fla_train.models import build_config
from fla_train.training.schedule import warmup_steps
from fla_train.training.schema import TrainConfig

CHOICES = {
    "optimizer.name": ("adamw",),
    "schedule.name": ("cosine", "constant"),
    "trainer.precision": ("auto", "bf16", "fp32"),
    "launch.device": ("auto", "cuda", "cpu"),
    "logger.wandb.mode": ("offline", "online", "disabled"),
}
AT_LEAST_ONE = (
    "trainer.max_steps",
    "trainer.seq_len",
    "trainer.global_batch_tokens",
    "trainer.micro_batch_size",
    "trainer.log_every",
    "trainer.eval_tokens",
    "trainer.max_skipped_steps",
    "launch.num_processes",
    "launch.num_machines",
)
NOT_NEGATIVE = (
    "seed",
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.eps",
    "optimizer.max_grad_norm",
    "trainer.eval_every",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.export_every",
)
BETAS = ("optimizer.beta1", "optimizer.beta2")


def validate(config: TrainConfig) -> None:
    """Check every value against the others and against this machine.

    Raises:
        ValueError: one line per fault, each naming the key and a value that would do.
    """
    sizes = [f"{key}={v} must be at least 1" for key in AT_LEAST_ONE if (v := _read(config, key)) < 1]
    faults = [*sizes, *_values(config), *data_faults(config.data), *_model(config), *_resume(config)]
    if not sizes:  # the arithmetic below divides by them
        faults += [*_batch(config), *_schedule(config), *_devices(config), *_machines(config)]
    if faults:
        raise ValueError("\n  ".join(faults))


def accumulation_steps(config: TrainConfig) -> int:
    """Micro-batches per rank and optimizer step."""
    trainer = config.trainer
    return trainer.global_batch_tokens // (
        trainer.seq_len * trainer.micro_batch_size * config.launch.num_processes
    )


def resolve_device(config: TrainConfig) -> str:
    """`cuda` or `cpu`."""
    if config.launch.device != "auto":
        return config.launch.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _read(config: TrainConfig, key: str) -> object:
    node: object = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _values(config: TrainConfig) -> list[str]:
    faults = []
    for key, names in CHOICES.items():
        if (value := _read(config, key)) not in names:
            faults.append(f"{key}={value} is not one of {', '.join(names)}")
    faults += [f"{key}={v} must not be negative" for key in NOT_NEGATIVE if (v := _read(config, key)) < 0]
    faults += [
        f"{key}={v} is no number" for key in NOT_NEGATIVE if not math.isfinite(v := _read(config, key))
    ]
    if config.trainer.seq_len == 1:
        faults.append("trainer.seq_len=1 leaves no token to predict: use at least 2")
    faults += [f"{key}={v} must lie in [0, 1)" for key in BETAS if not 0 <= (v := _read(config, key)) < 1]
    ratio = config.schedule.min_ratio
    if not 0 <= ratio <= 1:
        faults.append(f"schedule.min_ratio={ratio} must lie in [0, 1]")
    elif config.schedule.name == "constant" and ratio != 1:
        faults.append(f"schedule.min_ratio={ratio} has no effect with schedule=constant: leave it at 1")
    return faults


def _model(config: TrainConfig) -> list[str]:
    try:
        build_config(config.model)
    except ValueError as fault:
        return [str(fault)]
    return []


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


def _schedule(config: TrainConfig) -> list[str]:
    warmup, steps = warmup_steps(config.schedule, config.trainer.max_steps), config.trainer.max_steps
    if warmup < 0:
        return [f"schedule.warmup_steps={warmup} must not be negative"]
    if warmup > steps:
        return [
            f"schedule.warmup_steps={warmup} is longer than the run: use at most trainer.max_steps={steps}"
        ]
    return []


def _devices(config: TrainConfig) -> list[str]:
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


def _machines(config: TrainConfig) -> list[str]:
    launch, faults = config.launch, []
    if launch.num_processes % launch.num_machines:
        faults.append(
            f"launch.num_processes={launch.num_processes} (all machines together) is not a multiple of "
            f"launch.num_machines={launch.num_machines}"
        )
    if not 0 <= launch.machine_rank < launch.num_machines:
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
    if resume in ("auto", "none") or Path(resume).is_dir():
        return []
    return [f"trainer.resume={resume} is no checkpoint folder: use auto, none or an existing path"]
