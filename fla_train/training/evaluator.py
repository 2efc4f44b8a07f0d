"""Evaluation during training: held-out losses of text, accuracy on a task's test sets, and `fla-eval` suites.

`make_evaluator` gives the trainer a `TextEvaluator` or a `TaskEvaluator`. `SuiteRuns` evaluates exports
beside training.
"""

import json
import math
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fla_train.data.cache import PreparedData
from fla_train.data.dataset import TokenDataset
from fla_train.data.open_dataset import open_validation
from fla_train.data.sampler import Batch, PackedDataset, sequential_batches
from fla_train.data.tokenizers import token_bytes
from fla_train.hub.saved_config import as_values, assign
from fla_train.tasks import Score, Task, tasks_for_testing
from fla_train.tasks.config import is_own
from fla_train.tasks.plots import plot_accuracy
from fla_train.training.checkpoint import TrainState, folder_name
from fla_train.training.config import TrainConfig
from fla_train.training.metrics import checkpoint_seconds, last_value
from fla_train.training.process_group import RankMesh
from fla_train.training.resume import has_reached
from fla_train.training.run_data import to_batch
from fla_train.training.run_folder import RunFolder
from fla_train.utils.filesystem import reason, write_whole
from fla_train.utils.processes import POLL, start_command
from fla_train.utils.records import Record, read_metrics
from fla_train.utils.safe_files import read_json

PART_PERPLEXITY = "validation_perplexity/"  # key of a part's, before its name
Beat = Callable[..., None]  # `Watchdog.beat`
Part = tuple[TokenDataset | PackedDataset, float]  # held-out sequences and their weight


class Evaluator(Protocol):
    """Validation of the model that trains. All ranks call all of it."""

    def evaluate(self, step: int) -> tuple[Record, str] | None:
        """What to record of `step`, and a line for a reader; None: there is nothing to evaluate on."""

    def has_reached(self, step: int) -> bool:
        """Whether the run has reached its target by `step`, so that it ends there."""

    def summary(self, state: TrainState, export: Path) -> list[str]:
        """The end of the run, for a reader."""


def make_evaluator(
    config: TrainConfig, data: PreparedData, folder: RunFolder, engine, mesh: RankMesh, beat: Beat
) -> Evaluator:
    """The evaluator of a run on text, or on a task.

    Args:
        mesh: which of the sequences this rank reads.
        beat: called for each batch, which is progress.

    Raises:
        ValueError: a manifest is corrupt, or a shard of the validation split is missing or cut short.
    """
    if config.task is not None:
        return TaskEvaluator(config, data, folder, engine, beat)
    return TextEvaluator(config, data, folder, engine, mesh, beat)


class TextEvaluator:
    """Losses of held-out text, of all of it and of each part of a mixture. See `make_evaluator`."""

    def __init__(
        self, config: TrainConfig, data: PreparedData, folder: RunFolder, engine, mesh: RankMesh, beat: Beat
    ):
        self._trainer, self._folder, self._engine, self._beat = config.trainer, folder, engine, beat
        self._mesh = mesh
        self._unigram_entropy = data.manifest["splits"]["validation"]["unigram_entropy"]
        self._parts: dict[str, Part] = dict(open_validation(data.folder, config.trainer.seq_len))
        if config.data.document_boundaries:
            self._parts = {name: (PackedDataset(part), w) for name, (part, w) in self._parts.items()}
        sizes = token_bytes(data.tokenizer()) if self._parts else None
        self._token_sizes = None if sizes is None else torch.from_numpy(sizes).to(engine.device)

    def evaluate(self, step: int) -> tuple[Record, str] | None:
        """Evaluate the first `trainer.eval_tokens` tokens, shared out evenly among the parts."""
        trainer, mesh = self._trainer, self._mesh
        if not self._parts:
            return None
        limit = max(1, trainer.eval_tokens // len(self._parts) // trainer.seq_len)
        found = {}
        for name, (sequences, weight) in self._parts.items():
            read = sequential_batches(
                sequences, trainer.micro_batch_size, limit=limit, rank=mesh.data_rank, world=mesh.data_world
            )
            result = evaluate(
                self._engine,
                self._batches(read, step),
                seq_len=trainer.seq_len,
                buckets=trainer.eval_buckets,
                token_sizes=self._token_sizes,
            )
            found[name] = result, weight
        record = _text_record(found)
        if trainer.eval_buckets > 1:
            by_context = weighted(list(found.values())).by_context
            record |= {f"validation_loss_at/{key}": loss for key, loss in by_context.items()}
        return record, _text_line(record)

    def _batches(self, read: Iterable[Tensor | Batch], step: int) -> Iterator[Batch]:
        for item in read:
            batch = to_batch(item, self._engine.device, self._mesh.context)
            self._beat(f"evaluating after step {step}", ("evaluation", batch.input_ids.shape))
            yield batch

    def has_reached(self, step: int) -> bool:
        return False

    def summary(self, state: TrainState, export: Path) -> list[str]:
        folder, metrics = self._folder, self._folder.metrics
        train, validation = last_value(metrics, "loss"), last_value(metrics, "validation_loss")
        lines = ["", f"Trained {state.step:,} steps, {state.tokens:,} tokens."]
        if state.skipped_steps:
            lines.append(f"  skipped steps     {state.skipped_steps}")
        if train is not None:
            lines.append(f"  training loss     {train:.4f}")
        if validation is not None:
            bits = _bits(last_value(metrics, "validation_bits_per_byte"))
            lines.append(
                f"  validation loss   {validation:.4f}, perplexity {perplexity(validation):.2f}{bits}"
            )
        if self._unigram_entropy is not None:
            entropy = f"{self._unigram_entropy:.4f}"
            lines.append(f"  unigram entropy   {entropy} (of the validation split's own token frequencies)")
        stalled, trained = checkpoint_seconds(metrics)
        if trained:
            lines.append(
                f"  time              {trained:.0f} s; {stalled / trained:.2%} more waited for checkpoints"
            )
        return [
            *lines,
            f"  metrics           {metrics}",
            f"  loss curve        {folder.loss_plot}",
            f"  checkpoint        {folder.checkpoints / folder_name(state.step)}",
            f"  model             {export}",
            "Next:",
            f"  fla-generate {_option('checkpoint', export)} prompt='def main('{_naming(self._engine)}",
            f"  fla-eval {_option('checkpoint', export)}{_naming(self._engine)}",
            f"  fla-train {_option('run.dir', folder.root)} trainer.max_steps={2 * state.step}"
            + _naming(self._engine, "model.mixer"),
        ]


class TaskEvaluator:
    """Accuracy on each of a task's test sets. See `make_evaluator`.

    Besides the records of metrics.jsonl, rank 0 keeps the newest curves (accuracy by prefix, length or number
    of pairs) in accuracy.json and draws them in plots/accuracy.png.
    """

    def __init__(self, config: TrainConfig, data: PreparedData, folder: RunFolder, engine, beat: Beat):
        assert config.task is not None
        self._config, self._folder, self._engine, self._beat = config.task, folder, engine, beat
        self._tests = tasks_for_testing(config.task)
        self._kind = config.task.kind

    def evaluate(self, step: int) -> tuple[Record, str]:
        scores = {name: self._score(task, step) for name, task in self._tests.items()}
        record: Record = {"validation_loss": next(iter(scores.values())).mean_loss}
        for name, task in self._tests.items():
            record |= {f"{name}/{key}": value for key, value in scores[name].scalars(task).items()}
        metric = next(iter(self._tests.values())).headline.replace("_", " ")
        shown = [f"{name} {record[f'{name}/{task.headline}']:.4f}" for name, task in self._tests.items()]
        line = f"{metric}: {', '.join(shown)}"
        if dist.get_rank() == 0:
            curves = {name: scores[name].curve(task) for name, task in self._tests.items()}
            try:
                write_whole(self._folder.accuracy, json.dumps({"step": step, "sets": curves}) + "\n")
                plot_accuracy(curves, f"{self._folder.name}, step {step:,}", self._folder.accuracy_plot)
            except OSError as error:
                line += f"; the curves could not be written ({reason(error)})"
        return record, line

    def has_reached(self, step: int) -> bool:
        """Rank 0's reading of metrics.jsonl, on all ranks."""
        answer = [dist.get_rank() == 0 and has_reached(self._config, self._folder, step)]
        if self._config.stop_at:
            dist.broadcast_object_list(answer)
        return answer[0]

    @torch.no_grad()
    def _score(self, task: Task, step: int) -> Score:
        """The score of all ranks' test sequences; every rank gets it."""
        config, rank, world = self._config, dist.get_rank(), dist.get_world_size()
        mine = np.arange(rank, config.test_sequences, world)
        scores = []
        self._engine.eval()
        for rows in np.split(mine, range(config.test_batch_size, len(mine), config.test_batch_size)):
            batch = task.batch(rows)
            self._beat(f"evaluating after step {step}", ("evaluation", batch.input_ids.shape))
            logits = self._engine(input_ids=batch.input_ids.to(self._engine.device), use_cache=False).logits
            scores.append(Score.of(task, logits, batch))
        self._engine.train()
        everyone: list[Score | None] = [None] * world
        dist.all_gather_object(everyone, reduce(add, scores))
        return reduce(add, everyone)

    def _of_test(self, name: str, record: Record) -> str:
        """A test set's line of the summary."""
        found = {key.partition("/")[2]: v for key, v in record.items() if key.startswith(f"{name}/")}
        shown = [f"{key.replace('_', ' ')} {v:.4f}" for key, v in found.items() if "prefix" not in key]
        accuracy = found.get("token_accuracy", found.get("accuracy", 0.0))
        chance = self._tests[name].against_chance(accuracy, self._config.test_sequences)
        return f"  {name:<18}{', '.join(shown)} {chance}".rstrip()

    def summary(self, state: TrainState, export: Path) -> list[str]:
        folder = self._folder
        records = read_metrics(folder.metrics)
        newest = next((r for r in reversed(records) if "validation_loss" in r), {})
        return [
            *("", f"Trained {state.step:,} steps, {state.sequences:,} sequences."),
            *(self._of_test(name, newest) for name in self._tests),
            f"  metrics           {folder.metrics}",
            f"  accuracy curves   {folder.accuracy_plot}",
            f"  checkpoint        {folder.checkpoints / folder_name(state.step)}",
            f"  model             {export}",
            "Next:",
            f"  fla-eval {_option('checkpoint', folder.root)} suite=expressivity{_naming(self._engine)}"
            + (f" suite.expressivity.task={self._kind}" if is_own(self._kind) else ""),
        ]


def _option(key: str, path: Path) -> str:
    """Return the option that gives a key this path, as a shell reads it; keys of text take it as written."""
    return shlex.quote(f"{key}={path}")


def _naming(engine, key: str = "mixer") -> str:
    """What a command adds to permit the import of the user's own mixer; empty without one."""
    mixer = getattr(engine.module.config, "mixer", None)
    return "" if mixer is None else f" {key}={mixer}"


@dataclass(frozen=True)
class Evaluation:
    """Mean losses in nats per target token over all ranks.

    Attributes:
        loss: of all targets.
        by_context: {"first-last": loss} of the targets that first to last tokens of their row or document
            precede; a bucket without targets is left out.
        bits_per_byte: of the targets' text; None where its bytes are not known.
    """

    loss: float
    by_context: dict[str, float]
    bits_per_byte: float | None = None


@torch.no_grad()
def evaluate(
    engine, batches: Iterable[Batch], *, seq_len: int, buckets: int, token_sizes: Tensor | None = None
) -> Evaluation:
    """Evaluate this rank's batches, on the engine's device; ranks may differ in their number.

    Args:
        seq_len: T, the longest context + 1.
        buckets: of equal width, into which contexts [1, T) are divided; at most T - 1.
        token_sizes: bytes of each token id, [ids] int64; None: not known.
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
            losses = engine.module.token_losses(batch.input_ids, **options)  # of `batch.targets()`
        target = batch.targets() != -100
        bucket = (_context(batch) * buckets // seq_len).expand_as(losses)[target]
        sums[0].index_add_(0, bucket, losses[target].double())
        sums[1].index_add_(0, bucket, torch.ones_like(bucket, dtype=torch.float64))
        if token_sizes is not None:
            sums[2].index_add_(0, bucket, token_sizes.to(device)[batch.targets()[target]].double())
    engine.train()
    dist.all_reduce(sums)
    total, targets, sizes = sums.tolist()
    means = {
        name: total[i] / targets[i] for i, name in enumerate(bucket_names(seq_len, buckets)) if targets[i]
    }
    bits = sum(total) / math.log(2) / sum(sizes) if sum(sizes) else None
    return Evaluation(sum(total) / max(1.0, sum(targets)), means, bits)


def _text_record(found: Mapping[str, tuple[Evaluation, float]]) -> Record:
    """Loss, perplexity and bits per byte (where known) as weighted, and the same of each named part."""
    mean = weighted(list(found.values()))
    record: Record = {"validation_loss": mean.loss, "validation_perplexity": perplexity(mean.loss)}
    if mean.bits_per_byte is not None:
        record["validation_bits_per_byte"] = mean.bits_per_byte
    for name, (part, _) in found.items():
        if name:
            record[f"validation_loss/{name}"] = part.loss
            record[f"{PART_PERPLEXITY}{name}"] = perplexity(part.loss)
            if part.bits_per_byte is not None:
                record[f"validation_bits_per_byte/{name}"] = part.bits_per_byte
    return record


def _text_line(record: Record) -> str:
    parts = [
        f"{key.removeprefix(PART_PERPLEXITY)} {value:.2f}"
        for key, value in record.items()
        if key.startswith(PART_PERPLEXITY)
    ]
    loss, of_all = record["validation_loss"], record["validation_perplexity"]
    of_parts = f" ({', '.join(parts)})" if parts else ""
    bits = _bits(record.get("validation_bits_per_byte"))
    return f"validation loss {loss:.4f}, perplexity {of_all:.2f}{of_parts}{bits}"


def _bits(bits_per_byte: float | None) -> str:
    return "" if bits_per_byte is None else f", {bits_per_byte:.4f} bits per byte"


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def bucket_names(seq_len: int, buckets: int) -> list[str]:
    """The contexts of each bucket, such as `1-255`: of bucket i those c with i <= c buckets / T < i + 1."""
    firsts = [max(1, -(-i * seq_len // buckets)) for i in range(buckets + 1)]
    return [f"{first}-{after - 1}" for first, after in pairwise(firsts)]


def weighted(parts: Sequence[tuple[Evaluation, float]]) -> Evaluation:
    """The mean over parts of a mixture, each with its weight; weights add up to 1."""
    by_context: dict[str, float] = {}
    for name in dict.fromkeys(name for part, _ in parts for name in part.by_context):
        known = [(part.by_context[name], weight) for part, weight in parts if name in part.by_context]
        by_context[name] = sum(loss * weight for loss, weight in known) / sum(weight for _, weight in known)
    counted = all(part.bits_per_byte is not None for part, _ in parts)
    bits = sum(part.bits_per_byte * weight for part, weight in parts) if counted else None
    return Evaluation(sum(part.loss * weight for part, weight in parts), by_context, bits)


def _context(batch: Batch) -> Tensor:
    """Tokens of the same row or document before each target, int64: [1, T - 1], of a part [1, T]."""
    count = batch.targets().shape[1]
    before = 0 if batch.context_part is None else batch.context_part.start(count)
    positions = torch.arange(before + 1, before + 1 + count, device=batch.input_ids.device)
    if batch.cu_seqlens is None:
        return positions[None]
    bounds = batch.cu_seqlens.to(positions)
    return (positions - bounds[torch.searchsorted(bounds, positions, right=True) - 1])[None]


class SuiteRuns:
    """Suites beside training: `fla-eval` on an export, one at a time, each in a separate process.

    lm-eval seeds the global generators and changes defaults of libraries; in another process, on exported
    weights, it can't change the run by a bit, and a suite that fails costs a line. Training does not wait.

    Args:
        suite: name of a file of configs/suite.
        options: further overrides of `fla-eval`, such as `suite.limit=100` or `device=cpu`.
        folder: where each evaluation gets its `<suite>-step-XXXXXXX`.
        record: takes the results as a record for the metrics.
        log: takes a line for the user.
    """

    def __init__(
        self,
        suite: str,
        options: Sequence[str],
        folder: Path,
        *,
        record: Callable[[Record], None],
        log: Callable[[str], None],
    ) -> None:
        self._suite, self._options, self._folder = suite, list(options), folder
        self._record, self._log = record, log
        self._process: subprocess.Popen | None = None
        self._output, self._of_step = folder, 0
        self._left_out: tuple[Path, int] | None = None  # the newest export and its step, if it was

    def start(self, export: Path, step: int) -> None:
        """Evaluate the export of `step`, unless an earlier evaluation still runs."""
        if self._process is not None:
            self._left_out = export, step
            self._log(
                f"step {step:,}: suite {self._suite} left out, that of step {self._of_step:,} still runs"
            )
            return
        self._left_out = None
        self._output, self._of_step = self._folder / f"{self._suite}-step-{step:07d}", step
        try:
            self._launch(export)
        except OSError as failure:
            self._log(f"step {step:,}: suite {self._suite} left out ({failure.strerror})")

    def start_if_lost(self, export: Path, step: int, metrics: Path) -> None:
        """After a resume: `start`, unless there is no such export or `metrics` has its results.

        Results are logged under a later step, which a kill may forestall, and whose record a resume drops.
        """
        logged = (record.get("evaluated_step") for record in read_metrics(metrics))
        if export.is_dir() and step not in logged:
            self.start(export, step)

    def _launch(self, export: Path) -> None:
        self._output.mkdir(parents=True, exist_ok=True)
        request = {"checkpoint": export, "suite": self._suite, "output": self._output}
        overrides = [*(assign(*item) for item in request.items()), *as_values(self._options)]
        self._process = start_command("eval", overrides, self._output / "eval.log")

    def collect(self, step: int, tokens: int) -> None:
        """Log the results of an evaluation that has ended by now, if there is one.

        Args:
            step: of the training, under which they are recorded; `evaluated_step` says whose they are.
            tokens: trained on by then.
        """
        if self._process is None or self._process.poll() is None:
            return
        self._process = None
        metrics = _metrics(self._output / "results.json")
        if metrics is None:
            self._log(f"step {self._of_step:,}: suite {self._suite} failed, see {self._output / 'eval.log'}")
            return
        self._record({"step": step, "tokens": tokens, "evaluated_step": self._of_step, **metrics})
        self._log(f"step {self._of_step:,}: suite {self._suite} done, {self._output}")

    def finish(self, step: int, tokens: int, beat: Callable[[str], None]) -> None:
        """Log the evaluation that runs, then that of the newest export if it was left out: it is the result.

        Args:
            beat: called while waiting, which is progress.
        """
        self._wait(step, tokens, beat)
        if self._left_out is not None:
            export, of_step = self._left_out
            self._log(f"step {of_step:,}: suite {self._suite} starts late")
            self.start(export, of_step)
            self._wait(step, tokens, beat)

    def _wait(self, step: int, tokens: int, beat: Callable[[str], None]) -> None:
        while self._process is not None:
            beat(f"waiting for suite {self._suite}")
            self.collect(step, tokens)
            if self._process is not None:
                time.sleep(POLL)

    def stop(self) -> None:
        """End the evaluation that runs, if one does."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


def _metrics(file: Path) -> dict[str, float | None] | None:
    """The flat results of a finished evaluation; None if it wrote none whole. Infinite ones become null."""
    if not file.is_file():
        return None
    try:
        found = read_json(file)["metrics"]
    except ValueError:  # cut short by a full disk
        return None
    return {key: value if abs(value) < float("inf") else None for key, value in found.items()}
