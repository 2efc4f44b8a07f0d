"""Provide the data of a run: prepared text or a synthetic task, and their batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fla_train.data.cache import PreparedData
from fla_train.data.contiguous import ContiguousDataset
from fla_train.data.mixture import Dataset
from fla_train.data.open_dataset import open_contiguous, open_train
from fla_train.data.sampler import Batch, PackedDataset, send
from fla_train.kernels.context_parallel import ContextGroup, ContextPart
from fla_train.models.build import TOKEN_IDS
from fla_train.tasks.config import TaskConfig
from fla_train.tasks.registry import curriculum_tasks, training_task
from fla_train.tasks.task import Task
from fla_train.training.config import TrainConfig

# Folder of a task, whose sequences are drawn while training and never stored.
NO_FOLDER = Path("task")
# Maximum tokens of a task's fixed training set that are kept in memory: 512 MiB with labels.
KEPT_TOKENS = 2**26


@dataclass(frozen=True)
class TaskData(PreparedData):
    """Describe a task with the fields that plans, cards and summaries read. It has no tokenizer."""

    def tokenizer(self) -> None:
        return None


def task_data(config: TaskConfig, seed: int) -> TaskData:
    """Describe the task as data."""
    task = training_task(config, seed)
    count, length = config.test_sequences, task.seq_len + 1
    train_tokens = math.inf if task.num_sequences is None else task.num_sequences * length
    splits = {
        "train": {"tokens": train_tokens, "unigram_entropy": None},
        "validation": {"documents": count, "tokens": count * length, "unigram_entropy": None},
    }
    options = {**config.options, **config.train}
    name = [config.kind, *(f"{key}={value}" for key, value in options.items() if value is not None)]
    return TaskData(
        NO_FOLDER,
        {
            "source": {"kind": " ".join(name)},
            "tokenizer": {"name": None, "vocab_size": task.vocab_size, **dict.fromkeys(TOKEN_IDS)},
            "splits": splits,
        },
    )


def open_training_data(
    config: TrainConfig, data: PreparedData
) -> "Dataset | PackedDataset | ContiguousDataset | TaskSequences":
    """Return the training sequences by index.

    Raises:
        ValueError: a manifest is corrupt, a shard is missing or truncated, or no sequence fits.
    """
    if config.task is not None:
        task = config.task
        stages = curriculum_tasks(task, config.seed)
        return TaskSequences(training_task(task, config.seed), stages, task.batch_size)
    seq_len, boundaries = config.trainer.seq_len, config.data.document_boundaries
    if config.data.contiguous:
        rows = config.trainer.global_batch_tokens // seq_len
        return open_contiguous(data.folder, seq_len, config.seed, rows, document_boundaries=boundaries)
    train = open_train(data.folder, seq_len, config.seed)
    return PackedDataset(train) if boundaries else train


def to_batch(read: Tensor | Batch, device: torch.device, context: ContextGroup | None = None) -> Batch:
    """Copy a batch from the reader to `device` without waiting.

    Args:
        read: ids [B, T], of which every token but the first is a target; inputs and labels [2, B, T] of a
            task; or a packed batch.
        context: ranks that split the rows; only this rank's columns are copied.
    """
    if context is not None:
        whole = read if isinstance(read, Batch) else Batch(read, read)
        return split_batch(whole, context).to(device)
    if isinstance(read, Batch):
        return read.to(device)
    sent = send(read, device)
    return Batch(*sent) if sent.ndim == 3 else Batch(sent, sent)


def split_batch(whole: Batch, context: ContextGroup) -> Batch:
    """Return this rank's columns of rows [B, T] that the ranks of `context` split; they divide T."""
    # Import late, because it imports Triton, which the launcher does not need.
    from fla_train.models.loss import next_tokens

    length = whole.input_ids.shape[1] // context.size
    columns = slice(context.rank * length, (context.rank + 1) * length)
    return whole._replace(
        input_ids=whole.input_ids[:, columns].contiguous(),
        labels=None,
        shift_labels=next_tokens(whole.labels)[:, columns].contiguous(),
        context_part=ContextPart.of(context, length, whole.cu_seqlens),
    )


class TaskSequences:
    """Draw a task's training sequences: sequence i is equal on any rank, in any batch, after any resume.

    A training set of fixed size is kept in memory as it is drawn, up to KEPT_TOKENS, so later epochs cost
    nothing.

    Args:
        task: the training set.
        curriculum: training sets of the first steps, and how many steps each lasts.
        batch_size: sequences per step; only a curriculum needs it.
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
        """Return [2, n, T + 1] int64: inputs and labels for a causal language model.

        T is that of the stage in a curriculum. All `indices` belong to one step.
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
