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

from fla_train.utils.ranks import leave_other_launchers, world_size

T = TypeVar("T")


class OtherRankFailed(RuntimeError):
    """Failure of another rank. The message has its number and its error."""


class OtherRankError(ValueError):
    """User error on another rank. The message has its number and its error."""


@dataclass(frozen=True)
class _Failure:
    """Sent by a rank that failed, instead of the value that the others wait for."""

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
        if failure := _first_failure(values):
            raise failure.error()
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
        except RuntimeError as failure:  # gloo's error for a closed connection
            raise OtherRankFailed("the connection to another rank broke: its process has ended") from failure
        return values

    def device(self, name: str) -> str:
        """Return the device of this rank: its GPU for `auto` and `cuda`, else `name`."""
        several = self.world > 1 and name in ("auto", "cuda") and torch.cuda.is_available()
        return f"cuda:{self.local_rank}" if several else name


def _first_failure(values: list) -> _Failure | None:
    return next((value for value in values if isinstance(value, _Failure)), None)


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
