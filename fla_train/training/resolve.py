"""Fill in what a training config leaves open: device, processes, precision, batch, vocabulary, warm-up."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fla_train.data.config import absolute, with_absolute_paths
from fla_train.data.tokenizers import TokenizerNotCached, tokenizer_size
from fla_train.models.configuration import DeltaProductConfig
from fla_train.training.config import TrainConfig
from fla_train.training.log import log
from fla_train.training.schedule import warmup_steps
from fla_train.utils.ranks import is_rank

AUTO = "auto"
ROUND = 64  # a vocabulary is a multiple of this: matmuls with the head are slow at odd sizes


def resolve(config: TrainConfig) -> TrainConfig:
    """`config` with "auto" replaced and paths expanded; run.dir, vocabulary and warm-up may stay null.

    Paths of data, tokenizer and weights become absolute, so that `run.dir` alone resumes from any folder.
    """
    config, device = with_processes(config), resolve_device(config)
    precision = config.trainer.precision
    if precision == AUTO:
        precision = "bf16" if device == "cuda" else "fp32"
    run_dir, resume = (
        None if path is None else os.path.expanduser(path)  # a shell leaves the ~ of run.dir=~/runs
        for path in (config.run.dir, config.trainer.resume)
    )
    init_from = config.init_from
    if init_from is not None and os.path.exists(os.path.expanduser(init_from)):
        init_from = absolute(init_from)
    config = replace(
        config,
        data=with_absolute_paths(config.data),
        init_from=init_from,
        launch=replace(config.launch, device=device),
        trainer=replace(config.trainer, precision=precision, resume=resume),
        run=replace(config.run, dir=run_dir),
    )
    return with_batch(config)


def resolve_device(config: TrainConfig) -> str:
    """`cuda` or `cpu`."""
    if config.launch.device != AUTO:
        return config.launch.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def with_processes(config: TrainConfig) -> TrainConfig:
    """`config` with a number for `launch.num_processes=auto`: all GPUs of each machine, on a CPU one process.

    For a rank that a launcher has started it is the launcher's number, and that of machines, too.

    Raises:
        ValueError: another number was given than the launcher has started.
    """
    launch = config.launch
    if is_rank():
        world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if launch.num_processes not in (AUTO, world):
            raise ValueError(
                f"launch.num_processes={launch.num_processes}, but {world} ranks were started: give the same "
                "number on all machines, or leave it out"
            )
        return replace(config, launch=replace(launch, num_processes=world, num_machines=world // local))
    if launch.num_processes != AUTO:
        return config
    gpus = torch.cuda.device_count() if resolve_device(config) == "cuda" else 0
    return replace(config, launch=replace(launch, num_processes=max(1, gpus) * max(1, launch.num_machines)))


def with_batch(config: TrainConfig) -> TrainConfig:
    """`config` with a number for `trainer.global_batch_tokens=auto`.

    It is the multiple of seq_len x micro_batch_size x processes nearest to target_batch_tokens, at least one.
    """
    trainer = config.trainer
    if trainer.global_batch_tokens != AUTO:
        return config
    unit = trainer.seq_len * trainer.micro_batch_size * config.launch.num_processes
    tokens = max(1, round(trainer.target_batch_tokens / unit)) * unit
    return replace(config, trainer=replace(trainer, global_batch_tokens=tokens))


def accumulation_steps(config: TrainConfig) -> int:
    """Micro-batches per rank and optimizer step."""
    trainer, processes = config.trainer, with_processes(config).launch.num_processes
    return trainer.global_batch_tokens // (trainer.seq_len * trainer.micro_batch_size * processes)


def with_vocabulary(config: TrainConfig, *, offline: bool = False) -> TrainConfig:
    """`config` with `model.vocab_size`: if null the tokenizer's size, rounded up to a multiple of 64.

    Args:
        offline: fetch no tokenizer; one that is not on this machine leaves the model's usual size.

    Raises:
        ValueError: the tokenizer has more tokens than a given `model.vocab_size`, or can't be loaded.
    """
    given = config.model["vocab_size"]
    if config.task is not None:  # the task has set it
        return config
    try:
        needed = tokenizer_size(config.data.tokenizer, offline=offline)
    except TokenizerNotCached:
        needed = DeltaProductConfig.vocab_size
        name = config.data.tokenizer.name
        log(f"vocabulary   {name} is not on this machine: sizes are for {given or needed:,} tokens")
        return _with_vocab_size(config, given or needed)
    fitting = -(-needed // ROUND) * ROUND
    if given is not None and given < needed:
        raise ValueError(
            f"model.vocab_size={given} is too small for the tokenizer's {needed} tokens: leave it out or set "
            f"model.vocab_size={fitting}"
        )
    return _with_vocab_size(config, given or fitting)


def with_warmup(config: TrainConfig) -> TrainConfig:
    """`config` with its number of warm-up steps where it is null: a share of trainer.max_steps."""
    steps = warmup_steps(config.schedule, config.trainer.max_steps)
    return replace(config, schedule=replace(config.schedule, warmup_steps=steps))


def with_saved(config: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig:
    """`config` with the values that it leaves open taken from the run that it continues.

    The batch would change with the number of processes, and the warm-up with trainer.max_steps.

    Args:
        saved: `warmup_steps`, `global_batch_tokens` and `vocab_size` of that run; empty: there is none.
    """
    if not saved:
        return config
    trainer, schedule = config.trainer, config.schedule
    if trainer.global_batch_tokens == AUTO:
        trainer = replace(trainer, global_batch_tokens=saved["global_batch_tokens"])
    if schedule.warmup_steps is None:
        schedule = replace(schedule, warmup_steps=saved["warmup_steps"])
    config = replace(config, trainer=trainer, schedule=schedule)
    return _with_vocab_size(config, config.model["vocab_size"] or saved["vocab_size"])


def _with_vocab_size(config: TrainConfig, size: int | None) -> TrainConfig:
    return replace(config, model={**config.model, "vocab_size": size})
