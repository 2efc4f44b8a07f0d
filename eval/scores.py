"""Scores of lm-eval's tasks and groups, with contributions of documents, standard errors and chance."""

import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from lm_eval.api.group import Group
from lm_eval.api.metrics import bits_per_byte, mean, nanmean, perplexity, weighted_perplexity
from lm_eval.api.task import Task

from fla_train.eval import intervals
from fla_train.eval.result import Score

# Aggregations that are sums over documents, or functions of one.
AGGREGATIONS: dict[Callable, str] = {
    **dict.fromkeys((mean, nanmean, np.mean, statistics.mean, statistics.fmean), "mean"),
    **dict.fromkeys((perplexity, weighted_perplexity), "perplexity"),
    bits_per_byte: "bits_per_byte",
}
ACCURACIES = ("acc", "acc_norm", "acc_bytes", "exact_match", "contains", "em")


def per_document_scores(
    aggregation: Callable | None, items: Sequence[object]
) -> tuple[list[float], float] | None:
    """Split a task's score over its documents.

    The mean of the parts is the score, or its logarithm for a perplexity. If documents have weights (a
    perplexity by words), a document's part is the linear change of the quotient if it counted once more.

    Args:
        aggregation: of the metric, as the task's definition names it.
        items: the input of `aggregation` for each document: a number, or a sum and its weight.

    Returns:
        The documents' parts and the standard error of the score. None for an aggregation that is not a sum
        over documents, for values that are not finite, and for a single document.
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
    values = {"mean": 1.0, "perplexity": -1.0, "bits_per_byte": -1 / math.log(2)}[kind] * values
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    if kind == "perplexity":
        error *= intervals.perplexity(float(values.mean()))
    return values.tolist(), error


def task_scores(results: dict, tasks: Mapping[str, Task], groups: Mapping[str, Group]) -> list[Score]:
    """Return a score for each metric of each task and group.

    Args:
        results: what `simple_evaluate` returned, with samples.
        tasks: by name.
        groups: by name.
    """
    by_name = {name: list(_of_task(results, name, task)) for name, task in tasks.items()}
    for name, group in groups.items():
        members = {task.task_name: task for task in group.get_all_tasks()}
        by_name[name] = list(_of_group(results, name, group, members, by_name))
    return [score for scores in by_name.values() for score in scores]


def _metrics(results: dict, name: str) -> Iterator[tuple[str, str, str, float, float | None]]:
    """Yield for each metric our name, lm-eval's name, its filter, the value, and lm-eval's standard error."""
    entry = results["results"][name]
    for key, value in entry.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = entry.get(f"{metric}_stderr,{filtered}")
        label = metric + ("" if filtered == "none" else f"_{filtered}")
        yield label, metric, filtered, value, error if isinstance(error, int | float) else None


def _of_task(results: dict, name: str, task: Task) -> Iterator[Score]:
    """Yield a score for each metric of a task, with the contributions of its documents."""
    better = results["higher_is_better"].get(name) or {}
    # Ranks return the samples in another order than that of the data set.
    samples = sorted(results["samples"].get(name, ()), key=lambda sample: sample["doc_id"])
    hashes = sorted((s["doc_hash"], s["prompt_hash"], s["target_hash"]) for s in samples)
    for label, metric, filtered, value, error in _metrics(results, name):
        items = [sample[metric] for sample in samples if sample["filter"] == filtered and metric in sample]
        # The default aggregation of lm-eval is the mean.
        aggregation = task.aggregation().get(metric, mean)
        contributions, computed_error = per_document_scores(aggregation, items) or ([], None)
        yield Score(
            "tasks",
            name,
            label,
            value,
            stderr=computed_error if error is None else error,
            documents=results["n-samples"].get(name, {}).get("effective", 0),
            higher_is_better=None if better.get(metric) is None else bool(better[metric]),
            chance=_chance(metric, task, samples),
            fingerprint=hashlib.sha256(repr(hashes).encode()).hexdigest(),
            by_document=contributions,
        )


def _chance(metric: str, task: Task, samples: Sequence[dict]) -> float | None:
    """Return the expected accuracy of guesses: 1 / choices, 0 for free answers, None if unknown."""
    if metric not in ACCURACIES or not samples:
        return None
    if task.OUTPUT_TYPE != "multiple_choice":
        return 0.0
    several = any(isinstance(sample["target"], list) for sample in samples)
    if several or task.config.process_results or not metric.startswith("acc"):
        return None
    return statistics.fmean((1 + ("acc_mutual_info" in s)) / len(s["filtered_resps"]) for s in samples)


def _of_group(
    results: dict, name: str, group: Group, members: Mapping[str, Task], by_name: Mapping[str, list[Score]]
) -> Iterator[Score]:
    by_size = {config.metric: config.weight_by_size for config in group.aggregate_metric_list or ()}
    for label, metric, _, value, error in _metrics(results, name):
        scores = [score for member in members for score in by_name[member] if score.metric == label]
        aggregations = [members[score.data].aggregation().get(metric, mean) for score in scores]
        means = all(AGGREGATIONS.get(aggregation) == "mean" for aggregation in aggregations)
        contributions: list[float] = []
        if scores and means and all(score.by_document for score in scores):
            contributions = _of_strata(value, [s.by_document for s in scores], by_size.get(metric, True))
            error = error or float(np.std(contributions, ddof=1)) / math.sqrt(len(contributions))
        prints = sorted(score.fingerprint for score in scores)
        directions, chances = ({getattr(s, k) for s in scores} for k in ("higher_is_better", "chance"))
        yield Score(
            "tasks",
            name,
            label,
            value,
            stderr=error,
            documents=sum(score.documents for score in scores),
            higher_is_better=directions.pop() if len(directions) == 1 else None,
            chance=chances.pop() if len(chances) == 1 else None,
            fingerprint=hashlib.sha256(repr(prints).encode()).hexdigest(),
            by_document=contributions,
        )


def _of_strata(value: float, split: Sequence[Sequence[float]], by_size: bool) -> list[float]:
    """Return the contribution of each document of several tasks to the mean over the tasks.

    A document counts by its difference from the mean of its task, since the tasks are fixed and the documents
    are a sample.
    """
    total = sum(map(len, split))
    contributions = []
    for scores in split:
        weight = 1.0 if by_size else total / (len(split) * len(scores))
        contributions += (value + weight * (np.array(scores) - np.mean(scores))).tolist()
    return contributions
