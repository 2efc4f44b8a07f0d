"""Folders of prepared data in the cache: names, manifests, journals, and the Hub commits they hold.

Prepared data lies in `<cache>/<fingerprint>/`. The fingerprint covers all that determines the tokens: the
source's content, the tokenizer and the split. The folder of a mixture names its parts, prepared folders
beside it, and that of a stream its validation shard.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fla_train.data.config import DataConfig, cache_folder, part_config, validation_shard_config
from fla_train.data.mixture import integer_shares
from fla_train.data.shards import FORMAT, MANIFEST, read_manifest, verify
from fla_train.data.sources import Source, hub_commit, is_on_hub, open_source
from fla_train.data.tokenizers import TokenizerNotCached, fingerprint, load_saved, load_tokenizer
from fla_train.utils.safe_files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JOURNAL = "progress.json"
# Settings that no manifest records, since they do not change the prepared bytes.
_UNRECORDED = (
    *("cache_dir", "num_workers", "document_boundaries", "contiguous", "mixture", "subset_tokens"),
    *("stream", "stream_head_documents", "max_line_bytes"),
)


@dataclass(frozen=True)
class PreparedData:
    """A complete folder of token shards and its manifest."""

    folder: Path
    manifest: dict[str, Any]

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer's copy. Raises `ValueError` if it is lost or damaged."""
        folder = (self.folder / "tokenizer").resolve()  # that of a stream is a link to its validation shard's
        try:
            return load_saved(folder)
        except Exception as failure:
            reason = str(failure).strip().partition("\n")[0][:300]
            raise ValueError(
                f"{folder} cannot be loaded ({reason}); delete {folder.parent} and run fla-prepare again"
            ) from failure

    def parts(self) -> dict[str, "PreparedData"]:
        """{name: data that holds shards}: the parts of a mixture, else this corpus as "".

        Of a stream it is the validation shard, as "".
        """
        if "head" in self.manifest:
            return {"": open_prepared(self.folder.with_name(self.manifest["head"]))}
        if "parts" not in self.manifest:
            return {"": self}
        listed = self.manifest["parts"]
        parts = {part["name"]: open_prepared(self.folder.with_name(part["fingerprint"])) for part in listed}
        if any("parts" in part.manifest for part in parts.values()):
            raise ValueError(f"{self.folder} names a mixture as one of its parts: prepare it again")
        return parts

    def shares(self) -> dict[str, int]:
        """{part: its share of the sequences}, in the order of `parts`."""
        listed = self.manifest.get("parts", [{"name": "", "share": 1}])
        return {part["name"]: part["share"] for part in listed}

    def commits(self) -> dict[str, str]:
        """{part: the Hub's commit that it holds}, of the parts from the Hub; part "" if it is no mixture."""
        parts = self.parts() if "parts" in self.manifest else {"": self}
        return {name: part.manifest["commit"] for name, part in parts.items() if "commit" in part.manifest}

    def verify(self) -> None:
        """Compare every shard with its checksum and load the tokenizer.

        Raises:
            ValueError: naming the first file that differs, or the tokenizer.
        """
        self.tokenizer()
        for part in self.parts().values():
            verify(part.folder)
            part.tokenizer()

    def describe(self) -> list[str]:
        """Lines for the plan: documents, tokens, bytes per token, vocabulary."""
        tokenizer, splits = self.manifest["tokenizer"], self.manifest["splits"]
        lines = [
            f"{self.manifest['source']['kind']}, vocabulary {tokenizer['vocab_size']:,} ({tokenizer['name']})"
        ]
        if "parts" in self.manifest:
            shares = self.shares()
            for name, part in self.parts().items():
                share = f"{name}: {shares[name]} of {sum(shares.values())} sequences"
                lines += [f"{share}; {line}" for line in part.describe()[1:]]
            return lines
        if "head" in self.manifest:
            (shard,) = self.parts().values()
            return [f"stream of {lines[0]}", *(f"validation shard: {line}" for line in shard.describe()[1:])]
        for name, split in splits.items():
            if split["tokens"]:
                lines.append(
                    f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens, "
                    f"{split['text_bytes'] / split['tokens']:.2f} bytes per token, "
                    f"unigram entropy {split['unigram_entropy']:.3f} nats per token"
                )
            else:
                more = " (a larger data.validation_fraction holds more documents out)"
                lines.append(f"{name}: empty{more if name == 'validation' else ''}")
        return lines


def open_prepared(folder: str | Path) -> PreparedData:
    """An existing prepared folder. Raises `ValueError` if it is none or its manifest is corrupt."""
    return PreparedData(Path(folder), read_manifest(Path(folder)))


@dataclass(frozen=True)
class CachePaths:
    """The folders of one source's preparation, whether it is done or not.

    Attributes:
        tokenizer: None for bpe, which is trained on the text.
        final: the folder, complete or absent.
        building: the folder of an unfinished preparation, named after the settings and not the text, so that
            an invalid file may be repaired meanwhile.
    """

    source: Source
    tokenizer: "PreTrainedTokenizerBase | None"
    final: Path
    building: Path

    def is_ready(self) -> bool:
        return (self.final / MANIFEST).exists()

    def commit(self) -> str | None:
        """The Hub's commit that was prepared, wholly or in part, if there is one."""
        if self.is_ready():
            return read_manifest(self.final).get("commit")
        journal = read_journal(self.building)
        return (journal["now"]["cursor"] or {}).get("commit") if journal else None


def cache_paths(config: DataConfig, commit: str | None = None, *, offline: bool = False) -> CachePaths:
    """Where the single source of `config` is, or would be, prepared.

    Args:
        commit: of the Hub, to read if nothing is prepared yet; None: the current one.
        offline: fetch nothing.

    Raises:
        ValueError: the source or the tokenizer is not found, or the tokenizer lacks an end-of-sequence token.
    """
    source = open_source(config, commit)
    # A bpe tokenizer follows from the corpus and its settings, so these identify it without training.
    trains = config.tokenizer.name == "bpe"
    tokenizer = None if trains else load_tokenizer(config.tokenizer, offline=offline)
    if tokenizer is not None and config.append_eos and tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {config.tokenizer.name} has no end-of-sequence token; "
            "set data.tokenizer.eos_token, or data.append_eos=false"
        )
    identity = asdict(config.tokenizer) if tokenizer is None else fingerprint(tokenizer)
    keys = ("validation_fraction", "max_documents", "max_tokens", "append_eos")
    name = _digest(
        {
            "format": FORMAT,
            "source": source.description,
            "tokenizer": identity,
            "settings": {key: getattr(config, key) for key in keys},
        }
    )
    asked = _digest({"format": FORMAT, "settings": recorded(config), "tokenizer": identity})
    cache = cache_folder(config)
    return CachePaths(source, tokenizer, cache / name, cache / f".building-{asked}")


def recorded(config: DataConfig) -> dict[str, Any]:
    """The settings that a manifest records."""
    return {key: value for key, value in asdict(config).items() if key not in _UNRECORDED}


def find_prepared(config: DataConfig) -> PreparedData | None:
    """What `prepare` would return, if all of it is prepared. Nothing is fetched or written.

    Raises:
        ValueError: as `cache_paths`.
    """
    if config.source == "mixture":
        parts = {name: find_prepared(part_config(config, name)) for name in config.mixture}
        folder = (
            None
            if None in parts.values()
            else mixture_folder(config, {name: part.folder.name for name, part in parts.items()})
        )
    elif config.stream:
        shard = find_prepared(validation_shard_config(config))
        folder = shard and stream_folder(config, shard.folder.name)
    else:
        try:
            folder = cache_paths(config, offline=True).final
        except TokenizerNotCached:  # so nothing was prepared with it here, or the cache was deleted since
            folder = None
    return open_prepared(folder) if folder is not None and (folder / MANIFEST).exists() else None


def prepared_name(config: DataConfig) -> str | None:
    """Name of the folder that `prepare` would return; None if the tokenizer has not been fetched yet.

    Raises:
        ValueError: as `cache_paths`.
    """
    if (found := find_prepared(config)) is not None:
        return found.folder.name
    if config.source == "mixture":
        names = {name: prepared_name(part_config(config, name)) for name in config.mixture}
        return None if None in names.values() else mixture_folder(config, names).name
    if config.stream:
        shard = prepared_name(validation_shard_config(config))
        return None if shard is None else stream_folder(config, shard).name
    try:
        return cache_paths(config, offline=True).final.name
    except TokenizerNotCached:
        return None


def find_commits(config: DataConfig) -> dict[str, str]:
    """{part: the Hub's commit that `prepare` would read}, of the parts on the Hub; "" if it is no mixture.

    It is the commit that has been prepared, wholly or in part, if it was recorded; else the current one.

    Raises:
        ValueError: as `cache_paths`, or the Hub does not answer.
    """
    if config.source == "mixture":
        return {
            name: commit
            for name in config.mixture
            for commit in find_commits(part_config(config, name)).values()
        }
    if not is_on_hub(config):
        return {}
    paths = cache_paths(validation_shard_config(config) if config.stream else config)
    commit = paths.commit()
    if commit is None and (config.stream or not paths.is_ready()):  # a stream has more to read
        commit = hub_commit(config)
    return {} if commit is None else {"": commit}


def mixture_shares(config: DataConfig) -> dict[str, int]:
    """{part: its sequences in a period of the mixture}. Raises `ValueError` for weights that do not work."""
    return integer_shares({name: part.weight for name, part in config.mixture.items()})


def mixture_parts(config: DataConfig, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The manifest's entry of each part of a mixture, of which `names` has the names of the folders."""
    return [
        {"name": name, "fingerprint": names[name], "share": share}
        for name, share in mixture_shares(config).items()
    ]


def mixture_folder(config: DataConfig, names: Mapping[str, str]) -> Path:
    """The folder of a mixture whose parts lie in folders of these names."""
    return cache_folder(config) / _digest({"format": FORMAT, "parts": mixture_parts(config, names)})


def stream_folder(config: DataConfig, validation_shard: str) -> Path:
    """The folder of a stream whose validation shard lies in a folder of this name."""
    return cache_folder(config) / _digest({"head": validation_shard, "stream": True})


def read_journal(folder: Path) -> dict[str, Any] | None:
    """The journal of an unfinished preparation; None if there is none yet.

    It holds the `source`'s description and two snapshots: `now`, and `file_start`, taken at the beginning of
    the file now being read (None in the first one).

    Raises:
        ValueError: it is corrupt.
    """
    try:
        return read_json(folder / JOURNAL)
    except FileNotFoundError:
        return None
    except ValueError as failure:
        raise ValueError(f"{folder / JOURNAL} is corrupt ({failure}); delete {folder}") from failure


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
