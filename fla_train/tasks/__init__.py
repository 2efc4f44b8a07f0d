"""Synthetic tasks of the papers: state tracking, formal languages, recall. Sequences by seed and index."""

from fla_train.tasks.code_trace import CodeTrace
from fla_train.tasks.config import TaskConfig, curriculum_tasks, make_task, tasks_for_testing, training_task
from fla_train.tasks.formal import LANGUAGES, TRAIN_LENGTHS, FormalLanguage
from fla_train.tasks.group_words import GroupWords
from fla_train.tasks.groups import Group, make_group
from fla_train.tasks.mqar import MQAR, MQARSetting
from fla_train.tasks.score import Score
from fla_train.tasks.task import IGNORE, Batch, Tally, Task, tally_by

__all__ = [
    "IGNORE",
    "LANGUAGES",
    "MQAR",
    "TRAIN_LENGTHS",
    "Batch",
    "CodeTrace",
    "FormalLanguage",
    "Group",
    "GroupWords",
    "MQARSetting",
    "Score",
    "Tally",
    "Task",
    "TaskConfig",
    "curriculum_tasks",
    "make_group",
    "make_task",
    "tally_by",
    "tasks_for_testing",
    "training_task",
]
