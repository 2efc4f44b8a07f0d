"""Scores of lm-eval's tasks and groups as plain numbers, with per-document scores and standard errors."""

import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.group import Group
from lm_eval.api.metrics import bits_per_byte, mean, nanmean, perplexity, weighted_perplexity
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

AGGREGATIONS: dict[Callable, str] = {  # that are sums over documents, or a function of one
    **dict.fromkeys((mean, nanmean, np.mean, statistics.mean, statistics.fmean), "mean"),
    **dict.fromkeys((perplexity, weighted_perplexity), "perplexity"),
    bits_per_byte: "bits_per_byte",
}


# Accuracies, of which guesses reach 1 of the choices, or nothing where an answer is free.
ACCURACIES = ("acc", "acc_norm", "acc_bytes", "exact_match", "contains", "em")


class LoadedTasks:
    """A task manager that keeps what it last loaded, `tasks` and `groups` by name."""

    def __init__(self, manager: TaskManager) -> None:
        self._manager = manager
        self.loaded: dict[str, dict] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def load(self, names: Sequence[str]) -> dict[str, dict]:
        found = self._manager.load(names)
        self.loaded = {kind: found[kind] for kind in ("tasks", "groups")}
        return found


def per_document_scores(
    aggregation: Callable | None, items: Sequence[object]
) -> tuple[list[float], float] | None:
    """Split a task's score over its documents.

    Their mean is the score, or its logarithm if it is a perplexity; their spread gives the standard error.
    Where documents weigh differently (a perplexity by words) they are linear: what the quotient of the sums
    would change by if a document were counted once more.

    Args:
        aggregation: of the metric, as the task's definition names it.
        items: of each document, as `aggregation` takes them: numbers, or pairs of a sum and its weight.

    Returns:
        The documents' scores, and the standard error of the task's; None for an aggregation that is no sum
        over documents, and where a value is not finite or there is only one document.
    """
    kind = AGGREGATIONS.get(aggregation)
    try:
        values = np.array(items, dtype=float)  # [D], or [D, 2] with weights
    except (TypeError, ValueError):
        return None
    if kind is None or len(values) < 2 or not np.isfinite(values).all():
        return None
    if values.ndim != 1:
        if kind == "mean" or values.shape[1:] != (2,) or not values[:, 1].sum():
            return None
        sums, weights = values.T
        average = sums.sum() / weights.sum()
        values = average + (sums - average * weights) / weights.mean()
    factor = {"mean": 1.0, "perplexity": -1.0, "bits_per_byte": -1 / math.log(2)}[kind]
    values = factor * values
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    if kind == "perplexity":
        error *= math.exp(min(float(values.mean()), 700.0))
    return values.tolist(), error


def task_scores(
    results: dict, tasks: Mapping[str, Task], groups: Mapping[str, Group], truncated: Mapping[str, int]
) -> dict[str, dict]:
    """Metrics of each task and group as plain numbers: `acc`, `acc_stderr`, ...

    Besides them `examples`, `num_fewshot`, `truncated` (examples whose prompt lost its beginning),
    `higher_is_better` (by metric, where the task's definition says so or the contrary), `by_document` (by
    metric what each document adds to it, see `per_document_scores`) and `fingerprint`, a sha256 over
    documents, prompts and targets; and `chance` (by accuracy what guesses score).

    Args:
        results: what `simple_evaluate` returned, with samples.
        tasks: by name.
        groups: by name; one without metrics is left out.
        truncated: by task how many examples.
    """
    found: dict[str, dict] = {}
    for name, task in tasks.items():
        found[name] = _of_task(results, name, task) | {"truncated": truncated.get(name, 0)}
    for name, group in groups.items():
        members = {task.task_name: task for task in group.get_all_tasks()}
        if any(True for _ in _metrics(results, name)):
            found[name] = _of_group(results, name, group, members, found)
    return found


def _metrics(results: dict, name: str) -> Iterator[tuple[str, str, str, float, float | None]]:
    """Of each metric our name, lm-eval's name, its filter, its value, and lm-eval's standard error if any."""
    entry = results["results"][name]
    for key, value in entry.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = entry.get(f"{metric}_stderr,{filtered}")
        label = metric + ("" if filtered == "none" else f"_{filtered}")
        yield label, metric, filtered, value, error if isinstance(error, int | float) else None


def _of_task(results: dict, name: str, task: Task) -> dict:
    scores, directions, shares, chance = {}, {}, {}, {}
    better = results["higher_is_better"].get(name) or {}
    # In the order of the data set, since ranks mix it.
    samples = sorted(results["samples"].get(name, ()), key=lambda sample: sample["doc_id"])
    for label, metric, filtered, value, error in _metrics(results, name):
        scores[label] = value
        if better.get(metric) is not None:
            directions[label] = bool(better[metric])
        items = [sample[metric] for sample in samples if sample["filter"] == filtered and metric in sample]
        # lm-eval takes the mean of a metric for which the task names no aggregation.
        if split := per_document_scores(task.aggregation().get(metric, mean), items):
            shares[label], own_error = split
            error = own_error if error is None else error
        if error is not None:
            scores[f"{label}_stderr"] = error
        if (guessed := _chance(metric, task, samples)) is not None:
            chance[label] = guessed
    hashes = sorted((s["doc_hash"], s["prompt_hash"], s["target_hash"]) for s in samples)
    return scores | {
        "examples": results["n-samples"].get(name, {}).get("effective", 0),
        "num_fewshot": results["n-shot"].get(name, 0),
        "higher_is_better": directions,
        "by_document": shares,
        "chance": chance,
        "fingerprint": hashlib.sha256(repr(hashes).encode()).hexdigest(),
    }


def _chance(metric: str, task: Task, samples: Sequence[dict]) -> float | None:
    """Return what guesses score; None where that is not known."""
    if metric not in ACCURACIES or not samples:
        return None
    if task.OUTPUT_TYPE != "multiple_choice":
        return 0.0
    several = any(isinstance(sample["target"], list) for sample in samples)
    if several or task.config.process_results or not metric.startswith("acc"):
        return None
    return statistics.fmean((1 + ("acc_mutual_info" in s)) / len(s["filtered_resps"]) for s in samples)


def _of_group(
    results: dict, name: str, group: Group, members: Mapping[str, Task], found: Mapping[str, dict]
) -> dict:
    parts = [found[member] for member in members]
    by_size = {config.metric: config.weight_by_size for config in group.aggregate_metric_list or ()}
    scores, directions, shares, chance = {}, {}, {}, {}
    for label, metric, _, value, error in _metrics(results, name):
        scores[label] = value
        holders = [member for member in members if label in found[member]]
        ways = {found[member]["higher_is_better"].get(label) for member in holders}
        if len(ways) == 1 and None not in ways:
            directions[label] = ways.pop()
        levels = {found[member].get("chance", {}).get(label) for member in holders}
        if len(levels) == 1 and None not in levels:
            chance[label] = levels.pop()
        means = all(
            AGGREGATIONS.get(task.aggregation().get(metric, mean)) == "mean"
            for member, task in members.items()
            if member in holders
        )
        split = [found[member]["by_document"].get(label) for member in holders]
        if means and all(split):
            shares[label] = _of_strata(value, split, by_size.get(metric, True))
            own_error = float(np.std(shares[label], ddof=1)) / math.sqrt(len(shares[label]))
            error = own_error if error is None else error
        if error is not None:
            scores[f"{label}_stderr"] = error
    prints = sorted(part["fingerprint"] for part in parts)
    shots = {part["num_fewshot"] for part in parts}
    return scores | {
        "examples": sum(part["examples"] for part in parts),
        "num_fewshot": shots.pop() if len(shots) == 1 else "varied",
        "truncated": sum(part["truncated"] for part in parts),
        "higher_is_better": directions,
        "by_document": shares,
        "chance": chance,
        "fingerprint": hashlib.sha256(repr(prints).encode()).hexdigest(),
    }


def _of_strata(value: float, split: Sequence[Sequence[float]], by_size: bool) -> list[float]:
    """What each document of several tasks adds to the mean over tasks.

    A document counts by its difference to its task's mean: the tasks are given, their documents a sample.
    """
    total = sum(map(len, split))
    found = []
    for scores in split:
        weight = 1.0 if by_size else total / (len(split) * len(scores))
        found += (value + weight * (np.array(scores) - np.mean(scores))).tolist()
    return found
