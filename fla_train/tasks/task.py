"""`Task`, the base class of synthetic tasks: sequences by index, labels aligned with inputs, a metric."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from fla_train.tasks.draws import stream_keys

IGNORE = -100  # the label where nothing is predicted, as in torch's cross entropy


@dataclass(frozen=True)
class Batch:
    """Sequences of one task.

    Attributes:
        input_ids: [B, T] int64.
        labels: [B, T] int64, NOT shifted: labels[b, t] is the model's target after it has read
            input_ids[b, : t + 1]; IGNORE where nothing is predicted. For a loss that shifts labels use
            `for_causal_lm`.
        metadata: properties of each row, [B] int64 each, such as "length", by which results can be grouped.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    metadata: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, input_ids: np.ndarray, labels: np.ndarray, **metadata: np.ndarray | int) -> "Batch":
        """Make a batch of arrays. A number is the metadata of every row."""
        values = {
            key: torch.full((len(labels),), value) if isinstance(value, int) else torch.from_numpy(value)
            for key, value in metadata.items()
        }
        return cls(torch.from_numpy(input_ids), torch.from_numpy(labels), values)

    def for_causal_lm(self) -> torch.Tensor:
        """Return inputs and labels for a model whose loss shifts labels by one: [2, B, T + 1] int64.

        One more input (id 0, which no label depends on) makes room for the last label.
        """
        inputs = F.pad(self.input_ids, (0, 1))
        return torch.stack([inputs, F.pad(self.labels, (1, 0), value=IGNORE)])


@dataclass(frozen=True)
class Tally:
    """Counts of right predictions. They add up over batches and ranks, so fractions of the sum are exact.

    Attributes:
        tokens, tokens_right: labelled positions, and those predicted right; scalars.
        sequences, sequences_right: rows, and rows without a wrong prediction; scalars.
        row_accuracy: sum over rows of the fraction of the row's labelled positions that are right; scalar.
        prefixes_right: [T], rows without a wrong prediction at positions <= t.
    All are fp64 tensors.
    """

    tokens: torch.Tensor
    tokens_right: torch.Tensor
    sequences: torch.Tensor
    sequences_right: torch.Tensor
    row_accuracy: torch.Tensor
    prefixes_right: torch.Tensor

    @classmethod
    def of(cls, predictions: torch.Tensor, labels: torch.Tensor) -> "Tally":
        """Count `predictions` [B, T] (token ids, such as argmax of the logits) against `labels` [B, T].

        Each row needs at least one label.
        """
        assert predictions.shape == labels.shape and labels.ndim == 2
        labelled = labels != IGNORE
        per_row = labelled.sum(1)
        assert per_row.all(), "a row has no label"
        right = labelled & (predictions == labels)
        prefix_right = (labelled & ~right).cumsum(1) == 0
        return cls(
            tokens=per_row.sum().double(),
            tokens_right=right.sum().double(),
            sequences=torch.tensor(float(len(labels)), dtype=torch.float64, device=labels.device),
            sequences_right=prefix_right[:, -1].sum().double(),
            row_accuracy=(right.sum(1).double() / per_row).sum(),
            prefixes_right=prefix_right.sum(0).double(),
        )

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def token_accuracy(self) -> float:
        """Return the fraction of labelled positions that are right."""
        return (self.tokens_right / self.tokens).item()

    @property
    def sequence_accuracy(self) -> float:
        """Return the fraction of rows right at all their labelled positions."""
        return (self.sequences_right / self.sequences).item()

    @property
    def mean_row_accuracy(self) -> float:
        """Return the mean over rows of the fraction of right positions."""
        return (self.row_accuracy / self.sequences).item()

    @property
    def prefix_accuracy(self) -> list[float]:
        """Return the fraction of rows right at all labelled positions <= t, for each t: [T]."""
        return (self.prefixes_right / self.sequences).tolist()


class Task(ABC):
    """A source of labelled sequences; sequence i is a pure function of (options, seed, i).

    A run's position is therefore one integer, as with text: a resumed run sees the same stream for any number
    of ranks and any micro-batch. Training and test sets are two tasks of different seeds.

    Args:
        vocab_size: ids are below it.
        seq_len: T of every batch, in tokens.
        seed: any integer.
        num_sequences: size of a fixed data set, in which index i is sequence i % num_sequences (each epoch in
            the same order); None: every index is a new sequence.

    Attributes:
        chance: accuracy over labels at chance; None: not known.
        chance_by_prefix: accuracy at chance up to each prefix; None: not known.

    Class attributes:
        headline: the key of `summary` that papers report.
        slice_key: the metadata by which accuracy is plotted; None: by prefix length.
        length_option: the argument that a curriculum reduces; None for tasks of one length.
    """

    chance: float | None = None
    chance_by_prefix: Sequence[float] | None = None
    headline: ClassVar[str] = "accuracy"
    slice_key: ClassVar[str | None] = None
    length_option: ClassVar[str | None] = None

    def __init__(self, *, vocab_size: int, seq_len: int, seed: int = 0, num_sequences: int | None = None):
        assert num_sequences is None or num_sequences >= 1
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.seed = seed
        self.num_sequences = num_sequences

    def batch(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """Return sequences `indices` ([B] integers >= 0, in any order), each the same in any batch."""
        indices = np.asarray(indices, dtype=np.int64)
        assert indices.ndim == 1 and len(indices) > 0 and indices.min() >= 0
        if self.num_sequences is not None:
            indices = indices % self.num_sequences
        return self._generate(stream_keys(self.seed, indices))

    def metrics(self, predictions: torch.Tensor, batch: Batch) -> dict[str, float | list[float]]:
        """Return the task's published metrics of `predictions` [B, T] on one batch."""
        return self.summary(Tally.of(self.judge(predictions, batch), batch.labels))

    def judge(self, predictions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return `predictions` [B, T], with the label instead of each prediction that is equally right."""
        return predictions

    def summary(self, tally: Tally) -> dict[str, float | list[float]]:
        """Return the task's published metrics of a tally, which may be a sum over batches and ranks.

        The default is `accuracy` over labels, and `sequence_accuracy`.
        """
        return {"accuracy": tally.token_accuracy, "sequence_accuracy": tally.sequence_accuracy}

    def against_chance(self, accuracy: float, sequences: float) -> str:
        """Return how an accuracy compares with chance: `(0.19 of answers, chance 0.19: at chance)`.

        Above chance means by more than two standard errors, one observation per sequence.
        """
        if self.chance is None:
            return ""
        margin = 2 * math.sqrt(self.chance * (1 - self.chance) / sequences)
        verdict = "above" if accuracy > self.chance + margin else "at"
        return f"({accuracy:.4f} of answers, chance {self.chance:.4f}: {verdict} chance)"

    @abstractmethod
    def _generate(self, keys: np.ndarray) -> Batch:
        """Draw one sequence per stream key ([B] uint64, see draws.py)."""


def tally_by(predictions: torch.Tensor, batch: Batch, key: str) -> dict[int, Tally]:
    """Return one tally for each value of `batch.metadata[key]`: by length, or by number of pairs."""
    values = batch.metadata[key].to(batch.labels.device)
    rows = {int(value): values == value for value in values.unique()}
    return {value: Tally.of(predictions[chosen], batch.labels[chosen]) for value, chosen in rows.items()}
