"""Data-parallel evaluation by the processes that torchrun or `accelerate launch` start.

Every process holds the model, reads the same data and answers its share of the requests. They exchange a few
numbers only, by gloo, on GPUs too.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fla_train.utils.ranks import leave_other_launchers, world_size

T = TypeVar("T")


class OtherRankFailed(RuntimeError):
    """Another rank failed; the message says which one and why."""


class OtherRankError(ValueError):
    """Another rank found a user error; the message says which one and why."""


@dataclass(frozen=True)
class _Failure:
    """What a rank sends instead of the value that the others wait for."""

    rank: int
    line: str
    by_user: bool

    @classmethod
    def of(cls, rank: int, failure: Exception) -> "_Failure":
        by_user = isinstance(failure, ValueError)
        text = " ".join(str(failure).split())[:300]
        return cls(rank, text if by_user else f"{type(failure).__name__}: {text}", by_user)

    def error(self) -> Exception:
        return (OtherRankError if self.by_user else OtherRankFailed)(f"on rank {self.rank}: {self.line}")


@dataclass(frozen=True)
class Ranks:
    """This process among those of the evaluation; rank 0 owns files and console."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    def share(self, value: T) -> T:
        """Rank 0's `value`, on every rank."""
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in the order of ranks, on every rank.

        Raises:
            OtherRankFailed, OtherRankError: a rank left a block of `together` by an exception instead.
        """
        if self.world == 1:
            return [value]
        values = self._exchange(value)
        if failure := _first_failure(values):
            raise failure.error()
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that all ranks enter; an exception of one of them ends it on all of them.

        Inside, `share` and `gather` are the only exchanges. A rank that fails sends the failure instead of
        its value in the next exchange, at the latest at the end of the block. If several ranks fail, all
        raise for the first one. Blocks are not nested.

        Raises:
            OtherRankFailed, OtherRankError: where the exception was not raised itself.
        """
        if self.world == 1:
            yield
            return
        try:
            yield
        except (OtherRankFailed, OtherRankError):
            raise
        except Exception as failure:
            first = _first_failure(self._exchange(_Failure.of(self.rank, failure)))
            if first.rank == self.rank:
                raise
            raise first.error() from failure
        self.gather(None)

    def _exchange(self, value: Any) -> list:
        values: list = [None] * self.world
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as failure:  # what gloo raises when a connection closes
            raise OtherRankFailed("the connection to another rank broke: its process has ended") from failure
        return values

    def device(self, name: str) -> str:
        """This rank's device, where `auto` or `cuda` leaves open which GPU."""
        several = self.world > 1 and name in ("auto", "cuda") and torch.cuda.is_available()
        return f"cuda:{self.local_rank}" if several else name


def _first_failure(values: list) -> _Failure | None:
    return next((value for value in values if isinstance(value, _Failure)), None)


ALONE = Ranks()


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """Join the ranks that the launcher's environment describes; yield `ALONE` without a launcher."""
    leave_other_launchers()
    if world_size() == 1:
        yield ALONE
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]))
    finally:
        dist.destroy_process_group()
