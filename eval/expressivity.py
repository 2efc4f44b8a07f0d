"""`suite=expressivity`: accuracy on the synthetic task that a model was trained on."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedModel

import fla_train.models.auto  # noqa: F401  registers the models with the Auto classes
from fla_train.eval.config import EvalConfig, ExpressivityConfig
from fla_train.eval.run import check_request, output_folder, output_lock
from fla_train.eval.tables import markdown_table, number
from fla_train.hub.load import load_weights, resolve_checkpoint, training_record
from fla_train.hub.paths import own_name, run_folder
from fla_train.tasks import Score, Task, TaskConfig, make_task, tasks_for_testing
from fla_train.tasks.config import TEST_SEED, is_own, task_class
from fla_train.tasks.plots import plot_accuracy
from fla_train.utils.device import pick_device, pick_dtype
from fla_train.utils.environment import describe_environment
from fla_train.utils.ranks import world_size


def evaluate_expressivity(config: EvalConfig) -> tuple[Path, dict[str, Any]]:
    """Test the model on its task, and write results.json, table.md and accuracy.png.

    Returns:
        The evaluation's folder and the content of results.json.

    Raises:
        ValueError: no such checkpoint, it was not trained on a task, only the checkpoint names the task's
            class, or there are several processes.
    """
    check_request(config)
    if world_size() > 1:
        raise ValueError("suite=expressivity runs in one process: start it without torchrun")
    settings, started = config.suite.expressivity, time.time()
    source = resolve_checkpoint(config.checkpoint)
    device = pick_device(config.device)
    trust = {"mixer": config.mixer, "trust_remote_code": config.trust_remote_code}
    model = load_weights(source, device, pick_dtype(config.dtype), **trust)
    task = trained_task(model, source, settings.task, config.trust_remote_code)
    folder = output_folder(config, source)
    with output_lock(folder):
        tests = _tests(task, settings)
        scores = {name: _score(model, test, settings) for name, test in tests.items()}
        curves = {name: scores[name].curve(test) for name, test in tests.items()}
        plot_accuracy(curves, own_name(run_folder(source) or source), folder / "accuracy.png")
        record = {
            "checkpoint": str(source),
            "task": asdict(task),
            "model": model.config.to_dict() | {"class": type(model).__name__},
            "accuracy": {name: scores[name].scalars(test) for name, test in tests.items()},
            "chance": {
                name: test.against_chance(scores[name].tally.token_accuracy, settings.sequences)
                for name, test in tests.items()
            },
            "curves": curves,
            "environment": describe_environment(device),
            "seconds": round(time.time() - started, 1),
        }
        (folder / "results.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
        (folder / "table.md").write_text(_table(record))
    return folder, record


def trained_task(
    model: PreTrainedModel, source: Path | str, permitted: str | None, trust: bool = False
) -> TaskConfig:
    """Return the task that the export's training config names.

    Raises:
        ValueError: the model was not trained on a task, or the task is a Python class and the user neither
            names it (`permitted`) nor trusts the checkpoint.
    """
    text = training_record(model).get("config")
    node = OmegaConf.to_container(OmegaConf.create(text)).get("task") if text else None
    if node is None:
        raise ValueError(f"{source} was not trained on a task: train one with fla-train task=... first")
    task = TaskConfig(**node)
    if is_own(task.kind) and permitted != task.kind and not trust:
        raise ValueError(
            f"the task is the Python class {task.kind}, which is imported only if you also name it: set "
            f"suite.expressivity.task={task.kind}, or trust_remote_code=true"
        )
    return task


def _tests(task: TaskConfig, settings: ExpressivityConfig) -> dict[str, Task]:
    """Return the training's test sets, and those of the requested lengths."""
    tests = tasks_for_testing(task)
    if settings.lengths and task_class(task.kind).length_option != "length":
        raise ValueError(f"suite.expressivity.lengths must be empty: the task {task.kind} has no length")
    for length in settings.lengths:
        options = {**task.options, "length": length}
        tests[f"length_{length}"] = make_task(task.kind, options, seed=TEST_SEED)
    return tests


@torch.no_grad()
def _score(model: PreTrainedModel, task: Task, settings: ExpressivityConfig) -> Score:
    """Return the score on `settings.sequences` of the task."""
    total = None
    for start in range(0, settings.sequences, settings.batch_size):
        batch = task.batch(range(start, min(start + settings.batch_size, settings.sequences)))
        logits = model(input_ids=batch.input_ids.to(model.device), use_cache=False).logits
        score = Score.of(task, logits, batch)
        total = score if total is None else total + score
    return total


def _table(record: dict[str, Any]) -> str:
    rows = [
        (
            name,
            key.replace("_", " "),
            number(value),
            record["chance"][name] if key == "token_accuracy" else "",
        )
        for name, metrics in record["accuracy"].items()
        for key, value in metrics.items()
    ]
    table = markdown_table(pd.DataFrame(rows, columns=["test set", "metric", "value", "chance"]))
    return "\n".join([f"# {record['checkpoint']}", "", *table, ""])
