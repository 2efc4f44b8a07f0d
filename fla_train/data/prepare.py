"""Prepare data: tokenize a corpus once into shards; join corpora to a mixture; begin a stream.

A corpus is built in a hidden folder of the cache, which is renamed when it is complete. The same command
resumes a preparation that was killed or met an error: it keeps the shards whose slices of the text are
unchanged. File locks keep concurrent preparations apart.
"""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from fla_train.data import cache, shards
from fla_train.data.cache import PreparedData, open_prepared
from fla_train.data.config import DataConfig, corpus_configs
from fla_train.data.shards import FORMAT, MANIFEST, SPLITS
from fla_train.data.sources import Source, hub_commit, is_on_hub, open_source
from fla_train.data.tokenize import is_held_out, make_encoder, tokenize_source
from fla_train.data.tokenizers import fingerprint, ids_needed, load_saved, load_tokenizer
from fla_train.utils.filesystem import move_folder, save_tokenizer, write_whole
from fla_train.utils.keys import require_valid
from fla_train.utils.locks import locked
from fla_train.utils.safe_files import find_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COUNTS = ("documents", "tokens", "text_bytes")  # numbers of each split
_KEPT = ("bytes", "sha256", *SPLITS)  # what a manifest keeps of a shard's record
_COUNT_AT_ONCE = 1 << 20  # tokens; to count one takes 8 bytes
Log = Callable[[str], None]


def prepare(config: DataConfig, log: Log = print, commits: Mapping[str, str] | None = None) -> PreparedData:
    """Tokenize the source of `config` into the cache, or resume, or return data that is prepared already.

    A progress bar on stderr is updated once a minute if stderr is not a terminal.

    Args:
        log: receives one line at each stage.
        commits: the Hub's commit to read, by corpus of a mixture; "" without one. A dataset not listed
            is read at the commit that was prepared before, or that `data.revision` points to now.

    Raises:
        ValueError: settings that cannot work; missing or invalid input, naming the file; data prepared from
            another commit, or of which shards are lost. Complete shards are kept.
        OSError: the disk is full or can't be written; the same command resumes.
        Interrupted: the network or a process failed; the same command resumes.
    """
    require_valid(config, "data.")
    commits, prepared = commits or {}, {}

    def note(line: str) -> None:
        log(f"data: {line}")

    for name, corpus in corpus_configs(config).items():
        if name:
            note(f"corpus {name} of the mixture")
        prepared[name] = _prepare_corpus(corpus, note, commits.get(name))
    if prepared:
        return _joined(config, prepared)
    return _prepare_corpus(config, note, commits.get(""))


def check_first_document(config: DataConfig) -> None:
    """Read the first document of each source that is on this machine.

    Raises:
        ValueError: there is none, or it can't be read, or lacks the text column.
    """
    for corpus in list(corpus_configs(config).values()) or [config]:
        local = corpus.path and corpus.source in ("local", "hub") and not is_on_hub(corpus)
        if local and next(open_source(corpus).texts(), None) is None:
            raise ValueError(f"data.path={corpus.path} holds no document")


def _prepare_corpus(config: DataConfig, log: Log, commit: str | None) -> PreparedData:
    """Return the prepared folder of one corpus. Build it under locks if it is not there yet."""
    paths = cache.cache_paths(config)
    if not paths.is_ready():
        # One text at two paths is built in two folders, each of which would replace `final`.
        building = paths.building.with_suffix(".lock")
        final = paths.final.with_name(f".{paths.final.name}.lock")
        with locked(building, log), locked(final, log):
            if not paths.is_ready():  # another process may have prepared it while this one waited
                _build(paths, config, commit, log)
    prepared = open_prepared(paths.final)
    shards.check_files(prepared.folder, prepared.manifest, hashed=False)
    if commit is not None and prepared.commits().get("", commit) != commit:
        raise ValueError(f"{paths.final} holds another commit of {config.path} than {commit}: delete it")
    return prepared


def _joined(config: DataConfig, prepared: dict[str, PreparedData]) -> PreparedData:
    """Write the manifest that joins the corpora of a mixture or stream, and a link to their tokenizer.

    No token is copied. An equal manifest is not written again, since the cache may be read-only.
    """
    folders = {name: corpus.folder for name, corpus in prepared.items()}
    first = next(iter(prepared.values()))
    manifest = first.manifest | {"parts": cache.listed_corpora(config, folders), "shards": []}
    if config.stream:
        # The corpus may have been prepared when the same text lay elsewhere, or with other limits.
        now = {key: getattr(config, key) for key in ("path", "max_line_bytes", "shard_bytes")}
        manifest["settings"] = manifest["settings"] | {"max_documents": None} | now
        train = dict.fromkeys(("documents", "text_bytes", "unigram_entropy")) | {"tokens": math.inf}
        manifest |= {"stream": True, "splits": manifest["splits"] | {"train": train}}
    else:
        manifest["settings"] = manifest["settings"] | {"source": "mixture"}
        manifest |= {"source": {"kind": "mixture of " + ", ".join(prepared)}, "commit": None, "splits": {}}
        for split in SPLITS:
            entries = [corpus.manifest["splits"][split] for corpus in prepared.values()]
            sums = {key: sum(entry[key] for entry in entries) for key in _COUNTS}
            manifest["splits"][split] = sums | {"unigram_entropy": None}
    folder = cache.joined_folder(config, folders)
    joined = PreparedData(folder, manifest)
    if not (folder / MANIFEST).is_file() or open_prepared(folder) != joined:
        # All machines of a run, and all runs of a sweep, may come here at once and write the same.
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (folder / "tokenizer").symlink_to(Path("..") / first.folder.name / "tokenizer")
        shards.write_manifest(folder, manifest)
    return joined


def _build(paths: cache.CachePaths, config: DataConfig, commit: str | None, log: Log) -> None:
    """Fill `building` with the tokenizer, the shards and, last, the manifest; then rename it to `final`."""
    final, building, tokenizer = paths.final, paths.building, paths.tokenizer
    begun = find_json(building / cache.BEGUN) or {}  # empty without an unfinished preparation
    if is_on_hub(config):
        commit = commit or begun.get("commit") or hub_commit(config)
    source = paths.source if commit is None else open_source(config, commit)
    now = {"source": source.description, "commit": commit}
    local = config.source == "local"
    # The slices of local files have identities. A bpe tokenizer is trained on the whole text.
    if begun and (now == begun or (local and config.tokenizer.name != "bpe")):
        log(f"resuming {building}, for {final}")
    else:
        changed = ", since the text has changed" if begun else ""
        # The number shows whether files of other kinds were left out.
        what = f"{len(source.description['files']):,} local file(s)" if local else config.source
        log(f"preparing {what} in {final}{changed}")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        if tokenizer is None:
            log(f"training a bpe tokenizer of {config.tokenizer.vocab_size} tokens")
            tokenizer = load_tokenizer(config.tokenizer, _train_texts(source, config))
        save_tokenizer(tokenizer, building / "tokenizer")
    write_whole(building / cache.BEGUN, json.dumps(now))
    tokenizer = tokenizer or load_saved(building / "tokenizer")
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    manifest = {
        "format": FORMAT,
        "settings": cache.manifest_settings(config),
        "source": source.description,
        "commit": commit,
        "tokenizer": {
            "name": config.tokenizer.name,
            "fingerprint": fingerprint(tokenizer),
            "vocab_size": len(tokenizer),
            **{key: getattr(tokenizer, key) for key in special},
        },
        **_tokenize(source, config, building, tokenizer),
    }
    if not manifest["splits"]["train"]["tokens"]:
        shutil.rmtree(building)
        raise ValueError(f"{config.path or config.source} has no training text; see data.validation_fraction")
    if open_source(config, commit).description != source.description:
        if config.source != "local":  # its slices do not tell which of them were read after the change
            shutil.rmtree(building)
        raise ValueError(f"data.path={config.path} changed while it was prepared: run the same command again")
    shards.write_manifest(building, manifest)
    move_folder(building, final)
    # Only a resumed preparation needs the records, and shards beyond a limit.
    kept = {MANIFEST, *(shards.shard_file(number) for number in range(len(manifest["shards"])))}
    for file in final.iterdir():
        if file.is_file() and file.name not in kept:
            file.unlink()


def _tokenize(
    source: Source, config: DataConfig, building: Path, tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, Any]:
    """Tokenize the source. Return the manifest's entries about the shards."""
    ids = ids_needed(tokenizer)
    dtype = "uint16" if ids <= 1 << 16 else "uint32"
    encoder = make_encoder(tokenizer, building / "tokenizer", config, dtype)
    limits = config.num_workers, config.max_documents, config.max_tokens
    records: list[shards.Record] = []
    token_counts = {split: np.zeros(ids, np.int64) for split in SPLITS}  # by token id
    sums = {split: dict.fromkeys(_COUNTS, 0) for split in SPLITS}
    bar = _progress_bar(source, config)
    with closing(tokenize_source(encoder, source.slices, building, *limits)) as finished, closing(bar):
        for number, record in enumerate(finished):
            records.append(record)
            for split in SPLITS:
                shard = shards.Shard(building, number, record, split, dtype)
                for start in range(0, record[split]["tokens"], _COUNT_AT_ONCE):
                    tokens = shard.tokens(start, start + _COUNT_AT_ONCE)
                    token_counts[split] += np.bincount(tokens, minlength=ids)
                sums[split] = {key: sums[split][key] + record[split][key] for key in _COUNTS}
            _show_progress(bar, record, sum(sums[split]["tokens"] for split in SPLITS))
    return {
        "dtype": dtype,
        "splits": {s: sums[s] | {"unigram_entropy": shards.unigram_entropy(token_counts[s])} for s in SPLITS},
        "shards": [{key: record[key] for key in _KEPT} for record in records],
    }


def _progress_bar(source: Source, config: DataConfig) -> tqdm:
    """Return a bar over the tokens or documents up to their limit, or else over the source's bytes."""
    return tqdm(
        total=config.max_tokens or config.max_documents or source.size,
        unit="tok" if config.max_tokens else "doc" if config.max_documents else "B",
        unit_scale=True,
        desc="tokenizing",
        # A log file gets a line a minute.
        mininterval=0.1 if sys.stderr.isatty() else 60.0,
        miniters=1,
    )


def _show_progress(bar: tqdm, record: shards.Record, tokens: int) -> None:
    """Advance the bar by a shard. `tokens` is the number of tokens so far."""
    if bar.disable:  # by TQDM_DISABLE; such a bar has no unit
        return
    step = {"tok": record["train"]["tokens"], "doc": record["documents"], "B": record["size"]}[bar.unit]
    if record.get("resumed"):
        bar.initial += step  # not tokenized now, so it must not count for the speed
    bar.set_postfix_str(f"{tokens / 1e6:,.1f}M tokens", refresh=False)
    bar.update(step)


def _train_texts(source: Source, config: DataConfig) -> Iterator[str]:
    """Yield the training documents up to `max_documents`."""
    texts = islice(source.texts(), config.max_documents)
    return (text for text in texts if not is_held_out(text.encode(), config.validation_fraction))
