"""Synthetic tasks of the papers: state tracking, formal languages, recall. Sequences by seed and index.

The names of `API` are imported on first use, because all but `TaskConfig` import torch.
"""

from importlib import import_module

API = {  # name: module
    "TaskConfig": "settings",
    **dict.fromkeys(("curriculum_tasks", "make_task", "tasks_for_testing", "training_task"), "config"),
    "Score": "score",
    **dict.fromkeys(("IGNORE", "Batch", "Tally", "Task", "tally_by"), "task"),
}


def __getattr__(name: str) -> object:
    if name not in API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{API[name]}"), name)
