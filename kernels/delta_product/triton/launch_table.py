"""Launch options of the chunk kernels by GPU architecture, head dims and num_householder; calls never tune.

`launches` holds measured options. `fla-bench tune` writes a JSON file of such rows for one machine, and these
come first. A row is for

    architecture      compute capability, "9.0"
    key_dim           K rounded up to a tile: a power of two, 64 at least
    value_dim         V rounded up to a multiple of 64
    num_householder   n_h

and also serves larger V and n_h where no other row is nearer. It holds each kernel's options by name: tile
widths BV and BKO, num_warps, num_stages, maxnreg. `gluon` 1 asks for the Hopper kernel where it can run: of
`chunk_prepare_wy` and `chunk_bwd_qkg` for the one in Gluon, of `chunk_bwd_state` for
`chunk_bwd_fused`, which replaces it and `chunk_bwd_qkg`. Without a row a call gets `fallback` options: on
other architectures, for K of 256 with a smaller V, and in float32, whose tiles take twice the shared memory.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from fla_train.kernels.delta_product.triton.launches import ROWS
from fla_train.kernels.sizes import ceil_div, next_power_of_2

# Least extent of the tiles of K and V. On Hopper, Triton 3.6 compiled tiles of 32 columns to wrong dk and to
# illegal accesses (measured 2026-11-21 with its ptxas 12.8); narrower heads are padded with zeros instead.
MIN_TILE = 64
# Greatest extent of the tiles of K and V in Hopper's `chunk_prepare_wy` and `chunk_bwd_fused`; the least is
# MIN_TILE. `chunk_bwd_qkg` also takes K = V = 256.
HOPPER_TILE = 128
ALIGNED = 8  # 16-bit numbers between rows that the copy engine reads: 16 bytes
IN_GLUON = ("chunk_prepare_wy", "chunk_bwd_state", "chunk_bwd_qkg")  # may have `gluon` among their options
# Tile widths that each kernel needs.
TILES = {
    "chunk_prepare_wy": set(),
    "chunk_fwd": {"BV"},
    "chunk_bwd_state": {"BV"},
    "chunk_bwd_qkg": {"BV", "BKO"},
}

Options = dict[str, int]


@dataclass(frozen=True, eq=False)
class LaunchOptions:
    """Options of each kernel of one call."""

    chunk_prepare_wy: Options
    chunk_fwd: Options
    chunk_bwd_state: Options
    chunk_bwd_qkg: Options


@dataclass(frozen=True, order=True)
class Key:
    """Key of a row of the table."""

    architecture: str
    key_dim: int
    value_dim: int
    num_householder: int

    @staticmethod
    def of(architecture: str, key_dim: int, value_dim: int, num_householder: int) -> "Key":
        """Return the key of a call, its dims rounded up to tiles."""
        key_tile = max(MIN_TILE, next_power_of_2(key_dim))
        return Key(architecture, key_tile, ceil_div(value_dim, MIN_TILE) * MIN_TILE, num_householder)


Table = dict[Key, LaunchOptions]


def value_tiles(value_dim: int) -> int:
    """Return the tiles of V of `chunk_bwd_fused`; 0 where the copy engine cannot read equal ones."""
    tiles = ceil_div(value_dim, HOPPER_TILE)
    return 0 if value_dim < MIN_TILE or value_dim % (tiles * ALIGNED) else tiles


def gluon_obstacle(kernel: str, key_dim: int, value_dim: int, qk_l2norm: bool = True) -> str | None:
    """Return why Hopper's version of a kernel does not take these heads, or None."""
    if kernel == "chunk_bwd_qkg":
        equal = key_dim == value_dim and key_dim in (MIN_TILE, HOPPER_TILE, 2 * HOPPER_TILE)
        return None if equal else "Hopper's needs K = V = 64, 128 or 256"
    if not MIN_TILE <= key_dim <= HOPPER_TILE or key_dim % ALIGNED:
        return "Hopper's takes K from 64 to 128 in steps of 8"
    if kernel == "chunk_prepare_wy":
        return None if qk_l2norm else "Hopper's needs normalised keys"
    return None if value_tiles(value_dim) else "Hopper's takes V in equal tiles of 64 to 128 in steps of 8"


def user_file() -> Path:
    """Return `fla-bench tune`'s file: `launches.json` in $FLA_TRAIN_CACHE (default ~/.cache/fla_train)."""
    return Path(os.environ.get("FLA_TRAIN_CACHE") or "~/.cache/fla_train").expanduser() / "launches.json"


@cache
def architecture(device: torch.device) -> str:
    """Compute capability as the table writes it; "cpu" for the interpreter."""
    if device.type != "cuda":
        return "cpu"
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


@lru_cache(maxsize=1024)
def lookup(dtype: torch.dtype, key: Key) -> tuple[LaunchOptions, str]:
    """Return the options to launch with, and where they come from.

    Raises:
        ValueError: for a user's file that cannot be used.
    """
    plain = fallback(_most_warps(dtype, key))
    if dtype == torch.float32:
        return plain, "float32 runs with the options that need the least shared memory"
    file = user_file()
    if row := nearest(as_table(ROWS) | (read_table(file) if file.is_file() else {}), key):
        return row, "the table of launch options has a row for this GPU and these head dims"
    return plain, "the table of launch options has no row for this GPU and these head dims"


def nearest(table: Table, key: Key) -> LaunchOptions | None:
    """Return the row of the largest V, then the largest n_h, neither beyond `key`; None if there is none."""
    fitting = [
        row
        for row, options in table.items()
        if (row.architecture, row.key_dim) == (key.architecture, key.key_dim)
        and row.value_dim <= key.value_dim
        and row.num_householder <= key.num_householder
        and option_error("chunk_bwd_qkg", options.chunk_bwd_qkg, key.value_dim) is None
    ]
    return table[max(fitting)] if fitting else None


def fallback(most_warps: int = 8) -> LaunchOptions:
    """Return options for keys that no table lists: one stage and narrow tiles.

    They need the least shared memory: compiled by Triton 3.7.1 for sm_80 and sm_90, 74 KB for 16-bit keys up
    to 128 and 123 KB up to 256.

    Args:
        most_warps: warps of a program of each kernel but `chunk_prepare_wy`.
    """
    warps = {"num_warps": 8, "num_stages": 1}
    most, tile = warps | {"num_warps": most_warps}, {"BV": MIN_TILE}
    return LaunchOptions(warps, tile | most, tile | most, tile | {"BKO": MIN_TILE} | most)


def _most_warps(dtype: torch.dtype, key: Key) -> int:
    """Return the most warps. Of a B200's 512 columns of tensor memory, 8 warps may want 608 (Triton 3.6)."""
    wide = key.key_dim > HOPPER_TILE or dtype == torch.float32
    return 16 if wide and key.architecture.startswith("10.") else 8  # with 16 they want none


def option_error(kernel: str, options: Mapping[str, int], value_dim: int) -> str | None:
    """Return why options must not be launched, None where nothing speaks against them.

    Compilers made wrong code of some (docs/dev/kernels.md, "Compilers"): these are never tried, nor taken
    from a file. `value_dim` is V rounded up to tiles.
    """
    known = TILES[kernel]
    if missing := known - options.keys():
        return f"{kernel} lacks {', '.join(sorted(missing))}"
    further = {"num_warps", "num_stages", "maxnreg"} | ({"gluon"} if kernel in IN_GLUON else set())
    if unknown := options.keys() - known - further:
        return f"{kernel} has no option {', '.join(sorted(unknown))}"
    for name in known:
        if options[name] < MIN_TILE or options[name] & (options[name] - 1):
            return f"{name} of {kernel} is {options[name]}: tiles are powers of two, {MIN_TILE} at least"
    if kernel == "chunk_bwd_qkg" and options.get("num_stages", 1) > 2 and value_dim > 2 * options["BV"]:
        # Triton 3.6 made wrong dk of three stages with more than two tiles of V (measured 2026-11-22).
        return f"num_stages of {kernel} is {options['num_stages']}, which miscompiles at V = {value_dim}"
    return None


def as_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return the table of these rows."""
    return {
        Key(**{name: row[name] for name in Key.__dataclass_fields__}): LaunchOptions(
            **{kernel: dict(row[kernel]) for kernel in TILES}
        )
        for row in rows
    }


def read_table(file: Path) -> Table:
    """Read a table.

    Raises:
        ValueError: the file is invalid; with its name and the reason.
    """
    try:
        table = as_table(json.loads(file.read_text())["rows"])
        for key, launches in table.items():
            for kernel, options in asdict(launches).items():
                if error := option_error(kernel, options, key.value_dim):
                    raise ValueError(error)
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise ValueError(
            f"{file} is not a valid table of launch options ({failure!r}): delete it or run fla-bench tune"
        ) from failure
    return table
