"""Typed data config: schema and checks of Hydra's `data` group. configs/data/*.yaml explain every key."""

import math
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fla_train.utils.hub_names import is_hub_name

SOURCES = ("stdlib", "local", "hub", "mixture")
# The sources that use each of these keys, besides the parts of a mixture.
USERS = {
    "path": "data=local for files, data=hub for a dataset on the Hub",
    "name": "data=hub",
    "revision": "data=hub",
    "split": "data=hub",
}


@dataclass
class TokenizerConfig:
    """`name`: "bytes", "bpe" (trained on the corpus), a folder, a tokenizer.json, or a name on the Hub."""

    name: str = "bpe"
    eos_token: str | None = None
    vocab_size: int = 4096
    train_bytes: int = 100_000_000

    def validation_errors(self) -> list[str]:
        """Every setting that cannot work, one line each; empty when all is well."""
        errors = []
        if self.name == "bpe" and self.vocab_size < 259:
            errors.append(
                f"data.tokenizer.vocab_size={self.vocab_size} is too small for bpe: 256 bytes and 3 special "
                "tokens make 259"
            )
        if self.eos_token is not None and self.name in ("bytes", "bpe"):
            errors.append(f"data.tokenizer.eos_token is set but {self.name} has its own, <eos>")
        if self.train_bytes < 1:
            errors.append(f"data.tokenizer.train_bytes={self.train_bytes} must be at least 1")
        return errors


@dataclass
class PartConfig:
    """One part of a mixture: its text, named as in `DataConfig`, and its share of the sequences."""

    weight: float | None = None
    source: str = "local"
    path: str | None = None
    name: str | None = None
    revision: str | None = None
    split: str = "train"
    text_column: str = "text"
    id_column: str = "id"
    max_documents: int | None = None
    max_tokens: int | None = None


@dataclass
class DataConfig:
    """The text to read, how it is split and tokenized, and where the result is kept."""

    source: str = "stdlib"
    path: str | None = None
    name: str | None = None
    revision: str | None = None
    split: str = "train"
    text_column: str = "text"
    id_column: str = "id"
    validation_fraction: float = 0.01
    max_documents: int | None = None
    max_tokens: int | None = None
    append_eos: bool = True
    max_line_bytes: int = 16_000_000
    shard_tokens: int = 100_000_000
    cache_dir: str | None = None
    num_workers: int | None = None
    document_boundaries: bool = False
    contiguous: bool = False
    stream: bool = False
    stream_head_documents: int = 20_000
    subset_tokens: dict[str, int] = field(default_factory=dict)
    mixture: dict[str, PartConfig] = field(default_factory=dict)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    def validation_errors(self) -> list[str]:
        """Every setting that cannot work, one line each; empty when all is well."""
        errors = self._mixture_errors()
        if self.source not in SOURCES:
            errors.append(f"data.source={self.source} is none of {', '.join(SOURCES)}")
        if self.source in ("local", "hub") and not self.path:
            errors.append(f"data.source={self.source} needs data.path")
        errors += _hub_name_errors("data", self)
        reads = {"stdlib": (), "local": ("path",), "mixture": ()}.get(self.source, USERS)
        for key in USERS:
            if key not in reads and getattr(self, key) != getattr(DataConfig, key):
                use = (
                    "set it in a part of data.mixture" if self.source == "mixture" else f"choose {USERS[key]}"
                )
                errors.append(f"data.{key} is set but data.source={self.source} does not use it: {use}")
        if not 0 <= self.validation_fraction < 1:
            errors.append(f"data.validation_fraction={self.validation_fraction} must be in [0, 1)")
        for key in ("max_documents", "max_tokens"):
            if self.stream and getattr(self, key) is not None:
                errors.append(f"data.{key} caps no stream: leave it at null, or prepare the data")
        if self.stream and self.source == "mixture":
            errors.append("data.stream=true reads a single source: prepare the mixture")
        if self.stream and self.contiguous:
            errors.append(
                "data.contiguous=true reads many places at once, a stream one: set data.stream=false"
            )
        for key in ("max_documents", "max_tokens", "max_line_bytes", "shard_tokens", "stream_head_documents"):
            value = getattr(self, key)
            if value is not None and value < 1:
                errors.append(f"data.{key}={value} must be at least 1")
        if self.num_workers is not None and self.num_workers < 0:
            errors.append(f"data.num_workers={self.num_workers} must not be negative")
        return errors + self.tokenizer.validation_errors()

    def _mixture_errors(self) -> list[str]:
        if self.source != "mixture":
            return ["data.mixture is set but data.source is not mixture"] if self.mixture else []
        errors = (
            [] if self.mixture else ["data.source=mixture needs data.mixture: {name: {weight, path}, ...}"]
        )
        for name, part in self.mixture.items():
            if part.weight is None:
                errors.append(f"data.mixture.{name}.weight must be given: its share of the sequences")
            elif not 0 < part.weight < math.inf:
                errors.append(f"data.mixture.{name}.weight={part.weight} must be positive and finite")
            if part.source not in SOURCES[:-1]:
                errors.append(
                    f"data.mixture.{name}.source={part.source} is none of {', '.join(SOURCES[:-1])}"
                )
                continue
            own = re.compile(rf"(?<![\w.])data\.(?=({'|'.join(vars(part))})\b)")
            found = part_config(self, name).validation_errors()
            errors += [own.sub(f"data.mixture.{name}.", e) for e in found if own.match(e)]
        for key in ("max_documents", "max_tokens"):
            if getattr(self, key) is not None:
                errors.append(f"data.{key} caps no mixture: set data.mixture.PART.{key}")
        if self.tokenizer.name == "bpe":
            errors.append(
                "data.tokenizer.name=bpe is trained on one corpus: give a mixture bytes, a folder (such as "
                "the tokenizer/ of prepared data) or a Hub name"
            )
        return errors


def _hub_name_errors(key: str, config: DataConfig | PartConfig) -> list[str]:
    """Refuse a `path` that is neither a local folder nor a valid name on the Hub."""
    if config.source != "hub" or not config.path or Path(config.path).expanduser().is_dir():
        return []
    if is_hub_name(config.path):
        return []
    return [f"{key}.path={config.path} is no name of a dataset on the Hub (user/name), and no folder here"]


def part_config(config: DataConfig, name: str) -> DataConfig:
    """The settings of one part of a mixture: its source from the part, all else from the mixture."""
    settings = dict(vars(config.mixture[name]))
    del settings["weight"]
    return replace(config, mixture={}, **settings)


def validation_shard_config(config: DataConfig) -> DataConfig:
    """The settings that prepare a stream's validation shard: the first documents of its source."""
    return replace(config, stream=False, max_documents=config.stream_head_documents)


def with_absolute_paths(config: DataConfig) -> DataConfig:
    """`config` with local paths made absolute, so that a run can be resumed from another folder."""

    def part(settings: Any) -> Any:
        local = settings.source == "local" or (settings.path and Path(settings.path).expanduser().exists())
        return replace(settings, path=absolute(settings.path)) if local and settings.path else settings

    tokenizer, cache = config.tokenizer, config.cache_dir
    if tokenizer.name not in ("bytes", "bpe") and Path(tokenizer.name).expanduser().exists():
        tokenizer = replace(tokenizer, name=absolute(tokenizer.name))
    mixture = {key: part(settings) for key, settings in config.mixture.items()}
    cache = absolute(cache) if cache else cache
    return replace(part(config), tokenizer=tokenizer, mixture=mixture, cache_dir=cache)


def absolute(path: str) -> str:
    """`path` from the root, with a leading `~` expanded; a glob stays one."""
    return os.path.abspath(os.path.expanduser(path))


def cache_folder(config: DataConfig) -> Path:
    """`data.cache_dir`, or `data` below $FLA_TRAIN_CACHE (default ~/.cache/fla_train)."""
    if config.cache_dir:
        return Path(absolute(config.cache_dir))
    return Path(absolute(os.environ.get("FLA_TRAIN_CACHE") or "~/.cache/fla_train")) / "data"
