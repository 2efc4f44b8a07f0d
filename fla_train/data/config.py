"""Typed settings of the data: the schema of Hydra's `data` node. configs/data/*.yaml explain every key."""

import os
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = ("stdlib", "local", "hub")


@dataclass
class TokenizerConfig:
    """`name`: "bytes", "bpe" (trained on the corpus), or a folder or Hub name that `AutoTokenizer` loads."""

    name: str = "bpe"
    eos_token: str | None = None
    vocab_size: int = 4096
    train_bytes: int = 100_000_000


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
    shard_tokens: int = 100_000_000
    cache_dir: str | None = None
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)


def data_faults(config: DataConfig) -> list[str]:
    """Every setting that cannot work, one line each; empty when all is well."""
    faults = []
    if config.source not in SOURCES:
        faults.append(f"data.source={config.source} is none of {', '.join(SOURCES)}")
    if config.source in ("local", "hub") and not config.path:
        faults.append(f"data.source={config.source} needs data.path")
    reads = {"stdlib": (), "local": ("path",)}.get(config.source, ("path", "name", "revision", "split"))
    for key in ("path", "name", "revision", "split"):
        if key not in reads and getattr(config, key) != getattr(DataConfig, key):
            faults.append(f"data.{key} is set but data.source={config.source} does not use it")
    if not 0 <= config.validation_fraction < 1:
        faults.append(f"data.validation_fraction={config.validation_fraction} must be in [0, 1)")
    for key in ("max_documents", "max_tokens", "shard_tokens"):
        value = getattr(config, key)
        if value is not None and value < 1:
            faults.append(f"data.{key}={value} must be at least 1")
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


def cache_folder(config: DataConfig) -> Path:
    """`data.cache_dir`, or `data` below $FLA_TRAIN_CACHE (default ~/.cache/fla_train)."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser()
    return Path(os.environ.get("FLA_TRAIN_CACHE") or "~/.cache/fla_train").expanduser() / "data"
