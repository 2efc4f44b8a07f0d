"""Whether this process is one rank of several, by the environment that launchers set."""

import os

# Prefixes of what torch.distributed and the agent put in a rank's environment
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "FLA_TRAIN_LAUNCHER",
    "FLA_TRAIN_STORE_PREFIX",
    "FLA_TRAIN_STORE_FILE",
)


def is_rank() -> bool:
    """Whether a launcher (ours, torchrun, accelerate) has started this process as one rank of several.

    Some batch systems set RANK for a whole machine; LOCAL_RANK is what only launchers of ranks set.
    """
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))


def is_first() -> bool:
    """Whether this process is rank 0, or no rank at all: it prints what is printed once."""
    return not is_rank() or os.environ["RANK"] == "0"
