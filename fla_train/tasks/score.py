"""Score of a model on a test set of a task: loss, accuracy, and accuracy by prefix or slice."""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from fla_train.tasks.task import IGNORE, Batch, Tally, Task, tally_by


@dataclass(frozen=True)
class TaskScore:
    """Sums over test sequences; scores of batches and ranks add up.

    Attributes:
        loss: sum over labels of the cross entropy, nats.
        tally: all sequences.
        slices: one tally for each value of the task's `slice_key`; empty for tasks without.
    """

    loss: float
    tally: Tally
    slices: dict[int, Tally]

    @classmethod
    def of(cls, task: Task, logits: torch.Tensor, batch: Batch) -> "TaskScore":
        """Score logits [B, T, V] of one batch. Ids from `task.vocab_size` on are never predicted."""
        logits = logits[..., : task.vocab_size].float()
        labels = batch.labels.to(logits.device)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        predictions = task.judge(logits.argmax(-1).cpu(), batch)
        slices = {} if task.slice_key is None else tally_by(predictions, batch, task.slice_key)
        return cls(loss.item(), Tally.of(predictions, batch.labels), slices)

    def __add__(self, other: "TaskScore") -> "TaskScore":
        slices = dict(self.slices)
        for value, tally in other.slices.items():
            slices[value] = slices[value] + tally if value in slices else tally
        return TaskScore(self.loss + other.loss, self.tally + other.tally, slices)

    @property
    def mean_loss(self) -> float:
        """Return the loss in nats per label."""
        return self.loss / self.tally.tokens.item()

    def scalars(self, task: Task) -> dict[str, float]:
        """Return the task's summary; lists over prefixes keep the entries at powers of two and the last."""
        scalars: dict[str, float] = {}
        for key, value in task.summary(self.tally).items():
            if isinstance(value, list):
                powers = (2**i for i in range(len(value).bit_length()))
                scalars |= {f"{key}_{length}": value[length - 1] for length in (*powers, len(value))}
            else:
                scalars[key] = value
        return scalars

    def curve(self, task: Task) -> dict[str, str | list[float]]:
        """Return the task's accuracy by prefix length, or by its `slice_key`, as plain JSON.

        Keys: `axis` ("prefix" or the slice key), `metric`, `x`, `y` (the accuracy at each x), `n` (sequences
        at each x), and `chance` (the accuracy of guessing at each x, or None).
        """
        if task.slice_key is None:
            y = task.summary(self.tally).get("prefix_accuracy", self.tally.prefix_accuracy)
            x, n = list(range(1, len(y) + 1)), [self.tally.sequences.item()] * len(y)
        else:
            x = sorted(self.slices)
            y = [task.summary(self.slices[value])[task.headline] for value in x]
            n = [self.slices[value].sequences.item() for value in x]
        curve = {"axis": task.slice_key or "prefix", "metric": task.headline, "x": x, "y": y, "n": n}
        return curve | {"chance": task.chance_by_prefix}
