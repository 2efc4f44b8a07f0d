"""Launch options of the Triton kernels by architecture, head dims and sub-steps: data, never tuned in a call.

`launches.json` holds what was measured; `fla-bench tune` writes a file of the same form for this machine,
whose rows come first. A row is for

    architecture   compute capability, "9.0"
    key_dim        K rounded up to a tile: a power of two, 64 at least
    value_dim      V rounded up to a multiple of 64
    substeps       n_h

and for larger V and n_h where no other is nearer. It gives each kernel's options as its launch takes them:
tile widths BV and BKO, num_warps, num_stages, maxnreg; `gluon` 1 of `prepare` and `gradient` takes the
kernel in Gluon where it fits (prepare_wy.py, bwd_qkg.py), else these; of `adjoint` it takes one
kernel in place of it and `gradient` (bwd_fused.py). What no row serves runs with the most modest options
(`fallback`): other architectures, K of 256 with a smaller V, and float32, whose tiles take twice the shared
memory.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from fla_train.kernels.sizes import ceil_div, next_power_of_2

SHIPPED = Path(__file__).with_name("launches.json")
# Least extent of the tiles of K and V. On Hopper, Triton 3.6 compiled tiles of 32 columns to wrong dk and to
# illegal accesses (measured 2026-11-21 with its ptxas 12.8); narrower heads are padded with zeros instead.
MIN_TILE = 64
# Kernels that Hopper has in Gluon, too, and the K that these take.
IN_GLUON = ("prepare", "adjoint", "gradient")
GLUON_DIMS = (64, 128)

Options = dict[str, int]


@dataclass(frozen=True, eq=False)
class Launches:
    """Options of each kernel of one call."""

    prepare: Options
    state: Options
    adjoint: Options
    gradient: Options


@dataclass(frozen=True, order=True)
class Key:
    """What a row of the table is for."""

    architecture: str
    key_dim: int
    value_dim: int
    substeps: int

    @staticmethod
    def of(architecture: str, key_dim: int, value_dim: int, substeps: int) -> "Key":
        """The key of a call, its dims rounded up to tiles."""
        key_tile = max(MIN_TILE, next_power_of_2(key_dim))
        return Key(architecture, key_tile, ceil_div(value_dim, MIN_TILE) * MIN_TILE, substeps)


Table = dict[Key, Launches]

_forced: Launches | None = None


def user_file() -> Path:
    """Where `fla-bench tune` writes: `launches.json` in $FLA_TRAIN_CACHE (default ~/.cache/fla_train)."""
    return Path(os.environ.get("FLA_TRAIN_CACHE") or "~/.cache/fla_train").expanduser() / "launches.json"


@cache
def architecture(device: torch.device) -> str:
    """Compute capability as the table writes it; "cpu" for the interpreter."""
    if device.type != "cuda":
        return "cpu"
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def lookup(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, substeps: int) -> Launches:
    """The options to launch with.

    Raises:
        ValueError: for a user's file that cannot be used.
    """
    return _forced or _lookup(device, dtype, key_dim, value_dim, substeps)


@contextmanager
def forced(launches: Launches) -> Iterator[None]:
    """Every call inside runs with these options, whatever the tables say: how tuning tries them."""
    global _forced
    _forced = launches
    try:
        yield
    finally:
        _forced = None


@lru_cache(maxsize=1024)
def _lookup(
    device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, substeps: int
) -> Launches:
    key = Key.of(architecture(device), key_dim, value_dim, substeps)
    row = None if dtype == torch.float32 else nearest(_table(), key)
    return fallback(key.key_dim) if row is None else row


@lru_cache(maxsize=1)
def _table() -> Table:
    file = user_file()
    return read_table(SHIPPED) | (read_table(file) if file.is_file() else {})


def nearest(table: Table, key: Key) -> Launches | None:
    """The row of the largest V and then the largest n_h, neither beyond `key`; None where there is none."""
    fitting = [
        row
        for row, launches in table.items()
        if (row.architecture, row.key_dim) == (key.architecture, key.key_dim)
        and row.value_dim <= key.value_dim
        and row.substeps <= key.substeps
        and fault("gradient", launches.gradient, key.value_dim) is None
    ]
    return table[max(fitting)] if fitting else None


def fallback(key_tile: int) -> Launches:
    """Options for what no table lists: one stage and narrow tiles, which take the least shared memory.

    As compiled by Triton 3.7.1 for sm_80 and sm_90 that is 74 KB for 16-bit keys up to 128, 123 KB up to 256.
    """
    warps = {"num_warps": 8, "num_stages": 1}
    tile = {"BV": MIN_TILE}
    return Launches(warps, tile | warps, tile | warps, tile | {"BKO": MIN_TILE} | warps)


def plain(options: Options) -> Options:
    """The options that the Triton kernel takes, also where there is one in Gluon."""
    return {name: value for name, value in options.items() if name != "gluon"}


def fault(kernel: str, options: Mapping[str, int], value_dim: int) -> str | None:
    """Why options must not be launched, None where nothing speaks against them.

    Compilers made wrong code of some (docs/kernels.md, "Compilers"): these are never tried, nor taken from a
    file. `value_dim` is V rounded up to tiles.
    """
    known = {"prepare": set(), "state": {"BV"}, "adjoint": {"BV"}, "gradient": {"BV", "BKO"}}[kernel]
    if missing := known - options.keys():
        return f"{kernel} lacks {', '.join(sorted(missing))}"
    further = {"num_warps", "num_stages", "maxnreg"} | ({"gluon"} if kernel in IN_GLUON else set())
    if unknown := options.keys() - known - further:
        return f"{kernel} has no option {', '.join(sorted(unknown))}"
    for name, value in options.items():
        if type(value) is not int or value < 1:
            return f"{name} of {kernel} is {value!r}, expected a positive integer"
    for name in known:
        if options[name] < MIN_TILE or options[name] & (options[name] - 1):
            return f"{name} of {kernel} is {options[name]}: tiles are powers of two, {MIN_TILE} at least"
    if options.get("num_warps", 4) not in (1, 2, 4, 8, 16):
        return f"num_warps of {kernel} is {options['num_warps']}, expected 1, 2, 4, 8 or 16"
    if kernel == "gradient" and options.get("num_stages", 1) > 2 and value_dim > 2 * options["BV"]:
        # Triton 3.6 made wrong dk of three stages with more than two tiles of V (measured 2026-11-22).
        return f"num_stages of gradient is {options['num_stages']}, which miscompiles at V = {value_dim}"
    return None


def read_table(file: Path) -> Table:
    """Read a table.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    try:
        rows = json.loads(file.read_text())["rows"]
        table = {}
        for row in rows:
            key = Key(row["architecture"], row["key_dim"], row["value_dim"], row["substeps"])
            table[key] = Launches(**{kernel: dict(row[kernel]) for kernel in Launches.__dataclass_fields__})
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as failure:
        reason = " ".join(f"{type(failure).__name__} {failure}".split())
        raise ValueError(
            f"{file} is no table of launch options ({reason}): delete it or run fla-bench tune"
        ) from failure
    for key, launches in table.items():
        for kernel, options in asdict(launches).items():
            if reason := fault(kernel, options, key.value_dim):
                raise ValueError(f"{file}: {reason}; delete the file or run fla-bench tune")
    return table


def write_table(file: Path, table: Table, about: Mapping[str, Any]) -> None:
    """Write a table, one kernel's options a line; `about` says where it comes from.

    The file is replaced as a whole, so that a process which starts meanwhile reads either table.
    """
    rows = []
    for key, launches in sorted(table.items(), key=lambda pair: pair[0]):
        kernels = [f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(launches).items()]
        head = json.dumps(asdict(key)).removesuffix("}")
        rows.append("  " + ",\n".join([head, *kernels]) + "}")
    text = f'{{\n "about": {json.dumps(dict(about))},\n "rows": [\n' + ",\n".join(rows) + "\n ]\n}\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(file)
    _table.cache_clear()
    _lookup.cache_clear()
