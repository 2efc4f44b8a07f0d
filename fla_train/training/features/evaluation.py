"""Validate during training: losses of held-out text, or accuracy on a task's test sets."""

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fla_train.data.open_dataset import open_validation
from fla_train.data.sampler import Batch, PackedDataset, sequential_batches
from fla_train.data.tokenizers import token_bytes
from fla_train.tasks.plots import plot_accuracy
from fla_train.tasks.registry import is_custom, tasks_for_testing
from fla_train.tasks.score import TaskScore
from fla_train.tasks.task import Task
from fla_train.training.callback import Callback
from fla_train.training.checkpoint import folder_name
from fla_train.training.config import named_classes
from fla_train.training.metrics import last_value, newest_validation
from fla_train.training.resume import has_reached
from fla_train.training.run_data import to_batch
from fla_train.utils.filesystem import reason, write_whole
from fla_train.utils.overrides import assign
from fla_train.utils.records import Record
from fla_train.utils.timeline import Timeline


class Evaluation(Callback):
    """Evaluate every `trainer.eval_every`-th step and the last one; record and log the result.

    Subclasses define `evaluate(step)`, which returns the record of a step, or None without data;
    `describe(record)`, its text for log and summary; and `commands()`, the words of commands that continue
    from here.
    """

    def due(self, step: int) -> bool:
        return self.trainer.is_due(self.trainer.config.trainer.eval_every)

    def between_steps(self, step: int) -> None:
        trainer = self.trainer
        trainer.timeline = Timeline()  # phases of the end of the run, if this is its last step
        trainer.watchdog.beat(f"evaluating after step {step}")
        record = self.evaluate(step)
        trainer.timeline.mark("validation")
        if record is None:
            return
        for feature in trainer.features:
            feature.after_evaluation(step, record)
        trainer.logger.record({"step": step, "tokens": trainer.state.tokens, **record})
        trainer.log(f"step {step:,}: {self.describe(record)}")

    def _beat(self, step: int, shape: Sequence[int]) -> None:
        self.trainer.watchdog.beat(f"evaluating after step {step}", ("evaluation", tuple(shape)))

    def summary(self) -> list[str]:
        folder, state = self.trainer.folder, self.trainer.state
        loss, newest = last_value(folder.metrics, "loss"), newest_validation(folder.metrics)
        facts = {
            "skipped steps": state.skipped_steps or None,
            "training loss": None if loss is None else f"{loss:.4f}",
            "evaluation": self.describe(newest) if newest.get("validation_loss") is not None else None,
            "metrics": folder.metrics,
            "plots": folder.loss_plot.parent,
            "checkpoint": folder.checkpoints / folder_name(state.step),
            "model": folder.export(state.step),
        }
        return [
            *("", f"Trained {state.step:,} steps, {state.tokens:,} tokens."),
            *(f"  {name:<17} {value}" for name, value in facts.items() if value is not None),
            "Next:",
            *(f"  {shlex.join(command)}" for command in self.commands()),
        ]

    def _naming(self) -> list[str]:
        """Return the option that permits a command to import a custom mixer; none for other mixers."""
        mixer = getattr(self.trainer.model.config, "mixer", None)
        return [] if mixer is None else [f"mixer={mixer}"]


class TextEvaluation(Evaluation):
    """Compute losses of held-out text, overall and for each corpus of a mixture."""

    def attach(self, trainer) -> None:
        super().attach(trainer)
        config, data = trainer.config, trainer.data
        self._corpora = dict(open_validation(data.folder, config.trainer.seq_len))
        if config.data.document_boundaries:
            self._corpora = {
                name: (PackedDataset(dataset), weight) for name, (dataset, weight) in self._corpora.items()
            }
        sizes = token_bytes(data.tokenizer()) if self._corpora else None
        self._token_sizes = None if sizes is None else torch.from_numpy(sizes).to(trainer.engine.device)

    def evaluate(self, step: int) -> Record | None:
        """Evaluate the first `trainer.eval_tokens` tokens, divided evenly among the corpora."""
        settings, mesh = self.trainer.config.trainer, self.trainer.mesh
        if not self._corpora:
            return None
        limit = max(1, settings.eval_tokens // len(self._corpora) // settings.seq_len)
        results = {}
        for name, (sequences, weight) in self._corpora.items():
            batches = sequential_batches(
                sequences, settings.micro_batch_size, limit=limit, rank=mesh.data_rank, world=mesh.data_world
            )
            result = evaluate(
                self.trainer.engine,
                self._on_device(batches, step),
                seq_len=settings.seq_len,
                buckets=settings.eval_buckets,
                token_sizes=self._token_sizes,
            )
            results[name] = result, weight
        return validation_record(results)

    def _on_device(self, batches: Iterable[Tensor | Batch], step: int) -> Iterator[Batch]:
        for item in batches:
            batch = to_batch(item, self.trainer.engine.device, self.trainer.mesh.context)
            self._beat(step, batch.input_ids.shape)
            yield batch

    def describe(self, record: Record) -> str:
        perplexities = [
            f"{key.removeprefix('validation_').replace('/', ' ')} {value:.2f}"
            for key, value in record.items()
            if key.startswith("validation_perplexity") and value is not None
        ]
        bits = record.get("validation_bits_per_byte")
        each = [] if bits is None else [f"{bits:.4f} bits per byte"]
        return ", ".join([f"validation loss {record['validation_loss']:.4f}", *perplexities, *each])

    def commands(self) -> list[list[str]]:
        folder, step = self.trainer.folder, self.trainer.state.step
        export = f"checkpoint={folder.export(step)}"
        longer = [f"run.dir={folder.root}", f"trainer.max_steps={2 * step}"]
        classes = named_classes(asdict(self.trainer.config))
        prompt = "def main(" if self.trainer.config.data.source == "stdlib" else "The"
        return [
            ["fla-generate", export, f"prompt={prompt}", *self._naming()],
            ["fla-eval", export, *self._naming()],
            ["fla-train", *longer, *(assign(*item) for item in classes.items())],
        ]


class TaskEvaluation(Evaluation):
    """Compute accuracy on each of a task's test sets. The run may end once `task.stop_at` is reached.

    Besides the records of metrics.jsonl, rank 0 keeps the newest curves (accuracy by prefix, length or number
    of pairs) in accuracy.json and draws them in plots/accuracy.png.
    """

    def attach(self, trainer) -> None:
        super().attach(trainer)
        self._config = trainer.config.task
        self._tests = tasks_for_testing(self._config)
        # The run may have been killed before it wrote all its files.
        self._look_at_target(trainer.state.step)

    def between_steps(self, step: int) -> None:
        super().between_steps(step)
        if self._look_at_target(step):
            self.trainer.log(f"step {step:,}: task.stop_at reached twice in a row; the run ends here")

    def evaluate(self, step: int) -> Record:
        scores = {name: self._score(task, step) for name, task in self._tests.items()}
        record: Record = {"validation_loss": next(iter(scores.values())).mean_loss}
        for name, task in self._tests.items():
            record |= {f"{name}/{key}": value for key, value in scores[name].scalars(task).items()}
        if self.trainer.rank == 0:
            folder = self.trainer.folder
            curves = {name: scores[name].curve(task) for name, task in self._tests.items()}
            try:
                write_whole(folder.accuracy, json.dumps({"step": step, "sets": curves}) + "\n")
                plot_accuracy(curves, f"{folder.name}, step {step:,}", folder.accuracy_plot)
            except OSError as error:
                self.trainer.log(f"step {step:,}: the curves could not be written ({reason(error)})")
        return record

    def describe(self, record: Record) -> str:
        results = []
        for name, task in self._tests.items():
            # A test set may be newer than the record.
            if (value := record.get(f"{name}/{task.headline}")) is not None:
                accuracy = record.get(f"{name}/token_accuracy", record.get(f"{name}/accuracy", 0.0))
                chance = task.against_chance(accuracy, self._config.test_sequences)
                results.append(f"{name} {value:.4f} {chance}".rstrip())
        metric = next(iter(self._tests.values())).headline.replace("_", " ")
        return f"{metric}: {', '.join(results)}"

    def _look_at_target(self, step: int) -> bool:
        """Return whether metrics.jsonl on rank 0 reaches the target, and end the run on all ranks if so."""
        target, folder = self._config.stop_at, self.trainer.folder
        if not target:
            return False
        answer = [self.trainer.rank == 0 and has_reached(target, folder, step)]
        dist.broadcast_object_list(answer)
        self.trainer.reached |= answer[0]
        return answer[0]

    @torch.no_grad()
    def _score(self, task: Task, step: int) -> TaskScore:
        """Return the score of all ranks' test sequences, on every rank."""
        config, engine = self._config, self.trainer.engine
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = np.arange(rank, config.test_sequences, world)
        scores = []
        engine.eval()
        for rows in np.split(mine, range(config.test_batch_size, len(mine), config.test_batch_size)):
            batch = task.batch(rows)
            self._beat(step, batch.input_ids.shape)
            logits = engine(input_ids=batch.input_ids.to(engine.device), use_cache=False).logits
            scores.append(TaskScore.of(task, logits, batch))
        engine.train()
        everyone: list[TaskScore | None] = [None] * world
        dist.all_gather_object(everyone, reduce(add, scores))
        return reduce(add, everyone)

    def commands(self) -> list[list[str]]:
        kind, checkpoint = self._config.kind, f"checkpoint={self.trainer.folder.root}"
        option = [f"suite.expressivity.task={kind}"] if is_custom(kind) else []
        return [["fla-eval", checkpoint, "suite=expressivity", *self._naming(), *option]]


@torch.no_grad()
def evaluate(
    engine, batches: Iterable[Batch], *, seq_len: int, buckets: int, token_sizes: Tensor | None = None
) -> dict[str, float]:
    """Evaluate this rank's batches on the engine's device. Ranks may have different numbers of batches.

    Args:
        seq_len: T, the longest context + 1.
        buckets: number of equal ranges into which contexts [1, T) are divided; at most T - 1.
        token_sizes: bytes of each token id, [ids] int64 on the engine's device; None: unknown.

    Returns:
        loss: mean in nats per target token over all ranks.
        bits_per_byte: bits per byte of the targets' text, if its bytes are known.
        loss_at/FIRST-LAST: with several buckets, mean over the targets that follow FIRST to LAST tokens of
            their row or document. A bucket without targets is left out.
    """
    buckets = min(buckets, seq_len - 1)
    device = engine.device
    sums = torch.zeros(3, buckets, device=device, dtype=torch.float64)  # losses, targets, bytes
    engine.eval()
    for batch in batches:
        with torch.autocast(
            device.type, engine.torch_autocast_dtype(), enabled=engine.torch_autocast_enabled()
        ):
            options = {"cu_seqlens": batch.cu_seqlens}
            if batch.context_part is not None:
                options |= {"shift_labels": batch.shift_labels, "context_part": batch.context_part}
            losses = engine.module.token_losses(batch.input_ids, **options)  # losses of `batch.targets()`
        target = batch.targets() != -100
        bucket = (_context(batch) * buckets // seq_len).expand_as(losses)[target]
        sums[0].index_add_(0, bucket, losses[target].double())
        sums[1].index_add_(0, bucket, torch.ones_like(bucket, dtype=torch.float64))
        if token_sizes is not None:
            sums[2].index_add_(0, bucket, token_sizes[batch.targets()[target]].double())
    engine.train()
    dist.all_reduce(sums)
    (total, targets, sizes), result = sums.tolist(), {}
    result["loss"] = sum(total) / max(1.0, sum(targets))
    if any(sizes):
        result["bits_per_byte"] = sum(total) / math.log(2) / sum(sizes)
    names = bucket_names(seq_len, buckets) if buckets > 1 else ()
    return result | {f"loss_at/{name}": total[i] / targets[i] for i, name in enumerate(names) if targets[i]}


def validation_record(corpora: Mapping[str, tuple[Mapping[str, float], float]]) -> Record:
    """Return the weighted mean of `evaluate` over a mixture's corpora, and the results of each.

    Args:
        corpora: name ("" without a mixture) -> result of `evaluate` and weight.
    """

    def mean(key: str) -> float:
        known = [(result[key], weight) for result, weight in corpora.values() if key in result]
        return sum(value * weight for value, weight in known) / sum(weight for _, weight in known)

    keys = dict.fromkeys(key for result, _ in corpora.values() for key in result)
    record: Record = {f"validation_{key}": mean(key) for key in keys}
    record["validation_perplexity"] = perplexity(record["validation_loss"])
    for name, (result, _) in corpora.items():
        if name:
            values = result | {"perplexity": perplexity(result["loss"])}
            shown = {key: value for key, value in values.items() if not key.startswith("loss_at/")}
            record |= {f"validation_{key}/{name}": value for key, value in shown.items()}
    return record


def perplexity(loss: float) -> float:
    return math.inf if loss > 700 else math.exp(loss)  # NaN stays NaN


def bucket_names(seq_len: int, buckets: int) -> list[str]:
    """Return the contexts of each bucket, such as `1-255`: context c is in bucket floor(c buckets / T)."""
    firsts = [max(1, -(-i * seq_len // buckets)) for i in range(buckets + 1)]
    return [f"{first}-{after - 1}" for first, after in pairwise(firsts)]


def _context(batch: Batch) -> Tensor:
    """Return the number of tokens of the row or document before each target, int64 [1, T - 1] or [1, T]."""
    count = batch.targets().shape[1]
    before = 0 if batch.context_part is None else batch.context_part.start(count)
    positions = torch.arange(before + 1, before + 1 + count, device=batch.input_ids.device)
    if batch.cu_seqlens is None:
        return positions[None]
    bounds = batch.cu_seqlens.to(positions)
    return (positions - bounds[torch.searchsorted(bounds, positions, right=True) - 1])[None]
