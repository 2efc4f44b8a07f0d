"""Several processes on one evaluation, as torchrun or `accelerate launch` start them: data parallel.

Every process holds the model and reads the same data; each answers its share. What they exchange are a few
numbers, so gloo does, on GPUs too.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of the evaluation; rank 0 owns files and console."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    def share(self, value: T) -> T:
        """Rank 0's `value`, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in the order of ranks, on every rank."""
        if self.world == 1:
            return [value]
        values: list = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def device(self, name: str) -> str:
        """This rank's device, where `auto` or `cuda` leaves open which GPU."""
        several = self.world > 1 and name in ("auto", "cuda") and torch.cuda.is_available()
        return f"cuda:{self.local_rank}" if several else name


ALONE = Ranks()


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """The ranks that the launcher's environment describes; `ALONE` without a launcher."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
    finally:
        dist.destroy_process_group()
