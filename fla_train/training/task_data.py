"""A synthetic task in the place of prepared text, and the sizes of a run that follow from it."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fla_train.data import PreparedData
from fla_train.tasks import Task, TaskConfig, task_faults, training_task
from fla_train.training.schema import TrainConfig

NO_FOLDER = Path("task")  # sequences are drawn while training: nothing lies on disk
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
    if config.task is None or task_faults(config.task):
        return config
    task = training_task(config.task, config.seed)
    seq_len = task.seq_len + 1
    tokens = seq_len * config.task.batch_size
    trainer = replace(config.trainer, seq_len=seq_len, global_batch_tokens=tokens)
    return replace(config, trainer=trainer, model={**config.model, "vocab_size": task.vocab_size})


class TaskSequences:
    """What `MicroBatches` reads: sequence i is the same on any rank, in any batch and after any resume.

    A training set of a fixed size is kept in memory as it is drawn, up to KEPT_TOKENS: later epochs cost
    nothing.
    """

    def __init__(self, task: Task):
        self.task = task
        size = task.num_sequences
        self._kept: Tensor | None = None
        if size is not None and size * (task.seq_len + 1) <= KEPT_TOKENS:
            self._kept = torch.empty(2, size, task.seq_len + 1, dtype=torch.int32)
            self._drawn = np.zeros(size, dtype=bool)

    def sequences(self, indices: np.ndarray) -> Tensor:
        """[2, n, T + 1] int64: inputs and labels for a causal language model."""
        if self._kept is None:
            return self.task.batch(indices).for_causal_lm()
        rows = np.asarray(indices) % len(self._drawn)
        if len(missing := np.unique(rows[~self._drawn[rows]])):
            self._kept[:, missing] = self.task.batch(missing).for_causal_lm().int()
            self._drawn[missing] = True
        return self._kept[:, rows].long()
