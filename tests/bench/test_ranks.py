"""Work on several processes: what rank 0 found, or the first failure, and nobody left over."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from fla_train.bench.ranks import on_ranks
from fla_train.training.process_group import join


def place(offset: int) -> tuple[int, int, float]:
    print("not on stdout")
    join(on_gpu=False)
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(os.environ["RANK"]) + offset, int(os.environ["WORLD_SIZE"]), total.item()


def fail(failure: Exception | None) -> None:
    """Rank 1 fails; the others would wait for it for good."""
    if os.environ["RANK"] == "0":
        time.sleep(1000)
    if failure is None:
        os.kill(os.getpid(), signal.SIGKILL)
    raise failure


class Odd(Exception):
    """An exception that cannot be sent."""

    def __init__(self, first: int, second: int):
        super().__init__(f"{first} and {second}")


def test_the_first_ranks_result_counts(capfd):
    assert on_ranks(2, place, 10) == (10, 2, 21)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (ValueError("too small"), ValueError, "too small"),
        (torch.OutOfMemoryError("no room"), torch.OutOfMemoryError, "no room"),
        (None, RuntimeError, "rank 1 died.*SIGKILL"),
    ],
)
def test_a_failure_ends_all_ranks(failure, kind, message):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(kind, match=message):
        on_ranks(2, fail, failure)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if "spawn_main" in " ".join(process.cmdline())]


def odd() -> None:
    raise Odd(1, 2)


def test_what_cannot_be_sent_is_told():
    with pytest.raises(RuntimeError, match="Odd: 1 and 2") as caught:
        on_ranks(1, odd)
    assert "in odd" in str(caught.value.__cause__)  # where it was raised


ORPHANED = """
import os, signal, sys, time
from fla_train.bench.ranks import on_ranks

def work():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # like a rank that waits inside NCCL
    print("rank", os.getpid(), file=sys.stderr, flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    on_ranks(2, work)
"""


def test_ranks_do_not_outlive_a_killed_parent(tmp_path):
    (tmp_path / "parent.py").write_text(ORPHANED)
    command = [sys.executable, str(tmp_path / "parent.py")]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    ranks = [psutil.Process(int(parent.stderr.readline().split()[1])) for _ in range(2)]
    parent.kill()
    parent.wait()
    _, left = psutil.wait_procs(ranks, timeout=20)
    assert not left
