"""Typed settings of the data: the schema of Hydra's `data` node. configs/data/*.yaml explain every key."""

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fla_train.utils.hub_names import is_hub_name

SOURCES = ("stdlib", "local", "hub", "mixture")
# What reads each of these keys, beside the parts of a mixture.
USERS = {
    "path": "data=local for files, data=hub for a dataset on the Hub",
    "name": "data=hub",
    "revision": "data=hub",
    "split": "data=hub",
}


@dataclass
class TokenizerConfig:
    """`name`: "bytes", "bpe" (trained on the corpus), or a folder or Hub name that `AutoTokenizer` loads."""

    name: str = "bpe"
    eos_token: str | None = None
    vocab_size: int = 4096
    train_bytes: int = 100_000_000


@dataclass
class PartConfig:
    """One part of a mixture: its text, named as in `DataConfig`, and its share of the sequences."""

    weight: float
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
    """What is read, how it is split and tokenized, and where the result is kept."""

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
    stream: bool = False
    stream_head_documents: int = 20_000
    mixture: dict[str, PartConfig] = field(default_factory=dict)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)


def data_faults(config: DataConfig) -> list[str]:
    """Every setting that cannot work, one line each; empty when all is well."""
    faults = [*_mixture_faults(config)]
    if config.source not in SOURCES:
        faults.append(f"data.source={config.source} is none of {', '.join(SOURCES)}")
    if config.source in ("local", "hub") and not config.path:
        faults.append(f"data.source={config.source} needs data.path")
    faults += _name_errors("data", config)
    reads = {"stdlib": (), "local": ("path",), "mixture": ()}.get(config.source, USERS)
    for key in USERS:
        if key not in reads and getattr(config, key) != getattr(DataConfig, key):
            use = "set it in a part of data.mixture" if config.source == "mixture" else f"choose {USERS[key]}"
            faults.append(f"data.{key} is set but data.source={config.source} does not use it: {use}")
    if not 0 <= config.validation_fraction < 1:
        faults.append(f"data.validation_fraction={config.validation_fraction} must be in [0, 1)")
    for key in ("max_documents", "max_tokens"):
        if config.stream and getattr(config, key) is not None:
            faults.append(f"data.{key} caps no stream: leave it at null, or prepare the data")
    if config.stream and config.source == "mixture":
        faults.append("data.stream=true reads a single source: prepare the mixture")
    for key in ("max_documents", "max_tokens", "max_line_bytes", "shard_tokens", "stream_head_documents"):
        value = getattr(config, key)
        if value is not None and value < 1:
            faults.append(f"data.{key}={value} must be at least 1")
    if config.num_workers is not None and config.num_workers < 0:
        faults.append(f"data.num_workers={config.num_workers} must not be negative")
    if config.tokenizer.name == "bpe" and config.tokenizer.vocab_size < 259:
        faults.append(
            f"data.tokenizer.vocab_size={config.tokenizer.vocab_size} is too small for bpe: 256 bytes and "
            "3 special tokens make 259"
        )
    if config.tokenizer.eos_token is not None and config.tokenizer.name in ("bytes", "bpe"):
        faults.append(f"data.tokenizer.eos_token is set but {config.tokenizer.name} has its own, <eos>")
    if config.tokenizer.train_bytes < 1:
        faults.append(f"data.tokenizer.train_bytes={config.tokenizer.train_bytes} must be at least 1")
    return faults


def _mixture_faults(config: DataConfig) -> list[str]:
    if config.source != "mixture":
        return ["data.mixture is set but data.source is not mixture"] if config.mixture else []
    faults = [] if config.mixture else ["data.source=mixture needs data.mixture: {name: {weight, path}, ...}"]
    for name, part in config.mixture.items():
        if not 0 < part.weight < math.inf:
            faults.append(f"data.mixture.{name}.weight={part.weight} must be positive and finite")
        if part.source not in SOURCES[:-1]:
            faults.append(f"data.mixture.{name}.source={part.source} is none of {', '.join(SOURCES[:-1])}")
        elif part.source != "stdlib" and not part.path:
            faults.append(f"data.mixture.{name}.path must be given")
        faults += _name_errors(f"data.mixture.{name}", part)
    for key in ("max_documents", "max_tokens"):
        if getattr(config, key) is not None:
            faults.append(f"data.{key} caps no mixture: set data.mixture.PART.{key}")
    if config.tokenizer.name == "bpe":
        faults.append(
            "data.tokenizer.name=bpe is trained on one corpus: give a mixture bytes, a folder (such as the "
            "tokenizer/ of prepared data) or a Hub name"
        )
    return faults


def _name_errors(key: str, config: DataConfig | PartConfig) -> list[str]:
    """A path that is neither a folder nor a name leads nowhere, and must not lead elsewhere."""
    if config.source != "hub" or not config.path or Path(config.path).expanduser().is_dir():
        return []
    if is_hub_name(config.path):
        return []
    return [f"{key}.path={config.path} is no name of a dataset on the Hub (user/name), and no folder here"]


def with_absolute_paths(config: DataConfig) -> DataConfig:
    """`config` with the folders of this machine as absolute paths: a run is resumed from any other folder."""

    def part(settings: Any) -> Any:
        local = settings.source == "local" or (settings.path and Path(settings.path).expanduser().exists())
        return replace(settings, path=absolute(settings.path)) if local and settings.path else settings

    tokenizer, cache = config.tokenizer, config.cache_dir
    if tokenizer.name not in ("bytes", "bpe") and Path(tokenizer.name).expanduser().is_dir():
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
        return Path(config.cache_dir).expanduser()
    return Path(os.environ.get("FLA_TRAIN_CACHE") or "~/.cache/fla_train").expanduser() / "data"
