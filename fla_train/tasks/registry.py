"""Table of the tasks by name (`KINDS`); make the tasks of a `TaskConfig`, and check it.

The options of a task come untyped from YAML. They are checked against the signature of the task's class, so
that an error names the option instead of failing somewhere in numpy.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

from fla_train.tasks.code_trace import CodeTrace
from fla_train.tasks.contract import check_contract
from fla_train.tasks.formal import FormalLanguage
from fla_train.tasks.group_words import GroupWords
from fla_train.tasks.mad import Compression, FuzzyRecall, InContextRecall, Memorization, SelectiveCopying
from fla_train.tasks.mqar import MQAR
from fla_train.tasks.regbench import RegBench
from fla_train.tasks.score import TaskScore
from fla_train.tasks.task import Tally, Task
from fla_train.utils.errors import described
from fla_train.utils.import_class import import_class
from fla_train.utils.keys import fits, type_errors

if TYPE_CHECKING:  # its `check` imports this module
    from fla_train.tasks.config import TaskConfig

TEST_SEED = -1  # test sets are the same for all runs, and no training seed is negative


KINDS: dict[str, type[Task]] = {
    "group_words": GroupWords,
    "formal_language": FormalLanguage,
    "code_trace": CodeTrace,
    "mqar": MQAR,
    "in_context_recall": InContextRecall,
    "fuzzy_recall": FuzzyRecall,
    "selective_copying": SelectiveCopying,
    "compression": Compression,
    "memorization": Memorization,
    "regbench": RegBench,
}


def is_custom(kind: str) -> bool:
    """Return whether `kind` is the import path of a custom class, `package.module:Class`."""
    return ":" in kind


def task_class(kind: str) -> type[Task]:
    """Return the class of a kind of task.

    Raises:
        ValueError: the kind does not exist, or the class can't be used.
    """
    if is_custom(kind):
        return import_class(kind, Task, "fla_train.tasks.task.Task")
    if kind not in KINDS:
        raise ValueError(f"unknown task '{kind}'; choose one of {', '.join(KINDS)}, or package.module:Class")
    return KINDS[kind]


def make_task(
    kind: str, options: Mapping[str, Any], *, seed: int = 0, num_sequences: int | None = None
) -> Task:
    """Make the task of `task_class(kind)` with `options`.

    Raises:
        ValueError: the kind or an option is unknown, an option is missing, or it gives no task.
    """
    cls = task_class(kind)
    if errors := [*_option_errors(kind, options)]:
        raise ValueError("; ".join(errors))
    try:
        return cls(**options, seed=seed, num_sequences=num_sequences)
    except Exception as error:
        if isinstance(error, ValueError) or not is_custom(kind):
            raise
        raise ValueError(f"{kind}: its constructor raised {described(error)}") from error


def task_errors(config: "TaskConfig") -> Iterator[str]:
    """Yield the errors of a task's config, whose keys are within their limits."""
    try:
        task_class(config.kind)
    except ValueError as error:
        yield f"kind: {error}"
        return
    sets = {"train": config.train} | {f"tests.{name}": options for name, options in config.tests.items()}
    failed: dict[str, list[str]] = {}  # Test sets repeat the training set's errors: name each once.
    sizes = {}
    for name, options in sets.items():
        try:
            task = make_task(config.kind, {**config.options, **options})
            if is_custom(config.kind):
                check_contract(config.kind, task)
            sizes[name] = task.vocab_size
        except ValueError as error:
            failed.setdefault(str(error), []).append(name)
    yield from (f"{', '.join(names)}: {error}" for error, names in failed.items())
    if len(set(sizes.values())) > 1:
        yield f"tests: all sets must have one vocabulary, these have {sizes}"
    if not failed:
        yield from _curriculum_errors(config)
        yield from _target_errors(config)


def _option_errors(kind: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield errors for unknown and missing options, and for values of other types than the class declares."""
    parameters = inspect.signature(task_class(kind)).parameters
    # Every task has these two. `make_task` sets them.
    others = {name: p for name, p in parameters.items() if name not in ("seed", "num_sequences")}
    known = {name: p for name, p in others.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if unknown := sorted(set(options) - set(known)):
        yield f"{kind} has no option {', '.join(unknown)}; it has {', '.join(known)}"
    for name, option in known.items():
        if option.default is option.empty and options.get(name) is None:
            yield f"{kind} needs {name}"
        elif name in options and (not is_custom(kind) or _in_yaml(option.annotation)):
            yield from type_errors(name, options[name], option.annotation)


def training_task(config: "TaskConfig", seed: int) -> Task:
    """Make the training set: endless, or of `train_sequences`."""
    options = {**config.options, **config.train}
    return make_task(config.kind, options, seed=seed, num_sequences=config.train_sequences)


def curriculum_tasks(config: "TaskConfig", seed: int) -> list[tuple[Task, int]]:
    """Make the training sets of the curriculum, each with its number of steps."""
    return [(_stage_task(config, seed, stage), stage[1]) for stage in config.curriculum]


def _stage_task(config: "TaskConfig", seed: int, stage: list[Any]) -> Task:
    length, _, *more = stage
    options = {task_class(config.kind).length_option: length, **(more[0] if more else {})}
    return training_task(replace(config, train={**config.train, **options}), seed)


def tasks_for_testing(config: "TaskConfig") -> dict[str, Task]:
    """Make the test sets, by name."""
    sets = {name: {**config.options, **options} for name, options in config.tests.items()}
    return {name: make_task(config.kind, options, seed=TEST_SEED) for name, options in sets.items()}


def _curriculum_errors(config: "TaskConfig") -> Iterator[str]:
    """Yield the errors of stages: a wrong form, no task, longer sequences, or another vocabulary."""
    if config.curriculum and task_class(config.kind).length_option is None:
        yield f"curriculum needs sequences of several lengths: {config.kind} has one length"
        return
    whole = training_task(config, 0)
    for stage in config.curriculum:
        if not (fits(stage, tuple[int, int] | tuple[int, int, dict]) and min(stage[:2]) > 0):
            yield f"curriculum: {stage} must be [tokens, steps] or [tokens, steps, {{option: value}}], from 1"
            continue
        try:
            early = _stage_task(config, 0, stage)
        except ValueError as error:
            yield f"curriculum: {stage}: {error}"
            continue
        if early.seq_len > whole.seq_len:
            yield f"curriculum: {stage} is longer than the sequences of the training set"
        if early.vocab_size != whole.vocab_size:
            yield f"curriculum: {stage} has another vocabulary than the training set"


def _target_errors(config: "TaskConfig") -> Iterator[str]:
    """Yield the entries of `stop_at` that name no metric of a test set."""
    if not config.stop_at:
        return
    known = []
    for name, task in tasks_for_testing(config).items():
        labels = task.batch([0]).labels
        known += [f"{name}/{metric}" for metric in TaskScore(0.0, Tally.of(labels, labels), {}).scalars(task)]
    for target in config.stop_at:
        if not (fits(target, tuple[str, float]) and target[0] in known):
            yield f"stop_at: {target} must be [metric, value] with one of the metrics {', '.join(known)}"


def _in_yaml(annotation: Any) -> bool:
    """Return whether `fits` can tell the type's values. Others are left to the task's class."""
    types = get_args(annotation)
    return all(map(_in_yaml, types)) if types else annotation in (bool, int, float, str, NoneType)
