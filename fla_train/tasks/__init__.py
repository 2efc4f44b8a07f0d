"""Synthetic tasks of the papers: state tracking, formal languages, recall. Sequences by seed and index."""

from fla_train.tasks.config import TaskConfig, curriculum_tasks, make_task, tasks_for_testing, training_task
from fla_train.tasks.score import Score
from fla_train.tasks.task import IGNORE, Batch, Tally, Task, tally_by

__all__ = [
    "IGNORE",
    "Batch",
    "Score",
    "Tally",
    "Task",
    "TaskConfig",
    "curriculum_tasks",
    "make_task",
    "tally_by",
    "tasks_for_testing",
    "training_task",
]
