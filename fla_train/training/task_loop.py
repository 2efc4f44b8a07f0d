"""Training on a synthetic task: the same loop, with the task as its data and accuracy as its validation."""

import json
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fla_train.data.sampler import send
from fla_train.tasks import Score, Task, curriculum_tasks, tasks_for_testing, training_task
from fla_train.tasks.plots import plot_accuracy
from fla_train.training.checkpoint import folder_name
from fla_train.training.run_data import TaskSequences, has_reached
from fla_train.training.trainer import Trainer
from fla_train.utils.filesystem import write_whole
from fla_train.utils.records import Record, read_metrics


class TaskTrainer(Trainer):
    """A `Trainer` on `config.task`. Validation is the accuracy on each of the task's test sets.

    Besides the records of metrics.jsonl, rank 0 keeps the newest curves (accuracy by prefix, length or number
    of pairs) in accuracy.json and draws them in plots/accuracy.png.
    """

    def _open_data(self) -> tuple[TaskSequences, None]:
        self.tests = tasks_for_testing(self.config.task)
        task, seed = self.config.task, self.config.seed
        stages = curriculum_tasks(task, seed)
        return TaskSequences(training_task(task, seed), stages, task.batch_size), None

    def run(self) -> bool:
        self.reached = self._has_reached()  # a run that was killed before it had left all its files
        return super().run()

    def _to_device(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        inputs, labels = send(pair, self.engine.device)  # each [B, T + 1]
        return inputs, labels

    def _evaluate(self) -> None:
        scores = {name: self._score(task) for name, task in self.tests.items()}
        first = next(iter(scores.values()))
        record: Record = {"step": self.state.step, "tokens": self.state.tokens}
        record["validation_loss"] = first.mean_loss
        for name, task in self.tests.items():
            record |= {f"{name}/{key}": value for key, value in scores[name].scalars(task).items()}
        self.reporter.log(record)
        if self.rank == 0:
            curves = {name: scores[name].curve(task) for name, task in self.tests.items()}
            content = {"step": self.state.step, "sets": curves}
            write_whole(self.folder.accuracy, json.dumps(content) + "\n")
            title = f"{self.folder.name}, step {self.state.step:,}"
            plot_accuracy(curves, title, self.folder.accuracy_plot)
        shown = [f"{name} {record[f'{name}/{task.headline}']:.4f}" for name, task in self.tests.items()]
        metric = next(iter(self.tests.values())).headline.replace("_", " ")
        self.reporter.say(f"step {self.state.step:,}: {metric}: {', '.join(shown)}")
        self.reached = self._has_reached()
        if self.reached:
            self.reporter.say(
                f"step {self.state.step:,}: task.stop_at reached twice in a row; the run ends here"
            )

    def _has_reached(self) -> bool:
        """Rank 0's reading of metrics.jsonl, on all ranks."""
        task, verdict = self.config.task, [False]
        if self.rank == 0:
            verdict = [has_reached(task, self.folder, self.state.step)]
        if task.stop_at:
            dist.broadcast_object_list(verdict)
        return verdict[0]

    @torch.no_grad()
    def _score(self, task: Task) -> Score:
        """The score of all ranks' test sequences; every rank gets it."""
        config = self.config.task
        mine = np.arange(self.rank, config.test_sequences, self.world)
        pieces = np.split(mine, range(config.test_batch_size, len(mine), config.test_batch_size))
        scores = []
        self.engine.eval()
        for rows in pieces:
            batch = task.batch(rows)
            kind = ("evaluation", batch.input_ids.shape)
            self.watchdog.beat(f"evaluating after step {self.state.step}", kind)
            logits = self.engine(input_ids=batch.input_ids.to(self.engine.device), use_cache=False).logits
            scores.append(Score.of(task, logits, batch))
        self.engine.train()
        everyone: list[Score | None] = [None] * self.world
        dist.all_gather_object(everyone, reduce(add, scores))
        return reduce(add, everyone)

    def _summary(self, export: Path) -> list[str]:
        root, state = self.folder.root, self.state
        records = read_metrics(self.folder.metrics)
        newest = next((r for r in reversed(records) if "validation_loss" in r), {})
        accuracies = [f"  {key:<32}{value:.4f}" for key, value in newest.items() if "/" in key]
        return [
            *("", f"Trained {state.step:,} steps, {state.step * self.batches.global_batch:,} sequences."),
            *accuracies,
            f"  metrics           {self.folder.metrics}",
            f"  accuracy curves   {self.folder.accuracy_plot}",
            f"  checkpoint        {self.folder.checkpoints / folder_name(state.step)}",
            f"  model             {export}",
            "Next:",
            f"  fla-eval checkpoint={root} suite=expressivity",
        ]
