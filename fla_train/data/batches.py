"""Which sequences a rank sees at a step, and handing them over ahead of need."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from fla_train.data.dataset import TokenDataset


@dataclass(frozen=True)
class BatchPlan:
    """Cuts the global batch of step s, sequences [s G, (s + 1) G), into micro-batches of ranks.

    The set of a step does not depend on `micro_batch` or `world`, so a run may resume with others.

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
        if (
            self.micro_batch < 1
            or self.global_batch < 1
            or self.global_batch % (self.micro_batch * self.world)
        ):
            raise ValueError(
                f"a global batch of {self.global_batch} sequences does not split into micro-batches of "
                f"{self.micro_batch} on {self.world} process(es); "
                f"make it a multiple of {self.micro_batch * self.world}"
            )

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on each rank."""
        return self.global_batch // (self.micro_batch * self.world)

    def indices(self, step: int) -> np.ndarray:
        """[accumulation, micro_batch] int64: this rank's sequences at optimizer step `step` (from 0)."""
        whole = np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)
        return whole.reshape(self.accumulation, self.world, self.micro_batch)[:, self.rank]


class MicroBatches:
    """Iterates in order over this rank's micro-batches [micro_batch, seq_len], from step `start_step` on.

    A background thread keeps `depth` of them ready. No random number generator is touched. An error while
    reading is raised by `next`. Use as a context manager, or call `close`.

    Args:
        end_step: the first step not served; None for no end.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        plan: BatchPlan,
        start_step: int = 0,
        end_step: int | None = None,
        *,
        depth: int = 4,
    ):
        self._dataset, self._plan = dataset, plan
        self._steps = (start_step, end_step)
        self._queue: queue.Queue[torch.Tensor | Exception | None] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._finished = False
        self._thread = threading.Thread(target=self._produce, name="micro-batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self._finished:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, torch.Tensor):
            return item
        self._finished = True
        if item is None:
            raise StopIteration
        raise item

    def __enter__(self) -> "MicroBatches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ):
        self.close()

    def close(self) -> None:
        """Stop the thread; what is left over is dropped."""
        self._finished = True
        self._stop.set()
        self._thread.join()

    def _produce(self) -> None:
        step, end = self._steps
        try:
            while end is None or step < end:
                for indices in self._plan.indices(step):
                    if not self._put(self._dataset.sequences(indices)):
                        return
                step += 1
            self._put(None)
        except Exception as failure:
            self._put(failure)

    def _put(self, item: torch.Tensor | Exception | None) -> bool:
        """Wait for room; False once the reader has closed."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


def sequential_batches(
    dataset: TokenDataset, batch: int, *, limit: int | None = None, rank: int = 0, world: int = 1
) -> Iterator[torch.Tensor]:
    """This rank's share of the first `limit` sequences (None = one epoch), in order.

    Yields [<= batch, seq_len] int64. Every sequence goes to exactly one rank.
    Ranks may get unequal numbers of batches: reduce sums, not means.
    """
    total = len(dataset) if limit is None else min(limit, len(dataset))
    mine = np.arange(rank, total, world, dtype=np.int64)
    for start in range(0, len(mine), batch):
        yield dataset.sequences(mine[start : start + batch])
