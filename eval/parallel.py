"""Data-parallel evaluation by the processes that torchrun or `accelerate launch` start.

Every process holds the model, reads the same data and answers some of the requests. The processes exchange a
few numbers only, by gloo, also on GPUs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fla_train.utils.errors import described
from fla_train.utils.ranks import leave_other_launchers, world_size

T = TypeVar("T")


class OtherRankFailed(RuntimeError):
    """Failure of another rank. The message has its number and its error."""


class OtherRankError(ValueError):
    """User error on another rank. The message has its number and its error."""


OTHER_RANK = (OtherRankFailed, OtherRankError)  # a rank that failed sends one instead of its value


@dataclass(frozen=True)
class Ranks:
    """The rank of this process in the evaluation. Rank 0 writes files and the console."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    def share(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on every rank.

        Raises:
            OtherRankFailed, OtherRankError: a rank left a block of `together` by an exception.
        """
        if self.world == 1:
            return [value]
        values = self._exchange(value)
        for failure in (value for value in values if isinstance(value, OTHER_RANK)):
            raise failure
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks, and end it on all of them if it fails on one.

        A rank that fails sends its error in the next `share` or `gather` of the others, or at the end of the
        block. If several ranks fail, all raise the error of the first one. Blocks must not be nested.

        Raises:
            OtherRankFailed, OtherRankError: on the ranks that did not fail.
        """
        if self.world == 1:
            yield
            return
        try:
            yield
        except OTHER_RANK:
            raise
        except Exception as failure:
            kind, line = OtherRankFailed, described(failure)[:300]
            if isinstance(failure, ValueError):
                kind, line = OtherRankError, " ".join(str(failure).split())[:300]
            values = self._exchange(kind(f"on rank {self.rank}: {line}"))
            first = next(rank for rank, value in enumerate(values) if isinstance(value, OTHER_RANK))
            if first == self.rank:
                raise
            raise values[first] from failure
        self.gather(None)

    def _exchange(self, value: Any) -> list:
        values: list = [None] * self.world
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as failure:  # gloo's error for a closed connection
            raise OtherRankFailed("the connection to another rank broke: its process has ended") from failure
        return values

    def device(self, name: str) -> str:
        """Return the device of this rank: its GPU for `auto` and `cuda`, else `name`."""
        several = self.world > 1 and name in ("auto", "cuda") and torch.cuda.is_available()
        return f"cuda:{self.local_rank}" if several else name


ALONE = Ranks()


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """Join the ranks that the launcher's environment describes; without a launcher yield `ALONE`."""
    leave_other_launchers()
    if world_size() == 1:
        yield ALONE
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]))
    finally:
        dist.destroy_process_group()
