"""Check of the batches of a custom task."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fla_train.tasks.task import IGNORE, Tally, Task, tally_by
from fla_train.utils.errors import described


def check_contract(path: str, task: Task) -> None:
    """Check the sizes and the first two sequences of a task of class `path`.

    Raises:
        ValueError: it breaks the contract of `Task`; one line.
    """
    for name in ("vocab_size", "seq_len"):
        if type(value := getattr(task, name, None)) is not int or value < 1:
            raise ValueError(f"{path}: {name} is {value!r}, not an integer of at least 1")
    with _as_line(path, "its first batch"):
        pair, alone = task.batch([0, 1]), task.batch([1])
        ids = {name: (getattr(pair, name), getattr(alone, name)) for name in ("input_ids", "labels")}
    for name, (both, second) in ids.items():
        _check_ids(path, name, both, task)
        if not torch.equal(both[1:], second):
            raise ValueError(f"{path}: sequence 1 differs between batches [0, 1] and [1]: draw by keys alone")
    with _as_line(path, "its metrics"):
        predictions = task.judge(pair.labels.clamp(min=0), pair)
        metrics = task.summary(Tally.of(predictions, pair.labels))
        if task.slice_key is not None:
            tally_by(predictions, pair, task.slice_key)
    if task.headline not in metrics:
        raise ValueError(f"{path}: summary has no '{task.headline}', the class's headline")


@contextmanager
def _as_line(path: str, what: str) -> Iterator[None]:
    """Raise errors of the user's code as one line."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path}: {what} raised {described(error)}") from error


def _check_ids(path: str, name: str, ids: torch.Tensor, task: Task) -> None:
    if ids.shape != (2, task.seq_len) or ids.dtype != torch.int64:
        raise ValueError(f"{path}: {name} must be int64 [2, {task.seq_len}], not {ids.dtype} {[*ids.shape]}")
    known = (ids >= 0) & (ids < task.vocab_size)
    if not (known | (ids == IGNORE) if name == "labels" else known).all():
        raise ValueError(f"{path}: {name} must be at least 0 and below vocab_size = {task.vocab_size}")
