"""Typed data config: schema and checks of Hydra's `data` group. configs/data/*.yaml explain every key."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from fla_train.utils.hub_names import is_hub_name
from fla_train.utils.keys import key

SOURCES = ("stdlib", "local", "hub")
BPE_SPECIAL = 259  # 256 bytes and 3 special tokens


@dataclass
class TokenizerConfig:
    """`name`: "bytes", "bpe" (trained on the corpus), a folder, a tokenizer.json, or a name on the Hub."""

    name: str = "bpe"
    eos_token: str | None = None
    vocab_size: int = key(4096, at_least=1)
    train_bytes: int = key(100_000_000, at_least=1)

    def check(self) -> Iterator[str]:
        if self.name == "bpe" and self.vocab_size < BPE_SPECIAL:
            yield f"vocab_size={self.vocab_size} must be at least {BPE_SPECIAL} for bpe"
        if self.eos_token is not None and self.name in ("bytes", "bpe"):
            yield f"eos_token={self.eos_token} is not supported with {self.name}, which has <eos>"


@dataclass
class SourceConfig:
    """Where text comes from, and how much of it to read."""

    source: str = key("local", choices=SOURCES)
    path: str | None = key(None, sources=("local", "hub"))
    name: str | None = key(None, sources=("hub",))
    revision: str | None = key(None, sources=("hub",))
    split: str = key("train", sources=("hub",))
    text_column: str = key("text", sources=("local", "hub"))
    max_documents: int | None = key(None, at_least=1, prepared="fingerprint")
    max_tokens: int | None = key(None, at_least=1, prepared="fingerprint")

    def check(self) -> Iterator[str]:
        on_hub = self.source == "hub"
        if self.source in ("local", "hub") and not self.path:
            yield f"path must be set for source={self.source}"
        elif on_hub and not is_hub_name(self.path) and not Path(self.path).expanduser().is_dir():
            yield f"path={self.path} is neither a dataset on the Hub (user/name) nor a local folder"
        for entry in fields(SourceConfig):
            name, value, sources = entry.name, getattr(self, entry.name), entry.metadata.get("sources")
            if sources and self.source not in sources and value != entry.default:
                yield f"{name}={value} is only read with source={' or '.join(sources)}, not {self.source}"


@dataclass
class CorpusConfig(SourceConfig):
    """A corpus of a mixture: its source, and its fraction of the sequences relative to the other weights."""

    weight: float | None = key(
        None, above=0, required="the corpus's fraction of the sequences, relative to the others"
    )


@dataclass
class DataConfig(SourceConfig):
    """The text to read, how it is split and tokenized, and where the result is kept."""

    source: str = key("stdlib", choices=(*SOURCES, "mixture"))
    validation_fraction: float = key(0.01, at_least=0, below=1, prepared="fingerprint")
    append_eos: bool = key(True, prepared="fingerprint")
    max_line_bytes: int = key(16_000_000, at_least=1, prepared="nothing")
    shard_bytes: int = key(32_000_000, at_least=1, prepared="nothing")
    cache_dir: str | None = key(None, resume="free", private=True, prepared="nothing")
    num_workers: int | None = key(None, at_least=0, resume="free", prepared="nothing")
    document_boundaries: bool = key(False, resume="fixed", prepared="nothing")
    contiguous: bool = key(False, resume="fixed", prepared="nothing")
    stream: bool = key(False, prepared="nothing")
    stream_head_documents: int = key(20_000, at_least=1, prepared="nothing")
    subset_tokens: dict[str, int] = key(factory=dict, prepared="nothing")
    mixture: dict[str, CorpusConfig] = key(factory=dict, prepared="nothing")
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    def check(self) -> Iterator[str]:
        yield from super().check()
        if (self.source == "mixture") != bool(self.mixture):
            yield "mixture={NAME: {weight, path}, ...} belongs with source=mixture: set both, or neither"
        if self.source == "mixture" and self.tokenizer.name == "bpe":
            yield "tokenizer.name=bpe is trained on one corpus: give a mixture bytes, a folder or a Hub name"
        for name in ("max_documents", "max_tokens"):
            if self.source == "mixture" and getattr(self, name) is not None:
                yield f"{name} does not limit a mixture: set data.mixture.CORPUS.{name}"
            elif self.stream and getattr(self, name) is not None:
                yield f"{name} does not limit a stream: leave it at null, or prepare the data"
        if self.stream and (self.source == "mixture" or self.contiguous):
            yield "stream=true reads one source in order: set it to false for a mixture or contiguous=true"


def corpus_configs(config: DataConfig) -> dict[str, DataConfig]:
    """Return the settings that prepare each corpus of a mixture or stream; empty for a single corpus.

    A corpus of a mixture has its own source, all else is the mixture's. A stream has the corpus "": its first
    documents, which are its validation split.
    """
    if config.stream:
        return {"": replace(config, stream=False, max_documents=config.stream_head_documents)}
    corpora = {}
    for name, corpus in config.mixture.items():
        source = {entry.name: getattr(corpus, entry.name) for entry in fields(SourceConfig)}
        corpora[name] = replace(config, mixture={}, **source)
    return corpora


def make_paths_absolute(config: DataConfig) -> None:
    """Make local paths absolute, so that a run can be resumed from another folder."""
    for corpus in (config, *config.mixture.values()):
        if corpus.path and (corpus.source == "local" or Path(corpus.path).expanduser().exists()):
            corpus.path = absolute(corpus.path)
    name = config.tokenizer.name
    if name not in ("bytes", "bpe") and Path(name).expanduser().exists():
        config.tokenizer.name = absolute(name)
    if config.cache_dir:
        config.cache_dir = absolute(config.cache_dir)


def absolute(path: str) -> str:
    """Return `path` from the root, with a leading `~` expanded; a glob stays one."""
    return os.path.abspath(os.path.expanduser(path))


def cache_folder(config: DataConfig) -> Path:
    """Return `data.cache_dir`, or `data` below $FLA_TRAIN_CACHE (default ~/.cache/fla_train)."""
    if config.cache_dir:
        return Path(absolute(config.cache_dir))
    return Path(absolute(os.environ.get("FLA_TRAIN_CACHE") or "~/.cache/fla_train")) / "data"
