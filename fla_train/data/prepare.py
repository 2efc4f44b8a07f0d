"""Turn a source into memory-mapped token shards, once.

The result lies in `<cache>/<fingerprint>/`: `tokenizer/`, `train/`, `validation/` and `manifest.json`. The
fingerprint covers all that decides the tokens: the source's content, the tokenizer and the split. A folder is
built beside its final place and renamed, so it is complete or absent; a build that was killed or met a fault
stays there and goes on when the same command is given again. A lock that dies with its process keeps builders
apart.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fla_train.data.build import PROGRESS, Build, read_journal, resume
from fla_train.data.config import DataConfig, data_faults
from fla_train.data.encoding import is_held_out, utf8
from fla_train.data.lock import Log, locked, unwritable
from fla_train.data.mixture import prepare_mixture
from fla_train.data.place import Place, place_of, recorded
from fla_train.data.prepared import PreparedData, open_prepared
from fla_train.data.progress import Progress
from fla_train.data.shards import FORMAT, MANIFEST, check_sizes, write_manifest
from fla_train.data.sources import Source
from fla_train.data.stream import prepare_stream
from fla_train.data.tokenizers import fingerprint, ids_needed, load_tokenizer, make_encoder
from fla_train.utils.filesystem import sync

NO_COMMITS: Mapping[str, str] = MappingProxyType({})


def prepare(
    config: DataConfig,
    log: Log = print,
    progress: bool = True,
    commits: Mapping[str, str] = NO_COMMITS,
) -> PreparedData:
    """Tokenize the source of `config` into the cache, go on with what was begun, or reuse what is there.

    Args:
        log: receives one line at each stage.
        progress: show progress, tokens/s and the time left: a bar on a terminal, else a line a minute.
        commits: of datasets on the Hub, the commit to read by the part of a mixture, "" without one; of the
            others it is what was prepared before, or what `data.revision` points to now.

    Raises:
        ValueError: for settings that cannot work, for missing or corrupt input, naming the file, for a disk
            that is full, and for data prepared from another commit, or of which shards are lost or cut short.
            What was tokenized before is kept for the next attempt.
    """
    if faults := data_faults(config):
        raise ValueError("; ".join(faults))

    def part(settings: DataConfig, name: str = "") -> PreparedData:
        return prepare(settings, log, progress, {"": commits[name]} if name in commits else NO_COMMITS)

    if config.source == "mixture":
        return prepare_mixture(config, part, log)
    if config.stream:
        return prepare_stream(config, part, commits.get(""), log)
    commit = commits.get("")
    place = place_of(config, commit)
    if not place.is_ready():
        with locked(place.building.with_suffix(".lock"), log):
            if not place.is_ready():  # another process may have built it while this one waited
                try:
                    _build(place, config, commit, log, progress)
                except OSError as failure:
                    raise unwritable(place.final, failure) from failure
    prepared = open_prepared(place.final)
    for split in prepared.manifest["splits"]:
        check_sizes(prepared.folder, prepared.manifest, split)
    if commit is not None and prepared.commits().get("", commit) != commit:
        raise ValueError(
            f"{place.final} holds commit {prepared.commits()['']} of {config.path}, and this run reads "
            f"{commit}: delete that folder, or set another data.cache_dir, and the same command prepares it"
        )
    return prepared


def _build(place: Place, config: DataConfig, commit: str | None, log: Log, show: bool) -> None:
    """Fill `building` with the tokenizer, both splits and, last, the manifest; then rename it to `final`."""
    source, tokenizer, final, building = place.source, place.tokenizer, place.final, place.building
    resumed = _resume(place, config, commit, log)
    if resumed is None:
        log(f"data: preparing {config.source} in {final}")
        if tokenizer is not None:
            _tell_of_another_tokenizer(final.parent, config, source, fingerprint(tokenizer), log)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        if tokenizer is None:
            log(f"data: training a bpe tokenizer of {config.tokenizer.vocab_size} tokens")
            tokenizer = load_tokenizer(config.tokenizer, _train_texts(source, config))
        tokenizer.save_pretrained(building / "tokenizer")
        for file in (building / "tokenizer").iterdir():
            sync(file)
    elif tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(building / "tokenizer", trust_remote_code=False)
    manifest = _begin_manifest(config, source, tokenizer, final.name)
    build = Build(building, config, manifest["dtype"], ids_needed(tokenizer), source.description, resumed)
    if resumed is not None:
        log(f"data: going on after {build.read:,} documents, {build.tokens:,} tokens, for {final}")
    encoder = make_encoder(tokenizer, building / "tokenizer", config, manifest["dtype"])
    bar = _progress(config, source, log, show)
    splits = build.run(source, encoder, bar)
    if not splits["train"]["tokens"]:
        shutil.rmtree(building)
        raise ValueError("the corpus has no training document; see data.path and data.validation_fraction")
    assert build.cursor is not None  # something was read
    if commit := build.cursor.get("commit"):
        manifest["commit"] = commit  # of the Hub
    write_manifest(building, manifest | {"empty_documents": build.empty, "splits": splits})
    for journal in building.glob(f"{PROGRESS}*"):  # and one that a kill kept from taking its place
        journal.unlink()
    if (final / MANIFEST).exists():  # another path to the same text has been prepared meanwhile
        shutil.rmtree(building)
    else:
        shutil.rmtree(final, ignore_errors=True)  # without a manifest it is no result
        os.rename(building, final)
        sync(final.parent)
    if show and bar.seconds:
        rate = bar.tokens / bar.seconds / 1e6
        log(f"data: {bar.tokens:,} tokens in {bar.seconds:.1f} s, {rate:.3f}M tokens/s")


def _tell_of_another_tokenizer(
    cache: Path, config: DataConfig, source: Source, tokenizer: str, log: Log
) -> None:
    """Say so if this text was prepared before with a tokenizer of the same name that was another."""
    for path in cache.glob(f"*/{MANIFEST}"):
        try:
            manifest = json.loads(path.read_text())
            before = manifest["tokenizer"]["name"], manifest["source"]
            changed = manifest["tokenizer"]["fingerprint"] != tokenizer
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if changed and before == (config.tokenizer.name, source.description):
            log(f"data: tokenizer {config.tokenizer.name} has changed since {path.parent} was prepared")


def _resume(place: Place, config: DataConfig, commit: str | None, log: Log) -> dict[str, Any] | None:
    """The journal an earlier attempt left, at a snapshot whose text is still the source's."""
    journal = read_journal(place.building)
    if journal is None:
        return None
    if commit is not None and place.commit() not in (None, commit):
        log(f"data: {place.building} was begun with commit {place.commit()}: starting anew with {commit}")
        return None
    # bpe was trained on the text as it was.
    description = place.source.description
    same = journal["source"] == description
    resumed = resume(journal, description) if same or config.tokenizer.name != "bpe" else None
    if resumed is None:
        log(f"data: the text has changed since {place.building} was begun: starting anew")
    return resumed


def _begin_manifest(
    config: DataConfig, source: Source, tokenizer: PreTrainedTokenizerBase, name: str
) -> dict[str, Any]:
    """All of the manifest that is known before tokenizing."""
    return {
        "format": FORMAT,
        "fingerprint": name,
        "settings": recorded(config),
        "source": source.description,
        "dtype": "uint16" if ids_needed(tokenizer) <= 1 << 16 else "uint32",
        "tokenizer": {
            "name": config.tokenizer.name,
            "fingerprint": fingerprint(tokenizer),
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
    }


def _train_texts(source: Source, config: DataConfig) -> Iterator[str]:
    """The training documents up to `max_documents`."""
    for number, document in enumerate(source.documents()):
        if number == config.max_documents:
            return
        if not is_held_out(utf8(document), config.validation_fraction):
            yield document["text"]


def _progress(config: DataConfig, source: Source, log: Log, show: bool) -> Progress:
    if config.max_tokens is not None:
        return Progress(lambda: config.max_tokens, "tok", log, show)
    if config.max_documents is not None:
        return Progress(lambda: config.max_documents, "doc", log, show)
    return Progress(source.total, source.unit, log, show)
