"""Folders of prepared data in the cache, and their names.

Prepared data lie in `<cache>/<fingerprint>/`. The fingerprint of a corpus covers all that determines its
tokens: the text, the tokenizer and the split. The manifest of a mixture lists the folders of its corpora as
`parts`. That of a stream, with `stream: true`, lists the corpus that was made of its first documents.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fla_train.data.config import DataConfig, cache_folder, corpus_configs
from fla_train.data.mixture import integer_shares
from fla_train.data.shards import FORMAT, MANIFEST, check_files, damaged, read_manifest
from fla_train.data.sources import Source, open_source
from fla_train.data.tokenizers import TokenizerNotCached, fingerprint, load_saved, load_tokenizer
from fla_train.utils.filesystem import reason
from fla_train.utils.keys import rule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGUN = "begun.json"  # in the folder of an unfinished preparation: the source and its commit


@dataclass(frozen=True)
class PreparedData:
    """A complete folder of prepared data and its manifest."""

    folder: Path
    manifest: dict[str, Any]

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the tokenizer's copy. Raises `ValueError` if it is lost or damaged."""
        folder = (self.folder / "tokenizer").resolve()  # mixtures and streams link to that of a corpus
        try:
            return load_saved(folder)
        except Exception as failure:
            raise damaged(f"{folder}: {reason(failure)[:300]}", folder.parent) from failure

    def corpora(self) -> dict[str, "PreparedData"]:
        """Return {name: corpus}: the corpora of a mixture, else this corpus, or a stream's head, as ""."""
        if "parts" not in self.manifest:
            return {"": self}
        listed = self.manifest["parts"]
        return {corpus["name"]: open_prepared(self.folder.with_name(corpus["folder"])) for corpus in listed}

    def shares(self) -> dict[str, int]:
        """Return {corpus: its sequences in a period of the mixture}, in the order of `corpora`."""
        listed = self.manifest.get("parts", [{"name": "", "share": 1}])
        return {corpus["name"]: corpus["share"] for corpus in listed}

    def commits(self) -> dict[str, str]:
        """Return {corpus: its commit on the Hub} of the corpora from the Hub; "" without a mixture."""
        commits = {name: corpus.manifest.get("commit") for name, corpus in self.corpora().items()}
        return {name: commit for name, commit in commits.items() if commit}

    def verify(self) -> None:
        """Compare every shard with its checksum and load the tokenizer.

        Raises:
            ValueError: naming the first file that differs, or the tokenizer.
        """
        for corpus in self.corpora().values():
            check_files(corpus.folder, corpus.manifest, hashed=True)
            corpus.tokenizer()

    def describe(self) -> list[str]:
        """Return lines for the plan: documents, tokens, bytes per token, vocabulary."""
        tokenizer, source = self.manifest["tokenizer"], self.manifest["source"]["kind"]
        stream = "stream of " if self.manifest.get("stream") else ""
        lines = [f"{stream}{source}, vocabulary {tokenizer['vocab_size']:,} ({tokenizer['name']})"]
        shares = self.shares()
        for corpus, prepared in self.corpora().items():
            share = f"{corpus}: {shares[corpus]} of {sum(shares.values())} sequences; " if corpus else ""
            for name, split in prepared.manifest["splits"].items():
                where = f"{share}{name}{' of the first documents' if stream else ''}"
                if not split["tokens"]:
                    lines.append(f"{where}: empty (data.validation_fraction holds documents out)")
                    continue
                lines.append(
                    f"{where}: {split['documents']:,} documents, {split['tokens']:,} tokens, "
                    f"{split['text_bytes'] / split['tokens']:.2f} bytes per token, "
                    f"unigram entropy {split['unigram_entropy']:.3f} (the loss of token frequencies alone)"
                )
        return lines


def open_prepared(folder: str | Path) -> PreparedData:
    """Open a prepared folder. Raises `ValueError` if it is not one or its manifest is corrupt."""
    return PreparedData(Path(folder), read_manifest(Path(folder)))


@dataclass(frozen=True)
class CachePaths:
    """The folders of a corpus, prepared or not.

    Attributes:
        tokenizer: None for bpe, which is trained on the text.
        final: the folder, complete or absent.
        building: the folder of an unfinished preparation. It is named after the settings and not the text, so
            that an invalid file may be repaired before the preparation is resumed.
    """

    source: Source
    tokenizer: "PreTrainedTokenizerBase | None"
    final: Path
    building: Path

    def is_ready(self) -> bool:
        return (self.final / MANIFEST).exists()


def cache_paths(config: DataConfig, *, offline: bool = False) -> CachePaths:
    """Return where the corpus of `config` is, or would be, prepared.

    Args:
        offline: fetch nothing.

    Raises:
        ValueError: the source or the tokenizer does not exist, or the tokenizer has no end-of-sequence token.
    """
    source = open_source(config)
    # A bpe tokenizer follows from the corpus and its settings, so these identify it without training.
    tokenizer = None if config.tokenizer.name == "bpe" else load_tokenizer(config.tokenizer, offline=offline)
    if tokenizer is not None and config.append_eos and tokenizer.eos_token_id is None:
        name, key = config.tokenizer.name, "data.tokenizer.eos_token"
        raise ValueError(f"{name} has no EOS token: set {key}, or data.append_eos=false")
    identity = asdict(config.tokenizer) if tokenizer is None else fingerprint(tokenizer)
    settings = {k: v for k, v in vars(config).items() if rule(DataConfig, "prepared", k) == "fingerprint"}
    name = digest(source.description, identity, settings)
    request = digest(manifest_settings(config), identity, config.shard_bytes)
    cache = cache_folder(config)
    return CachePaths(source, tokenizer, cache / name, cache / f".building-{request}")


def manifest_settings(config: DataConfig) -> dict[str, Any]:
    """Return the settings that a manifest records."""
    return {k: v for k, v in asdict(config).items() if rule(DataConfig, "prepared", k) != "nothing"}


def find_prepared(config: DataConfig) -> PreparedData | None:
    """Return what `prepare` would return, if all of it is prepared. Fetch and write nothing.

    Raises:
        ValueError: as `cache_paths`.
    """
    if None in [find_prepared(corpus) for corpus in corpus_configs(config).values()]:
        return None
    folder = prepared_folder(config)
    return open_prepared(folder) if folder is not None and (folder / MANIFEST).exists() else None


def prepared_folder(config: DataConfig) -> Path | None:
    """Return the folder that `prepare` would return; None if the tokenizer is not fetched yet.

    Raises:
        ValueError: as `cache_paths`.
    """
    folders = {name: prepared_folder(corpus) for name, corpus in corpus_configs(config).items()}
    if folders:
        return None if None in folders.values() else joined_folder(config, folders)
    try:
        return cache_paths(config, offline=True).final
    except TokenizerNotCached:
        return None


def listed_corpora(config: DataConfig, folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the manifest's list of the corpora of a mixture or stream, which lie in `folders`."""
    weights = {name: corpus.weight for name, corpus in config.mixture.items()} or {"": 1}
    shares = integer_shares(weights)
    return [{"name": name, "folder": folders[name].name, "share": share} for name, share in shares.items()]


def joined_folder(config: DataConfig, folders: Mapping[str, Path]) -> Path:
    """Return the folder of a mixture or stream whose corpora lie in `folders`."""
    return cache_folder(config) / digest(config.stream, listed_corpora(config, folders))


def digest(*content: Any) -> str:
    """Return the first 16 digits of the sha256 of JSON-able content."""
    return hashlib.sha256(json.dumps([FORMAT, *content], sort_keys=True).encode()).hexdigest()[:16]
