"""Typed config of a task. configs/task/*.yaml explain every key."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fla_train.utils.keys import key


@dataclass
class TaskConfig:
    """A synthetic task to train on instead of text, and its test sets.

    - `options` are arguments of the task's class for all sets. `train`, and each entry of `tests`, add to
      them or replace them.
    - `curriculum`, [[tokens, steps], ...], lists the first stages of training: sequences of at most `tokens`
      for `steps` steps. A third entry {option: value} sets further options of a stage.
    - `stop_at`, [["test set/metric", value], ...], ends a run early, once two evaluations in a row reach all
      of these values.
    """

    kind: str = key(classes=True, resume="fixed")
    options: dict[str, Any] = key(factory=dict, resume="fixed")
    train: dict[str, Any] = key(factory=dict, resume="fixed")
    tests: dict[str, dict[str, Any]] = key(factory=dict, nonempty=True)
    train_sequences: int | None = key(None, at_least=1, resume="fixed")
    test_sequences: int = key(512, at_least=1)
    batch_size: int = key(64, at_least=1, resume="fixed")
    test_batch_size: int = key(128, at_least=1)
    curriculum: list[Any] = key(factory=list, resume="fixed")
    stop_at: list[Any] = field(default_factory=list)

    def check(self) -> Iterator[str]:
        from fla_train.tasks.registry import task_errors  # imports torch, which --help does not need

        return task_errors(self)
