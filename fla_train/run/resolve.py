"""Resolve a request to a plan: `resolve` fills in open values and checks the result once.

1. Make the paths of the request absolute, and check every key and section.
2. Fill in the sizes that the task, the saved run and this machine decide.
3. Check the filled-in config: batch, device, options that exclude each other, number of steps (with
   `trainer.epochs` after 6).
4. Check the run folder, the Hub and the weights of `init_from` before hours of tokenizing.
5. Set the vocabulary from the tokenizer, prepare the data, and compare them with those of the saved run.
6. Fill in the number of steps and the warm-up; compute FLOPs, memory and time.
"""

import os
from copy import deepcopy
from pathlib import Path
from typing import Literal

import torch

from fla_train.data.cache import PreparedData, find_prepared
from fla_train.data.config import absolute, make_paths_absolute
from fla_train.data.prepare import check_first_document, prepare
from fla_train.data.tokenizers import TokenizerNotCached, tokenizer_size
from fla_train.hub.push import check_access
from fla_train.models.settings import DeltaProductSettings
from fla_train.run.init_from import check_initial_weights
from fla_train.tasks.registry import training_task
from fla_train.training.checkpoint import CheckpointStore, TrainState
from fla_train.training.checks import find_late_misfits, find_misfits, find_model_errors
from fla_train.training.config import TrainConfig
from fla_train.training.log import log
from fla_train.training.plan import RunPlan, make_plan
from fla_train.training.resume import check_same_data, check_same_run
from fla_train.training.run_data import task_data
from fla_train.training.run_folder import RunFolder
from fla_train.utils.keys import AUTO, find_errors, require_none
from fla_train.utils.ranks import is_first, is_rank

VOCABULARY_MULTIPLE = 64  # matmuls with the head are slow at other sizes
Data = Literal["prepare", "find", "none"]


def resolve(request: TrainConfig, *, data: Data = "none") -> RunPlan:
    """Check a request and return its plan.

    Args:
        request: a composed config, which is not changed.
        data: `prepare` missing data; `find` data on this machine without fetching or writing anything;
            `none`: plan without data and without a run folder.

    Raises:
        ValueError: the request, the run folder or the data have errors, listed one per line.
    """
    request = deepcopy(request)
    _make_paths_absolute(request)
    require_none([*find_errors(request), *find_model_errors(request)])
    config = deepcopy(request)
    folder = None if config.run.dir is None or data == "none" else RunFolder(Path(config.run.dir))
    # Without a run folder there is at most the checkpoint that `trainer.resume` names.
    store = CheckpointStore(Path(os.devnull)) if folder is None else folder.store
    saved = None if data == "none" else store.newest_state(config.trainer.resume)
    if config.task is not None:
        _fill_task_sizes(config)
    if saved is not None:
        _fill_saved_sizes(config, *saved)
    _fill_machine(config)
    misfits = find_misfits(config)
    if config.trainer.epochs is None:
        _fill_steps(config, None)
        misfits += find_late_misfits(config)
    require_none(misfits)
    if data != "none":
        _check_before_preparing(config, folder, saved, fetch=data == "prepare")
    if config.task is None:
        _fill_vocabulary(config, offline=data != "prepare")
    prepared = _prepare(config, saved, data)
    if config.trainer.epochs is not None:
        _fill_steps(config, prepared)
        require_none(find_late_misfits(config))
    return make_plan(request, config, prepared)


def _make_paths_absolute(config: TrainConfig) -> None:
    """Make local paths absolute, so that `run.dir` alone resumes from any folder."""
    make_paths_absolute(config.data)
    if config.trainer.resume not in ("auto", "none"):
        config.trainer.resume = absolute(config.trainer.resume)
    if config.init_from is not None and os.path.exists(os.path.expanduser(config.init_from)):
        config.init_from = absolute(config.init_from)
    if config.run.dir is not None:
        config.run.dir = os.path.expanduser(config.run.dir)


def _fill_task_sizes(config: TrainConfig) -> None:
    """Fill in vocabulary, sequence length and batch of a task.

    A sequence is one token longer than the task's, see `tasks.Batch.for_causal_lm`.
    """
    task = training_task(config.task, config.seed)
    config.trainer.seq_len = task.seq_len + 1
    config.trainer.global_batch_tokens = config.trainer.seq_len * config.task.batch_size
    config.model["vocab_size"] = task.vocab_size


def _fill_saved_sizes(config: TrainConfig, checkpoint: Path, state: TrainState) -> None:
    """Fill in batch, warm-up and vocabulary of the resumed run where the request leaves them open.

    Otherwise the batch would change with the number of processes, and the warm-up with the number of steps.

    Raises:
        ValueError: the request has settings that a resumed run can't change.
    """
    saved = state.config
    if config.trainer.global_batch_tokens == AUTO:
        config.trainer.global_batch_tokens = saved.get("trainer.global_batch_tokens", AUTO)
    if config.schedule.warmup_steps is None:
        config.schedule.warmup_steps = saved.get("schedule.warmup_steps")
    config.model["vocab_size"] = config.model["vocab_size"] or saved.get("model.vocab_size")
    check_same_run(config, checkpoint, state)


def _fill_machine(config: TrainConfig) -> None:
    """Fill in device, precision, number of processes and batch.

    The default uses all GPUs of each machine, or one process on a CPU or with a CUDA graph. Ranks that
    another launcher started use its numbers. The batch is the multiple of `batch_unit` nearest to
    `target_batch_tokens`.
    """
    launch, trainer = config.launch, config.trainer
    if launch.device == AUTO:
        plans_for_gpus = config.dry_run and launch.num_processes not in (AUTO, 1)
        launch.device = "cuda" if torch.cuda.device_count() or plans_for_gpus else "cpu"
    if is_rank():
        world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if launch.num_processes not in (AUTO, world):
            raise ValueError(f"leave out launch.num_processes={launch.num_processes}: {world} ranks started")
        launch.num_processes, launch.num_machines = world, world // local
    elif launch.num_processes == AUTO:
        # A CUDA graph needs a single process.
        single = launch.device == "cpu" or trainer.cuda_graph
        processes = 1 if single else max(1, torch.cuda.device_count())
        launch.num_processes = processes * launch.num_machines
    if trainer.precision == AUTO:
        trainer.precision = "bf16" if launch.device == "cuda" else "fp32"
    if trainer.global_batch_tokens == AUTO:
        unit = config.batch_unit
        trainer.global_batch_tokens = max(1, round(trainer.target_batch_tokens / unit)) * unit


def _fill_vocabulary(config: TrainConfig, *, offline: bool) -> None:
    """Fill in the tokenizer's size, rounded up to a multiple of 64, if the request leaves it open.

    Args:
        offline: do not fetch a tokenizer. If it is not on this machine, keep the model's usual size.
    """
    asked = config.model["vocab_size"]
    try:
        needed = tokenizer_size(config.data.tokenizer, offline=offline)
    except TokenizerNotCached:
        size = config.model["vocab_size"] = asked or DeltaProductSettings.vocab_size
        log(f"vocabulary   {size:,} assumed: tokenizer {config.data.tokenizer.name} is not on this machine")
        return
    fitting = -(-needed // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if asked is not None and asked < needed:
        raise ValueError(f"model.vocab_size={asked} is below {needed} tokens: use model.vocab_size={fitting}")
    config.model["vocab_size"] = asked or fitting


def _check_before_preparing(
    config: TrainConfig, folder: RunFolder | None, saved: tuple[Path, TrainState] | None, *, fetch: bool
) -> None:
    """Check the run folder, the Hub and the initial weights before hours of tokenizing."""
    if folder is not None:
        folder.check()
        # A misspelled run.dir would otherwise count as a new run.
        if not folder.config.is_file():
            log(f"new run      in {folder.root}")
    elif is_rank():
        raise ValueError("give run.dir: ranks that another launcher has started can't agree on a new one")
    if config.task is None:
        check_first_document(config.data)
    if fetch and pushes_here(config):
        try:
            check_access(config.hub.repo_id, private=config.hub.private)
        except ConnectionError as failure:
            log(f"hub          {failure}; training starts, and pushes try again")
    if config.init_from is not None and saved is None and (fetch or os.path.exists(config.init_from)):
        check_initial_weights(config)


def pushes_here(config: TrainConfig) -> bool:
    """Return whether rank 0, which pushes to the Hub, may be on this machine."""
    return config.hub.repo_id is not None and is_first() and config.launch.machine_rank in (None, 0)


def _prepare(config: TrainConfig, saved: tuple[Path, TrainState] | None, data: Data) -> PreparedData | None:
    if config.task is not None:
        return task_data(config.task, config.seed)
    if data == "prepare":
        prepared = prepare(config.data, log=log, commits=saved[1].commits if saved else {})
        if saved is not None:
            check_same_data(prepared, *saved)
        return prepared
    return find_prepared(config.data) if data == "find" else None


def _fill_steps(config: TrainConfig, prepared: PreparedData | None) -> None:
    """Fill in the warm-up and the number of steps, which may follow from `max_tokens` or `epochs`."""
    trainer, tokens = config.trainer, config.trainer.max_tokens
    if trainer.epochs is not None:
        in_epoch = prepared.manifest["splits"]["train"].get("tokens") if prepared else None
        if in_epoch in (None, float("inf")) or (config.data.stream and config.task is None):
            raise ValueError("trainer.epochs needs prepared data or a task of fixed size: set max_steps")
        tokens = round(trainer.epochs * in_epoch)
    if tokens is not None:
        trainer.max_steps = tokens // trainer.global_batch_tokens
        if trainer.max_steps == 0:
            raise ValueError(f"{tokens:,} tokens are below a step: raise trainer.max_tokens or .epochs")
    config.schedule.warmup_steps = config.schedule.warmup(trainer.max_steps)
