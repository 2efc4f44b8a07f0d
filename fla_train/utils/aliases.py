"""Aliases: names of earlier versions that are still accepted, and the functions that translate them.

docs/architecture.md, "Aliases", lists the same names for users.
"""

import os
import warnings
from functools import cache

# Where the name stands: {alias: present name}. In "recompute", TOKENS is any number of tokens.
ALIASES = {
    "environment": {"FLA_TRAIN_NEIGHBOURS": "FLA_TRAIN_FUSED_OPS"},
    "backend": {"chunked": "chunk"},
    "recompute": {"TOKENS": "true"},
    "fla-bench": {"neighbours": "fused_ops", "--substeps": "--num-householder"},
    "import": {"fla_train.baselines": "fla_train.models"},
    "launch table": {
        "prepare": "chunk_prepare_wy",
        "state": "chunk_fwd",
        "adjoint": "chunk_bwd_state",
        "gradient": "chunk_bwd_qkg",
        "substeps": "num_householder",
    },
}


def current_name(place: str, name: str, source: str | None = None) -> str:
    """The present name for `name`, which is announced if `name` is an alias in `ALIASES[place]`.

    Args:
        source: the setting or file that the user wrote the name in; default `place`.
    """
    if name not in ALIASES[place]:
        return name
    announce(source or place, name, ALIASES[place][name])
    return ALIASES[place][name]


def rename_environment() -> None:
    """Give environment variables their present names, for this process and those that it starts."""
    for name in ALIASES["environment"].keys() & os.environ.keys():
        os.environ.setdefault(current_name("environment", name), os.environ.pop(name))


@cache  # the registry of `warnings` forgets what was printed whenever a library changes the filters
def announce(source: str, alias: str, name: str) -> None:
    """Tell the user, once per process, to write `name` instead of `alias` in `source`."""
    # Explicit, so that one line is printed: `warnings.warn` adds a line of code.
    warnings.warn_explicit(f"{source}: write {name} instead of {alias}", FutureWarning, "fla_train", 1)
