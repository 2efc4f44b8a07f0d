"""Prepare data: tokenize a source once into memory-mapped shards, or join prepared parts into a mixture.

A folder (see `cache.py`) is built beside its final place and renamed, so it is complete or absent. Every few
seconds the shards are flushed and the journal is replaced by the writers' states and the position reached in
the source. A preparation that was killed or met an error is resumed from its journal by the same command:
whatever lies beyond the journal is cut off, so the finished shards are those of an undisturbed preparation,
byte for byte, whatever the number of tokenizing processes. A file lock keeps concurrent preparations apart.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fla_train.data.cache import (
    JOURNAL,
    CachePaths,
    PreparedData,
    cache_paths,
    mixture_folder,
    mixture_parts,
    mixture_shares,
    open_prepared,
    read_journal,
    recorded,
    stream_folder,
)
from fla_train.data.config import DataConfig, part_config, validation_shard_config
from fla_train.data.files import Cursor, find_files
from fla_train.data.shards import FORMAT, MANIFEST, ShardWriter, check_sizes, write_manifest
from fla_train.data.sources import Source, is_on_hub, open_source
from fla_train.data.tokenize import Encoded, Encoder, encode_all, is_held_out, make_encoder, utf8
from fla_train.data.tokenizers import fingerprint, ids_needed, load_saved, load_tokenizer
from fla_train.utils.errors import Interrupted
from fla_train.utils.filesystem import move_folder, replaced_folder, save_tokenizer, sync, write_whole
from fla_train.utils.keys import require_valid
from fla_train.utils.locks import locked
from fla_train.utils.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMMIT_SECONDS = 10.0  # of work that a kill can cost
NO_COMMITS: Mapping[str, str] = MappingProxyType({})
_SPLITS = ("train", "validation")
# Settings of a tokenizer that change no ids and are no part of its fingerprint.
_NO_IDS = (
    *("chat_template", "padding_side", "truncation_side", "model_max_length"),
    *("special_tokens_map", "clean_up_tokenization_spaces"),
)
Log = Callable[[str], None]


def prepare(
    config: DataConfig, log: Log = print, progress: bool = True, commits: Mapping[str, str] = NO_COMMITS
) -> PreparedData:
    """Tokenize the source of `config` into the cache, or resume, or return what is prepared already.

    Args:
        log: receives one line at each stage.
        progress: show progress, tokens/s and the time left: a bar on a terminal, else a line a minute.
        commits: the Hub's commit to read, by the part of a mixture, "" without one. A dataset that is not
            named is read at the commit that was prepared before, or that `data.revision` points to now.

    Raises:
        ValueError: settings that cannot work; missing or invalid input, naming the file; data prepared from
            another commit, or of which shards are lost or cut short. What was tokenized before is kept.
        Interrupted: the disk, the network or a process failed; another attempt resumes.
    """
    prepared = _prepare(config, log, progress, commits)
    _log_other_copy(prepared, config, log)
    return prepared


def _prepare(config: DataConfig, log: Log, progress: bool, commits: Mapping[str, str]) -> PreparedData:
    """`prepare` of a config, of a part of a mixture, or of the validation shard of a stream."""
    require_valid(config, "data.")
    if config.source == "mixture":
        return _prepare_mixture(config, log, progress, commits)
    if config.stream:
        return _prepare_stream(config, log, progress, commits)
    commit = commits.get("")
    paths = cache_paths(config, commit)
    if not paths.is_ready():
        with _locked(paths.final, paths.building.with_suffix(".lock"), log):
            if not paths.is_ready():  # another process may have prepared it while this one waited
                _build(paths, config, commit, log, progress)
    prepared = open_prepared(paths.final)
    for split in prepared.manifest["splits"]:
        check_sizes(prepared.folder, prepared.manifest, split)
    if commit is not None and prepared.commits().get("", commit) != commit:
        raise ValueError(
            f"{paths.final} holds commit {prepared.commits()['']} of {config.path}, and this run reads "
            f"{commit}: delete that folder, or set another data.cache_dir, and the same command prepares it"
        )
    return prepared


def _prepare_mixture(
    config: DataConfig, log: Log, progress: bool, commits: Mapping[str, str]
) -> PreparedData:
    """Prepare every part, and the folder that joins them. No token is copied: other weights cost nothing."""
    prepared = {}
    for name, part in config.mixture.items():
        if part.source == "local":  # so that all errors come before hours of tokenizing
            with _of_part(name):
                find_files(part.path)
    for name in mixture_shares(config):
        log(f"data: part {name} of the mixture")
        commit = {"": commits[name]} if name in commits else NO_COMMITS
        with _of_part(name):
            prepared[name] = _prepare(part_config(config, name), log, progress, commit)
    names = {name: part.folder.name for name, part in prepared.items()}
    parts, folder = mixture_parts(config, names), mixture_folder(config, names)
    if not (folder / MANIFEST).exists():
        # All machines of a run, and all runs of a sweep, come here at once.
        with _locked(folder, folder.with_name(f".{folder.name}.lock"), log):
            if not (folder / MANIFEST).exists():
                with replaced_folder(folder) as aside:
                    first = next(iter(prepared.values()))
                    shutil.copytree(first.folder / "tokenizer", aside / "tokenizer")
                    write_manifest(aside, _mixture_manifest(folder.name, parts, prepared))
    return open_prepared(folder)


@contextmanager
def _of_part(name: str) -> Iterator[None]:
    """Name the part of a mixture in front of its errors."""
    try:
        yield
    except ValueError as failure:
        kind = Interrupted if isinstance(failure, Interrupted) else ValueError
        raise kind(f"data.mixture.{name}: {failure}") from failure


def check_first_document(config: DataConfig) -> None:
    """Read the first document of each source that is on this machine.

    Raises:
        ValueError: there is none, or it can't be read, or lacks the text column.
    """
    for name in config.mixture:
        with _of_part(name):
            check_first_document(part_config(config, name))
    here = config.path and config.source in ("local", "hub") and not is_on_hub(config)
    if here and next(open_source(config).documents(), None) is None:
        raise ValueError(f"data.path={config.path} holds no document")


def _mixture_manifest(
    name: str, parts: list[dict[str, Any]], prepared: dict[str, PreparedData]
) -> dict[str, Any]:
    first = next(iter(prepared.values())).manifest
    splits = {}
    for split in _SPLITS:
        entries = [part.manifest["splits"][split] for part in prepared.values()]
        sums = {key: sum(entry[key] for entry in entries) for key in ("documents", "tokens", "text_bytes")}
        splits[split] = sums | {"unigram_entropy": None, "shards": []}
    return {
        "format": FORMAT,
        "fingerprint": name,
        "settings": first["settings"] | {"source": "mixture"},
        "source": {"kind": "mixture of " + ", ".join(prepared)},
        "parts": parts,
        "dtype": first["dtype"],
        "tokenizer": first["tokenizer"],
        "splits": splits,
    }


def _prepare_stream(config: DataConfig, log: Log, progress: bool, commits: Mapping[str, str]) -> PreparedData:
    """Prepare the validation shard of a stream, and the folder to train from, with the stream's manifest.

    The held-out documents among the first `stream_head_documents` are the validation split, and a bpe
    tokenizer is trained on the others. The stream is read at the shard's commit, in every epoch and by every
    rank, whatever the Hub's branch points to by then.
    """
    shard = _prepare(validation_shard_config(config), log, progress, commits)
    commit = shard.manifest.get("commit")
    # The shard may have been prepared when the same text lay elsewhere, and with another line limit.
    settings = shard.manifest["settings"] | {"max_documents": None, "path": config.path}
    settings["max_line_bytes"] = config.max_line_bytes
    folder = stream_folder(config, shard.folder.name)
    unknown = dict.fromkeys(("documents", "text_bytes", "unigram_entropy"))
    train = unknown | {"tokens": math.inf, "shards": []}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": folder.name,
        "settings": settings,
        "source": shard.manifest["source"],
        "head": shard.folder.name,
        "dtype": shard.manifest["dtype"],
        "tokenizer": shard.manifest["tokenizer"],
        "splits": {"train": train, "validation": shard.manifest["splits"]["validation"]},
    }
    if commit is not None:
        manifest["commit"] = commit
    if (folder / MANIFEST).is_file() and (there := open_prepared(folder)).manifest == manifest:
        return there  # perhaps another user's, who lets others only read
    # All machines of a run, and all runs of a sweep, come here at once.
    with _locked(folder, folder.with_name(f".{folder.name}.lock"), log):
        folder.mkdir(exist_ok=True)
        if not (folder / "tokenizer").exists():
            os.symlink(Path("..") / shard.folder.name / "tokenizer", folder / "tokenizer")
        write_manifest(folder, manifest)
    return open_prepared(folder)


@contextmanager
def _locked(folder: Path, lock: Path, log: Log) -> Iterator[None]:
    """Hold `lock` while `folder` is written; where the system refuses to write, say what to do."""
    try:
        with locked(lock, lambda line: log(f"data: {line}")):
            yield
    except OSError as failure:
        raise Interrupted(
            f"cannot write {folder}: {failure.strerror}; make room or give write access, and run the same "
            "command again, which goes on from here, or set data.cache_dir"
        ) from failure


def _build(paths: CachePaths, config: DataConfig, commit: str | None, log: Log, show: bool) -> None:
    """Fill `building` with the tokenizer, both splits and, last, the manifest; then rename it to `final`."""
    source, tokenizer, final, building = paths.source, paths.tokenizer, paths.final, paths.building
    resumed = _resume(paths, config, commit, log)
    if resumed is None:
        log(f"data: preparing {config.source} in {final}")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        if tokenizer is None:
            log(f"data: training a bpe tokenizer of {config.tokenizer.vocab_size} tokens")
            tokenizer = load_tokenizer(config.tokenizer, _train_texts(source, config))
        save_tokenizer(tokenizer, building / "tokenizer")
        for file in (building / "tokenizer").iterdir():
            sync(file)
    elif tokenizer is None:
        tokenizer = load_saved(building / "tokenizer")
    manifest = _begin_manifest(config, source, tokenizer, final.name)
    dtype = manifest["dtype"]
    job = TokenizeJob(building, config, dtype, ids_needed(tokenizer), source.description, resumed)
    if resumed is not None:
        log(f"data: going on after {job.read:,} documents, {job.tokens:,} tokens, for {final}")
    bar = _progress(config, source, log, show)
    splits = job.run(source, make_encoder(tokenizer, building / "tokenizer", config, dtype), bar)
    if not splits["train"]["tokens"]:
        shutil.rmtree(building)
        raise ValueError("the corpus has no training document; see data.path and data.validation_fraction")
    assert job.cursor is not None  # something was read
    if open_source(config, commit).description != source.description:
        raise ValueError(
            f"data.path={config.path} (data.source={config.source}) changed while it was prepared: run the "
            "same command again once it stays as it is"
        )
    if commit := job.cursor.get("commit"):
        manifest["commit"] = commit  # of the Hub
    write_manifest(building, manifest | {"empty_documents": job.empty, "splits": splits})
    for journal in building.glob(f"{JOURNAL}*"):  # with temporary files that a kill has left
        journal.unlink()
    if (final / MANIFEST).exists():  # another path to the same text has been prepared meanwhile
        shutil.rmtree(building)
    else:
        move_folder(building, final)
    if show and bar.seconds:
        rate = bar.tokens / bar.seconds / 1e6
        log(f"data: {bar.tokens:,} tokens in {bar.seconds:.1f} s, {rate:.3f}M tokens/s")


def _log_other_copy(prepared: PreparedData, config: DataConfig, log: Log) -> None:
    """Log if the tokenizer's copy differs in settings that change no ids. Other runs may use it: it stays."""
    if config.tokenizer.name in ("bytes", "bpe"):
        return
    copy, tokenizer = prepared.tokenizer(), load_tokenizer(config.tokenizer)
    changed = [name for name in _NO_IDS if getattr(copy, name) != getattr(tokenizer, name)]
    if changed:
        log(
            f"data: tokenizer {config.tokenizer.name} has another {', '.join(changed)} than its copy, which "
            f"exports take: replace {prepared.folder / 'tokenizer'} if no other run needs it as it is, or "
            "set another data.cache_dir"
        )


def _resume(paths: CachePaths, config: DataConfig, commit: str | None, log: Log) -> dict[str, Any] | None:
    """The journal of an earlier attempt, at a snapshot whose text is still the source's; None: start anew."""
    journal = read_journal(paths.building)
    if journal is None:
        return None
    if commit is not None and paths.commit() not in (None, commit):
        log(f"data: {paths.building} was begun with commit {paths.commit()}: starting anew with {commit}")
        return None
    description = paths.source.description
    if journal["source"] == description:
        return journal
    # A bpe tokenizer was trained on the former text.
    resumed = None if config.tokenizer.name == "bpe" else _roll_back(journal, description)
    if resumed is None:
        log(f"data: the text has changed since {paths.building} was begun: starting anew")
    return resumed


def _roll_back(journal: dict[str, Any], description: dict[str, Any]) -> dict[str, Any] | None:
    """The journal at the latest snapshot whose files are unchanged in the source, if there is one.

    So a file that was invalid and has been repaired or removed costs its own documents only.
    """
    before = journal["source"]
    if before.get("kind") != "local" or before | {"files": None} != description | {"files": None}:
        return None
    for state in (journal["now"], journal["file_start"]):
        cursor = state and state["cursor"]  # None also where the first chunk was invalid
        read = cursor["file"] + 1 if cursor else 0  # files this state has taken text from
        if read and before["files"][:read] == description["files"][:read]:
            return journal | {"now": state}
    return None


def _begin_manifest(
    config: DataConfig, source: Source, tokenizer: "PreTrainedTokenizerBase", name: str
) -> dict[str, Any]:
    """The part of the manifest that is known before tokenizing."""
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


class TokenizeJob:
    """Tokenizes one source into the shards of both splits in `folder`, with a journal.

    Args:
        description: of the source.
        resumed: a journal to continue from; None: start anew.
    """

    def __init__(
        self,
        folder: Path,
        config: DataConfig,
        dtype: str,
        vocab_size: int,
        description: dict[str, Any],
        resumed: dict[str, Any] | None,
    ):
        self._folder, self._config, self._description = folder, config, description
        state = resumed["now"] if resumed else {"cursor": None, "read": 0, "empty": 0, "splits": {}}
        self.cursor: Cursor | None = state["cursor"]
        self.read: int = state["read"]
        self.empty: int = state["empty"]
        self._writers = {
            split: ShardWriter(
                folder / split, dtype, config.shard_tokens, vocab_size, state["splits"].get(split)
            )
            for split in _SPLITS
        }
        self._file_start: dict[str, Any] | None = resumed["file_start"] if resumed else None
        self._writing = False
        self._committed = time.monotonic()

    @property
    def tokens(self) -> int:
        """Tokens of both splits so far."""
        return sum(writer.tokens for writer in self._writers.values())

    def run(self, source: Source, encoder: Encoder, progress: Progress) -> dict[str, dict[str, Any]]:
        """Tokenize the rest of the source; returns the splits' entries of the manifest.

        Raises:
            ValueError: as reading the source. The work up to there is committed.
            OSError: the disk is full or gone. The last commit remains.
        """
        progress.start(self._done(progress.unit), self.tokens)
        encoded = encode_all(encoder, source.chunks(self.cursor), self._config.num_workers)
        try:
            ended = self._is_full()
            while not ended and (piece := next(encoded, None)) is not None:
                ended = self._take(piece)
                progress.update(self._done(progress.unit), self.tokens)
                if time.monotonic() - self._committed >= COMMIT_SECONDS:
                    self._commit()
        except BaseException:
            if not self._writing:  # else the writers' states are of different chunks
                with suppress(OSError):
                    self._commit()
            for writer in self._writers.values():
                writer.abandon()
            raise
        finally:
            encoded.close()
            progress.close()
        return {split: writer.close() for split, writer in self._writers.items()}

    def _take(self, piece: Encoded) -> bool:
        """Write one chunk's documents up to the limits; returns whether a limit is reached."""
        config, train = self._config, self._writers["train"]
        if self.cursor is not None and piece.after.get("file") != self.cursor.get("file"):
            self._file_start = self._snapshot()
        take = len(piece.lengths)
        if config.max_documents is not None:
            take = min(take, config.max_documents - self.read)
        if config.max_tokens is not None:  # the document that reaches the limit is kept whole
            grown = np.cumsum(np.where(piece.held_out, 0, piece.lengths))
            take = min(take, int(np.searchsorted(grown, config.max_tokens - train.tokens)) + 1)
        lengths, sizes, held_out = piece.lengths[:take], piece.sizes[:take], piece.held_out[:take]
        tokens = piece.tokens[: int(lengths.sum())]
        if piece.error is not None and take == len(piece.lengths) and not self._is_full(piece, take):
            raise ValueError(piece.error)
        self._writing = True
        for split, writer in self._writers.items():
            chosen = (held_out == (split == "validation")) & (sizes > 0)
            if chosen.any():
                mask = np.repeat(chosen, lengths)
                writer.add(tokens[mask], lengths[chosen], int(sizes[chosen].sum()))
        self.empty += int((sizes == 0).sum())
        self.read += take
        self.cursor = piece.after
        self._writing = False
        return self._is_full()

    def _is_full(self, piece: Encoded | None = None, take: int = 0) -> bool:
        """Whether a limit is reached, optionally with the first `take` documents of a chunk."""
        config = self._config
        tokens = self._writers["train"].tokens
        if piece is not None:
            tokens += int(piece.lengths[:take][~piece.held_out[:take]].sum())
        return (self.read + take) == config.max_documents or tokens >= (config.max_tokens or math.inf)

    def _done(self, unit: str) -> int:
        """The work done in the unit of the progress: training tokens, documents or text bytes."""
        match unit:
            case "tok":
                return self._writers["train"].tokens
            case "doc":
                return self.read
        return sum(writer.text_bytes for writer in self._writers.values())

    def _snapshot(self) -> dict[str, Any]:
        splits = {split: writer.state() for split, writer in self._writers.items()}
        return {"cursor": self.cursor, "read": self.read, "empty": self.empty, "splits": splits}

    def _commit(self) -> None:
        for writer in self._writers.values():
            writer.sync()
        journal = {"source": self._description, "now": self._snapshot(), "file_start": self._file_start}
        write_whole(self._folder / JOURNAL, json.dumps(journal))
        self._committed = time.monotonic()
