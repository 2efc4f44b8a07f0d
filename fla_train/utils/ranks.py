"""Read a process's rank from the variables of launchers (ours, torchrun, accelerate), only in this module."""

import os
from collections.abc import Mapping

REQUIRED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# Environment variables of a rank that torch.distributed and our agent set, besides `TORCHELASTIC_*`.
RANK_VARIABLES = (
    *REQUIRED,
    *("MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("FLA_TRAIN_LAUNCHER", "FLA_TRAIN_STORE_PREFIX", "FLA_TRAIN_STORE_FILE"),
)
# MPI's ranks count tasks of the batch system. DeepSpeed and accelerate would mistake them for ours.
MPI_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL", "MV2_COMM_WORLD_")


def is_rank() -> bool:
    """Return whether a launcher has started this process as one rank of several.

    Some batch systems set RANK and WORLD_SIZE for whole machines; only launchers of ranks set LOCAL_RANK. An
    empty variable counts as unset.
    """
    return all(os.environ.get(name) for name in REQUIRED)


def is_first() -> bool:
    """Return whether this process is rank 0 or not a rank, and so prints output that appears once."""
    return not is_rank() or os.environ["RANK"] == "0"


def is_first_on_machine() -> bool:
    """Return whether this process is the first rank of its machine or not a rank."""
    return not is_rank() or os.environ["LOCAL_RANK"] == "0"


def world_size() -> int:
    """Return the number of ranks; 1 in a process that is not a rank."""
    return int(os.environ["WORLD_SIZE"]) if is_rank() else 1


def local_world_size() -> int:
    """Return the number of ranks on this machine; 1 in a process that is not a rank."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if is_rank() else 1


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a process is not a rank of any launcher."""
    prefixes = ("TORCHELASTIC_", *MPI_PREFIXES)
    return {k: v for k, v in environment.items() if not (k in RANK_VARIABLES or k.startswith(prefixes))}


def leave_other_launchers() -> None:
    """Unset MPI's variables in this process and, unless it is a rank, those of stale ranks."""
    kept = without_ranks(os.environ)
    for name in os.environ.keys() - kept.keys():
        if not is_rank() or name.startswith(MPI_PREFIXES):
            del os.environ[name]
