"""Where the preparation of a source lies, and which commit of the Hub it holds, before any text is read."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from fla_train.data.build import read_journal
from fla_train.data.config import DataConfig, cache_folder
from fla_train.data.mixture import mixture_folder, part_config
from fla_train.data.prepared import PreparedData, open_prepared
from fla_train.data.shards import FORMAT, MANIFEST, read_manifest
from fla_train.data.sources import Source, hub_commit, is_on_hub, open_source
from fla_train.data.stream import head_config, stream_folder
from fla_train.data.tokenizers import TokenizerNotCached, fingerprint, load_tokenizer

# Settings that no manifest records: equal preparations are equal byte for byte, wherever they lie and however
# they came about.
_UNRECORDED = (
    *("cache_dir", "num_workers", "document_boundaries", "mixture"),
    *("stream", "stream_head_documents", "max_line_bytes"),
)


@dataclass(frozen=True)
class Place:
    """One source's preparation, done or not.

    Attributes:
        tokenizer: None for bpe, which is trained on the text.
        final: the folder, complete or absent.
        building: the folder of an unfinished build, named by what it was asked for, not by the text: a faulty
            file may get repaired.
    """

    source: Source
    tokenizer: PreTrainedTokenizerBase | None
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


def place_of(config: DataConfig, commit: str | None = None, *, offline: bool = False) -> Place:
    """Where the single source of `config` is, or would be, prepared.

    Args:
        commit: of the Hub, to be read if there is nothing yet; None: that of now.
        offline: fetch nothing.

    Raises:
        ValueError: the source or the tokenizer is not to be found, or they do not go together.
    """
    source = open_source(config, commit)
    # A bpe tokenizer follows from the corpus and its size, so it needs no training to be told apart.
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
    return Place(source, tokenizer, cache / name, cache / f".building-{asked}")


def recorded(config: DataConfig) -> dict[str, Any]:
    """The settings that a manifest records."""
    return {key: value for key, value in asdict(config).items() if key not in _UNRECORDED}


def find_prepared(config: DataConfig) -> PreparedData | None:
    """What `prepare` would return, if all of it is there already. Nothing is read, fetched or written for it.

    Raises:
        ValueError: as `place_of`.
    """
    if config.source == "mixture":
        parts = {name: find_prepared(part_config(config, name)) for name in config.mixture}
        folder = None if None in parts.values() else mixture_folder(config, parts)
    elif config.stream:
        head = find_prepared(head_config(config))
        folder = head and stream_folder(config, head)
    else:
        try:
            folder = place_of(config, offline=True).final
        except TokenizerNotCached:  # so nothing can have been prepared with it here, or it was lost since
            folder = None
    return open_prepared(folder) if folder is not None and (folder / MANIFEST).exists() else None


def prepared_name(config: DataConfig) -> str | None:
    """Name of the folder that `prepare` would return; None: only preparing it tells.

    Raises:
        ValueError: as `place_of`.
    """
    if (found := find_prepared(config)) is not None:
        return found.folder.name
    if config.source == "mixture" or config.stream:  # named after their parts
        return None
    try:
        return place_of(config, offline=True).final.name
    except TokenizerNotCached:
        return None


def find_commits(config: DataConfig) -> dict[str, str]:
    """{part: the Hub's commit that `prepare` would read}, of the parts that lie on the Hub; "": no mixture.

    Of what has been prepared, wholly or in part, it is the commit prepared, if that was kept; else the one of
    now.

    Raises:
        ValueError: as `place_of`, or the Hub does not tell.
    """
    if config.source == "mixture":
        return {
            name: commit
            for name in config.mixture
            for commit in find_commits(part_config(config, name)).values()
        }
    if not is_on_hub(config):
        return {}
    place = place_of(head_config(config) if config.stream else config)
    commit = place.commit()
    if commit is None and (config.stream or not place.is_ready()):  # a stream has more to read
        commit = hub_commit(config)
    return {} if commit is None else {"": commit}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
