"""A synthetic task in the place of prepared text, and the sizes of a run that follow from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fla_train.data.cache import PreparedData
from fla_train.tasks import Task, TaskConfig, task_errors, training_task
from fla_train.training.config import TrainConfig
from fla_train.training.run_folder import RunFolder
from fla_train.utils.records import read_metrics

NO_FOLDER = Path("task")  # sequences are drawn while training: nothing lies on disk
PASSES = 2  # evaluations in a row that end a run
KEPT_TOKENS = 2**26  # of a fixed training set: 512 MiB with its labels
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class TaskData(PreparedData):
    """The manifest of a task, with the fields that plans, cards and summaries read; it has no tokenizer."""

    def tokenizer(self) -> None:
        return None


def task_data(config: TaskConfig, seed: int) -> TaskData:
    """Describe the task as data."""
    task = training_task(config, seed)
    train_tokens = math.inf if task.num_sequences is None else task.num_sequences * (task.seq_len + 1)
    tokenizer = {"name": None, "vocab_size": task.vocab_size} | dict.fromkeys(SPECIAL_IDS)
    splits = {
        "train": {"tokens": train_tokens, "unigram_entropy": None},
        "validation": {"tokens": config.test_sequences * (task.seq_len + 1), "unigram_entropy": None},
    }
    source = {"kind": task_name(config)}
    return TaskData(NO_FOLDER, {"source": source, "tokenizer": tokenizer, "splits": splits})


def task_name(config: TaskConfig) -> str:
    """The task in a few words, such as `group_words group=S3 length=128`."""
    options = {**config.options, **config.train}
    return " ".join([config.kind, *(f"{key}={value}" for key, value in options.items() if value is not None)])


def with_task_sizes(config: TrainConfig) -> TrainConfig:
    """`config` with the sizes that its task decides: vocabulary, sequence length, tokens per step.

    A sequence is one token longer than the task's, see `Batch.for_causal_lm`. A task with faults is left for
    `validate` to report.
    """
    if config.task is None or task_errors(config.task):
        return config
    task = training_task(config.task, config.seed)
    seq_len = task.seq_len + 1
    tokens = seq_len * config.task.batch_size
    trainer = replace(config.trainer, seq_len=seq_len, global_batch_tokens=tokens)
    return replace(config, trainer=trainer, model={**config.model, "vocab_size": task.vocab_size})


def has_reached(config: TaskConfig, folder: RunFolder, step: int) -> bool:
    """Whether the run in `folder` had every metric of `stop_at` at its value or above in its last two
    evaluations up to `step`. One could be luck, where accuracy swings between evaluations.
    """
    if not config.stop_at:
        return False
    tests = [r for r in read_metrics(folder.metrics) if "validation_loss" in r and r["step"] <= step]
    # A test set may be newer than an evaluation, which then says nothing of it.
    return len(tests) >= PASSES and all(
        record.get(metric, -math.inf) >= value
        for record in tests[-PASSES:]
        for metric, value in config.stop_at
    )


class TaskSequences:
    """What `PrefetchLoader` reads: sequence i is the same on any rank, in any batch and after any resume.

    Args:
        task: the training set.
        curriculum: training sets of the first steps, and how many steps each lasts.
        batch_size: sequences per step; only a curriculum needs it.

    A training set of a fixed size is kept in memory as it is drawn, up to KEPT_TOKENS: later epochs cost
    nothing.
    """

    def __init__(self, task: Task, curriculum: Sequence[tuple[Task, int]] = (), batch_size: int = 1):
        self.task, self._batch_size = task, batch_size
        self._stages = [stage for stage, _ in curriculum]
        self._ends = np.cumsum([steps for _, steps in curriculum])  # the step after each stage
        size = task.num_sequences
        self._kept: Tensor | None = None
        if size is not None and size * (task.seq_len + 1) <= KEPT_TOKENS:
            self._kept = torch.empty(2, size, task.seq_len + 1, dtype=torch.int32)
            self._drawn = np.zeros(size, dtype=bool)

    def sequences(self, indices: np.ndarray) -> Tensor:
        """[2, n, T + 1] int64: inputs and labels for a causal language model; T of the stage in a curriculum.

        All `indices` belong to one step.
        """
        stage = np.searchsorted(self._ends, indices[0] // self._batch_size, side="right")
        if stage < len(self._stages):
            return self._stages[stage].batch(indices).for_causal_lm()
        if self._kept is None:
            return self.task.batch(indices).for_causal_lm()
        rows = np.asarray(indices) % len(self._drawn)
        if len(missing := np.unique(rows[~self._drawn[rows]])):
            self._kept[:, missing] = self.task.batch(missing).for_causal_lm().int()
            self._drawn[missing] = True
        return self._kept[:, rows].long()
