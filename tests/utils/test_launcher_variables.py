"""Which environments make a process a rank, and which variables of batch systems and MPI are removed."""

import os

import pytest

from fla_train.utils.ranks import is_rank, leave_other_launchers, world_size

MPI = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMI_RANK": "3"}
MACHINE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}  # a pod of a batch system
RANK = MACHINE | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        (MACHINE, 1),
        ({"WORLD_SIZE": ""}, 1),
        (MPI, 1),
        (RANK | {"LOCAL_RANK": ""}, 1),
        (RANK | MPI, 2),
    ],
)
def test_only_launchers_of_ranks_make_a_rank(environment: dict[str, str], ranks: int, monkeypatch) -> None:
    for name in (*RANK, *MPI):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (world_size(), is_rank()) == (ranks, ranks > 1)
    leave_other_launchers()
    assert not MPI.keys() & os.environ.keys() and ("RANK" in os.environ) == (ranks > 1)
