"""A task of the user's own: its class by import path, and whether its batches are as they must be."""

import inspect

import torch
from torch.nn.functional import one_hot

from fla_train.tasks.score import Score
from fla_train.tasks.task import IGNORE, Task
from fla_train.utils.errors import described
from fla_train.utils.import_class import import_class


def import_task(path: str) -> type[Task]:
    """The class that `path`, `package.module:Class`, names.

    Raises:
        ValueError: there is none, it is no `Task`, or its constructor takes no seed; one line.
    """
    found = import_class(path, Task, "fla_train.tasks.Task")
    if inspect.isabstract(found):
        raise ValueError(f"{path}: the class lacks {', '.join(sorted(found.__abstractmethods__))}")
    if lacking := {"seed", "num_sequences"} - set(inspect.signature(found).parameters):
        raise ValueError(f"{path}: its constructor must take {' and '.join(sorted(lacking))}")
    return found


def contract_errors(task: Task) -> list[str]:
    """What keeps the task's first two sequences from training and tests: one line, or none."""
    try:
        pair, alone = task.batch([0, 1]), task.batch([1])
        for name in ("input_ids", "labels"):
            _check_ids(name, getattr(pair, name), task)
        if any(
            not torch.equal(getattr(pair, name)[1:], getattr(alone, name)) for name in ("input_ids", "labels")
        ):
            raise _BrokenContract(
                "sequence 1 is another one in a batch of its own: draw by the keys alone "
                "(fla_train/tasks/draws.py), so that all ranks and resumed runs get the same"
            )
        logits = one_hot(pair.labels.clamp(min=0), task.vocab_size)
        if task.headline not in Score.of(task, logits, pair).scalars(task):
            raise _BrokenContract(f"summary has no '{task.headline}', the class's headline")
    except _BrokenContract as error:
        return [str(error)]
    except Exception as error:
        return [f"its first batch raised {described(error)}"]
    return []


class _BrokenContract(Exception):
    """A task gives something else than `Task` says."""


def _check_ids(name: str, ids: torch.Tensor, task: Task) -> None:
    if ids.shape != (2, task.seq_len) or ids.dtype != torch.int64:
        raise _BrokenContract(
            f"{name} of two sequences must be int64 [2, seq_len = {task.seq_len}], not {ids.dtype} "
            f"{list(ids.shape)}"
        )
    known = (ids >= 0) & (ids < task.vocab_size)
    if not (known | (ids == IGNORE) if name == "labels" else known).all():
        raise _BrokenContract(f"{name} must be at least 0 and below vocab_size = {task.vocab_size}")
