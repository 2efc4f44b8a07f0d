"""`suite.expressivity`: accuracy on the synthetic task that a model was trained on."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial, reduce
from operator import add
from pathlib import Path

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from transformers import PreTrainedModel

import fla_train.models.auto  # noqa: F401  registers the models with the Auto classes
from fla_train.eval.config import ExpressivityConfig
from fla_train.eval.result import Measurements, Score
from fla_train.eval.result_cache import EvalJob, describe_code
from fla_train.eval.session import Session
from fla_train.hub.card import recorded_config
from fla_train.hub.load import training_record
from fla_train.hub.saved_config import escaped
from fla_train.tasks.config import TaskConfig
from fla_train.tasks.registry import TEST_SEED, is_custom, make_task, task_class, tasks_for_testing
from fla_train.tasks.score import TaskScore
from fla_train.tasks.task import Task


def expressivity_jobs(session: Session, config: ExpressivityConfig, trained: TaskConfig) -> Iterator[EvalJob]:
    """Yield a job for each test set of the task that was trained, and for each of `config.lengths`.

    Raises:
        ValueError: the task has no length.
    """
    for name, test in _tests(trained, config).items():
        request = asdict(config) | {"trained": asdict(trained), "code": describe_code(type(test))}
        yield EvalJob("expressivity", name, request, partial(_measure, session, config, trained, name, test))


def trained_task(
    model: PreTrainedModel, source: Path | str, permitted: str | None, trust: bool = False
) -> TaskConfig:
    """Return the task that the export's training config names.

    Raises:
        ValueError: the model was not trained on a task, the task's config is of another version, or the task
            is a Python class and the user neither names it (`permitted`) nor trusts the checkpoint.
    """
    node = recorded_config(training_record(model)).get("task")
    if node is None:
        raise ValueError(f"{source} was not trained on a task: train one with fla-train task=... first")
    try:
        task = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TaskConfig), escaped(node)))
    except OmegaConfBaseException as error:
        raise ValueError(f"{source}/training.json: task.{error.full_key}: {error.msg}") from error
    if is_custom(task.kind) and permitted != task.kind and not trust:
        raise ValueError(f"add suite.expressivity.task={task.kind}: it is code, which a file may not choose")
    return task


def _tests(task: TaskConfig, config: ExpressivityConfig) -> dict[str, Task]:
    """Return the training's test sets, and those of the requested lengths."""
    tests = tasks_for_testing(task)
    if config.lengths and task_class(task.kind).length_option != "length":
        raise ValueError(f"suite.expressivity.lengths: the length_option of task {task.kind} is not 'length'")
    for length in config.lengths:
        options = {**task.options, "length": length}
        tests[f"length_{length}"] = make_task(task.kind, options, seed=TEST_SEED)
    return tests


@torch.no_grad()
def _measure(
    session: Session, config: ExpressivityConfig, trained: TaskConfig, name: str, task: Task
) -> Measurements:
    model, ranks = session.model, session.ranks
    scores = []
    starts = range(0, config.sequences, config.batch_size)[ranks.rank :: ranks.world]
    for start in tqdm(starts, desc=name, disable=not session.progress):
        batch = task.batch(range(start, min(start + config.batch_size, config.sequences)))
        logits = model(input_ids=batch.input_ids.to(model.device), use_cache=False).logits
        scores.append(TaskScore.of(task, logits, batch))
    total = reduce(add, [score for of_rank in ranks.gather(scores) for score in of_rank])
    # The settings of training do not change the test set.
    fingerprint = repr((trained.kind, trained.options, trained.tests.get(name), name, config.sequences))
    measured = Measurements(accuracy={name: total.curve(task)})
    for metric, value in total.scalars(task).items():
        facts = {"documents": config.sequences, "higher_is_better": True, "fingerprint": fingerprint}
        chance = task.chance if metric == "token_accuracy" else None
        measured.scores.append(Score("expressivity", name, metric, value, chance=chance, **facts))
    measured.notes.append(f"Task {trained.kind}, {trained.options}, trained on {trained.train}.")
    return measured
