"""Several prepared corpora as one, each with its share of the sequences.

A mixture lies in `<cache>/<fingerprint>/` like prepared data: its manifest names its parts, prepared folders
beside it, and the folder holds the tokenizer they share. No token is copied, so other weights cost nothing.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fla_train.data.config import DataConfig, cache_folder
from fla_train.data.dataset import Sequences
from fla_train.data.faults import Interrupted
from fla_train.data.interleave import integer_shares, turns
from fla_train.data.lock import Log, locked, unwritable
from fla_train.data.prepared import PreparedData, open_prepared
from fla_train.data.shards import FORMAT, MANIFEST, write_manifest


class MixtureSequences:
    """Sequence i is a pure function of i: the turn is that of place `i % period`, and each part is read in
    its own order.

    Args:
        parts: the datasets; a part that is used up begins its next epoch.
        shares: turns of each part per period.
    """

    def __init__(self, parts: list[Sequences], shares: list[int]):
        self.parts = parts
        self._shares = np.asarray(shares, dtype=np.int64)
        self._turns = turns(shares)
        self._rank = np.empty_like(self._turns)  # how many turns of the same part come before in the period
        for part in range(len(parts)):
            mine = self._turns == part
            self._rank[mine] = np.arange(mine.sum())

    def __len__(self) -> int:
        """Sequences until some part has been read once."""
        return min(
            len(part) * len(self._turns) // int(share)
            for part, share in zip(self.parts, self._shares, strict=True)
        )

    def sequences(self, indices: np.ndarray) -> torch.Tensor:
        """Sequences `indices` (int64, >= 0). Returns [n, seq_len] int64."""
        part, within = self.places(indices)
        out: torch.Tensor | None = None
        for number in np.unique(part):
            mine = part == number
            rows = self.parts[number].sequences(within[mine])
            if out is None:
                out = rows.new_empty(len(part), rows.shape[1])
            out[torch.from_numpy(mine)] = rows
        assert out is not None
        return out

    def boundaries(self, indices: np.ndarray) -> list[np.ndarray]:
        """For each sequence, where in (0, seq_len) a new document begins: ascending int64."""
        part, within = self.places(indices)
        return [
            self.parts[number].boundaries(np.array([index]))[0]
            for number, index in zip(part, within, strict=True)
        ]

    def places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which part each index is of, and its index there: both [n] int64."""
        periods, place = np.divmod(np.asarray(indices, dtype=np.int64), len(self._turns))
        part = self._turns[place]
        return part, periods * self._shares[part] + self._rank[place]


def prepare_mixture(
    config: DataConfig, prepare: Callable[[DataConfig, str], PreparedData], log: Log
) -> PreparedData:
    """Prepare every part, and the folder that joins them.

    Args:
        prepare: gets a part's settings and its name.

    Raises:
        ValueError: what preparing a part raises, naming the part; or weights that do not work.
    """
    parts = {}
    for name in _shares(config):
        log(f"data: part {name} of the mixture")
        try:
            parts[name] = prepare(part_config(config, name), name)
        except ValueError as failure:
            kind = Interrupted if isinstance(failure, Interrupted) else ValueError
            raise kind(f"data.mixture.{name}: {failure}") from failure
    manifest = _manifest(parts, _shares(config))
    final = mixture_folder(config, parts)
    if not (final / MANIFEST).exists():
        # All machines of a run, and all runs of a sweep, come here at once.
        with locked(final.with_name(f".{final.name}.lock"), log):
            if not (final / MANIFEST).exists():
                try:
                    _join(parts, manifest, final)
                except OSError as failure:
                    raise unwritable(final, failure) from failure
    return open_prepared(final)


def _join(parts: dict[str, PreparedData], manifest: dict[str, Any], final: Path) -> None:
    """Build the folder beside its place, then rename it."""
    building = final.with_name(f".building-{final.name}")
    shutil.rmtree(building, ignore_errors=True)  # what a kill has left
    shutil.copytree(next(iter(parts.values())).folder / "tokenizer", building / "tokenizer")
    write_manifest(building, manifest)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(building, final)


def part_config(config: DataConfig, name: str) -> DataConfig:
    """The settings of one part: its own source, and all else from the mixture."""
    part = config.mixture[name]
    keys = ("path", "name", "revision", "split", "text_column", "id_column", "max_documents", "max_tokens")
    return replace(config, mixture={}, source=part.source, **{key: getattr(part, key) for key in keys})


def mixture_folder(config: DataConfig, parts: dict[str, PreparedData]) -> Path:
    """Where the folder that joins `parts` lies, or would lie."""
    return cache_folder(config) / _manifest(parts, _shares(config))["fingerprint"]


def _shares(config: DataConfig) -> dict[str, int]:
    return integer_shares({name: part.weight for name, part in config.mixture.items()})


def _manifest(parts: dict[str, PreparedData], shares: dict[str, int]) -> dict[str, Any]:
    listed = [
        {"name": name, "fingerprint": parts[name].folder.name, "share": share}
        for name, share in shares.items()
    ]
    content = json.dumps({"format": FORMAT, "parts": listed}, sort_keys=True)
    first = next(iter(parts.values())).manifest
    splits = {}
    for split in ("train", "validation"):
        entries = [part.manifest["splits"][split] for part in parts.values()]
        sums = {key: sum(entry[key] for entry in entries) for key in ("documents", "tokens", "text_bytes")}
        splits[split] = sums | {"unigram_entropy": None, "shards": []}
    return {
        "format": FORMAT,
        "fingerprint": hashlib.sha256(content.encode()).hexdigest()[:16],
        "settings": first["settings"] | {"source": "mixture"},
        "source": {"kind": "mixture of " + ", ".join(parts)},
        "parts": listed,
        "dtype": first["dtype"],
        "tokenizer": first["tokenizer"],
        "splits": splits,
    }
