"""Choose the sequences of each rank and step, read them ahead, and pack documents."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import NamedTuple

import numpy as np
import torch

from fla_train.data.dataset import TokenDataset
from fla_train.data.mixture import Dataset

READ_AHEAD = 4  # micro-batches
IGNORE = -100  # label of a position without a target, as in torch and transformers


class Batch(NamedTuple):
    """A micro-batch: rows of equal length, or all of them in one row of packed documents.

    With context parallelism it is a part of the rows. Fields are named as the arguments of models.

    Attributes:
        input_ids: [B, T] int64.
        labels: [B, T] int64, aligned with `input_ids`; -100 without a target. None in a part.
        cu_seqlens: [S + 1] int32 bounds of the documents in a single whole row (B = 1), or None.
        max_length_q: upper bound of the length of these documents (tokens).
        continues: [rows] bool, whether a row begins where the same row of the last step ended, in its
            document; None: the order is unknown. Models do not get it.
        shift_labels: in a part in place of `labels`, the target of each token.
        context_part: in a part, the `ContextPart` that it is.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor | None
    cu_seqlens: torch.Tensor | None = None
    max_length_q: int | None = None
    continues: torch.Tensor | None = None
    shift_labels: torch.Tensor | None = None
    context_part: object | None = None

    def targets(self) -> torch.Tensor:
        """Return the token after each one, -100 without a target: [B, T], or [B, T - 1] for whole rows."""
        return self.labels[:, 1:] if self.shift_labels is None else self.shift_labels

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(send(t, device) if isinstance(t, torch.Tensor) else t for t in self))


def send(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy x from host memory to `device` without waiting.

    A copy to a GPU from memory that isn't pinned would block the host until all earlier work is done.
    """
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def pack(ids: torch.Tensor, boundaries: list[np.ndarray]) -> Batch:
    """Pack sequences [n, T] into one row [1, n T] with the bounds of its documents, which share no state.

    A document that two sequences share counts as two. A document's first token is not a target, since the
    token before it belongs to another document.

    Args:
        boundaries: for each sequence, where in (0, T) a new document begins.
    """
    rows, length = ids.shape
    starts = [row * length + np.concatenate([[0], inner]) for row, inner in enumerate(boundaries)]
    bounds = np.concatenate([*starts, [rows * length]]).astype(np.int32)
    ids = ids.reshape(1, -1)
    labels = ids.clone()
    labels[0, torch.from_numpy(bounds[:-1]).long()] = IGNORE
    return Batch(ids, labels, torch.from_numpy(bounds), length)


class PackedDataset:
    """The sequences of a dataset as packed batches (`pack`), with the bounds of their documents."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def sequences(self, indices: np.ndarray) -> Batch:
        return pack(self.dataset.sequences(indices), self.dataset.boundaries(indices))


@dataclass(frozen=True)
class BatchSampler:
    """Split the global batch of step s, sequences [s G, (s + 1) G), into micro-batches of ranks.

    The sequences of a step do not depend on `micro_batch` or `world`, so a run may resume with others.

    Args:
        global_batch: G, sequences per optimizer step over all ranks.
        micro_batch: sequences per forward on one rank.
    """

    global_batch: int
    micro_batch: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world
        assert self.global_batch % (self.micro_batch * self.world) == 0  # the config is checked for it

    @property
    def accumulation(self) -> int:
        """Return the number of micro-batches per optimizer step on each rank."""
        return self.global_batch // (self.micro_batch * self.world)

    def indices(self, step: int) -> np.ndarray:
        """Return this rank's sequences at step `step` (from 0): [accumulation, micro_batch] int64."""
        whole = np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)
        return whole.reshape(self.accumulation, self.world, self.micro_batch)[:, self.rank]


class PrefetchLoader:
    """Iterate over this rank's micro-batches, as `dataset.sequences` returns them, from `start_step` on.

    A background thread reads the next `READ_AHEAD` of them. No random number generator is used. `next` raises
    the errors of reading. Use as a context manager, or call `close`.

    Args:
        end_step: the step before which to stop; None for no end.
    """

    def __init__(
        self,
        dataset: Dataset | PackedDataset,
        sampler: BatchSampler,
        start_step: int = 0,
        end_step: int | None = None,
    ):
        steps = count(start_step) if end_step is None else range(start_step, end_step)
        self._dataset, self._indices = dataset, chain.from_iterable(map(sampler.indices, steps))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="micro-batches")
        self._ready: deque[Future[torch.Tensor | Batch]] = deque()

    def __iter__(self) -> Iterator[torch.Tensor | Batch]:
        return self

    def __next__(self) -> torch.Tensor | Batch:
        for indices in islice(self._indices, READ_AHEAD + 1 - len(self._ready)):
            self._ready.append(self._pool.submit(self._dataset.sequences, indices))
        if not self._ready:
            raise StopIteration
        return self._ready.popleft().result()

    def __enter__(self) -> "PrefetchLoader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread. Batches that were not taken are dropped."""
        self._pool.shutdown(cancel_futures=True)
        self._indices, self._ready = iter(()), deque()


def sequential_batches(
    dataset: TokenDataset | PackedDataset, batch: int, *,
    limit: int | None = None, rank: int = 0, world: int = 1,
) -> Iterator[torch.Tensor | Batch]:  # fmt: skip
    """Yield this rank's batches of the first `limit` sequences (None: one epoch), in order.

    Yields what `dataset.sequences` returns for at most `batch` of them. Every sequence goes to exactly one
    rank. Ranks may get unequal numbers of batches: reduce sums, not means.
    """
    total = len(dataset) if limit is None else min(limit, len(dataset))
    mine = np.arange(rank, total, world, dtype=np.int64)
    for start in range(0, len(mine), batch):
        yield dataset.sequences(mine[start : start + batch])
