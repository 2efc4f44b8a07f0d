"""Turn a source into memory-mapped token shards, once.

The result lies in `<cache>/<fingerprint>/`: `tokenizer/`, `train/`, `validation/` and `manifest.json`. The
fingerprint covers all that decides the tokens: the source's content, the tokenizer and the split. A folder is
built beside its final place and renamed, so it is complete or absent; a lock that dies with its process keeps
builders apart.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fla_train.data.config import DataConfig, cache_folder, data_faults
from fla_train.data.shards import FORMAT, MANIFEST, ShardWriter, read_manifest, sync, verify, write_manifest
from fla_train.data.sources import Source, open_source
from fla_train.data.tokenizers import encode, fingerprint, ids_needed, load_tokenizer

_BATCH_BYTES = 4 << 20  # text handed to the tokenizer at once: enough to keep every core busy


@dataclass(frozen=True)
class PreparedData:
    """A complete folder of token shards and its manifest."""

    folder: Path
    manifest: dict[str, Any]

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.folder / "tokenizer")

    def verify(self) -> None:
        """Compare every shard with its checksum. Raises `ValueError` naming the first that differs."""
        verify(self.folder)

    def describe(self) -> list[str]:
        """Lines for the plan: documents, tokens, bytes per token, vocabulary."""
        tokenizer, splits = self.manifest["tokenizer"], self.manifest["splits"]
        lines = [
            f"{self.manifest['source']['kind']}, vocabulary {tokenizer['vocab_size']:,} ({tokenizer['name']})"
        ]
        for name, split in splits.items():
            if split["tokens"]:
                lines.append(
                    f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens, "
                    f"{split['text_bytes'] / split['tokens']:.2f} bytes per token, "
                    f"unigram entropy {split['unigram_entropy']:.3f} nats per token"
                )
            else:
                lines.append(f"{name}: empty")
        return lines


def open_prepared(folder: str | Path) -> PreparedData:
    """An existing prepared folder. Raises `ValueError` if it is none or its manifest is corrupt."""
    return PreparedData(Path(folder), read_manifest(Path(folder)))


def prepare(config: DataConfig, log: Callable[[str], None] = print, progress: bool = True) -> PreparedData:
    """Tokenize the source of `config` into the cache, or reuse what is there.

    Args:
        log: receives one line at each stage.
        progress: on a terminal, show a progress bar with tokens/s and the time left.

    Raises:
        ValueError: for settings that cannot work and for missing or corrupt input, naming the file.
    """
    if faults := data_faults(config):
        raise ValueError("; ".join(faults))
    source = open_source(config)
    # A bpe tokenizer follows from the corpus and its size, so it needs no training to be told apart.
    trains = config.tokenizer.name == "bpe"
    tokenizer = None if trains else load_tokenizer(config.tokenizer)
    identity = asdict(config.tokenizer) if tokenizer is None else fingerprint(tokenizer)
    name = _fingerprint(config, source, identity)
    cache = cache_folder(config)
    final = cache / name
    if not (final / MANIFEST).exists():
        with _lock(cache / f"{name}.lock", log):
            if not (final / MANIFEST).exists():  # another process may have built it while this one waited
                log(f"data: preparing {config.source} in {final}")
                shutil.rmtree(final, ignore_errors=True)  # without a manifest it is no result
                if tokenizer is None:
                    log(f"data: training a bpe tokenizer of {config.tokenizer.vocab_size} tokens")
                    tokenizer = load_tokenizer(config.tokenizer, _train_texts(source, config))
                with _complete_or_absent(cache / f".building-{name}", final) as building:
                    _build(building, config, source, tokenizer, name, progress)
    return open_prepared(final)


def _fingerprint(config: DataConfig, source: Source, tokenizer: Any) -> str:
    keys = ("validation_fraction", "max_documents", "max_tokens", "append_eos")
    content = {
        "format": FORMAT,
        "source": source.description,
        "tokenizer": tokenizer,
        "settings": {key: getattr(config, key) for key in keys},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _lock(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as failure:
        raise _unwritable(path.parent, failure) from failure
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"data: another process is preparing the same data; waiting for it ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file, or dying, releases the lock


@contextmanager
def _complete_or_absent(building: Path, final: Path) -> Iterator[Path]:
    """An empty folder to fill, renamed to `final` at the end. What a killed process left of it goes first."""
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir()
        yield building
        os.rename(building, final)
        sync(final.parent)
    except OSError as failure:
        raise _unwritable(final, failure) from failure
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _unwritable(path: Path, failure: OSError) -> ValueError:
    return ValueError(f"cannot write {path}: {failure.strerror}; make room or set data.cache_dir")


class _Text(NamedTuple):
    text: str
    bytes: int
    split: str


def _texts(source: Source, config: DataConfig) -> Iterator[_Text]:
    """The source's documents up to `max_documents`, each with its split: a pure function of its text."""
    for number, document in enumerate(source.documents()):
        if number == config.max_documents:
            return
        try:
            raw = document["text"].encode("utf-8")
        except UnicodeEncodeError as failure:
            raise ValueError(
                f"document {document['id']}: not valid Unicode ({failure}); repair or remove it"
            ) from failure
        position = int.from_bytes(hashlib.sha1(raw).digest()[:8], "big") / 2**64
        yield _Text(
            document["text"], len(raw), "validation" if position < config.validation_fraction else "train"
        )


def _train_texts(source: Source, config: DataConfig) -> Iterator[str]:
    return (t.text for t in _texts(source, config) if t.split == "train")


def _build(
    folder: Path,
    config: DataConfig,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    progress: bool,
) -> None:
    """Fill `folder` with the tokenizer, both splits and, last, the manifest."""
    eos = tokenizer.eos_token_id
    if config.append_eos and eos is None:
        raise ValueError(
            f"tokenizer {config.tokenizer.name} has no end-of-sequence token; "
            "set data.tokenizer.eos_token, or data.append_eos=false"
        )
    tokenizer.save_pretrained(folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        sync(file)
    size = ids_needed(tokenizer)
    dtype = "uint16" if size <= 1 << 16 else "uint32"
    writers = {s: ShardWriter(folder / s, dtype, config.shard_tokens, size) for s in ("train", "validation")}
    with _progress_bar(config, source, progress) as bar:
        empty = _write(writers, config, source, tokenizer, bar)
    splits = {s: writer.close() for s, writer in writers.items()}
    if not splits["train"]["tokens"]:
        raise ValueError("the corpus has no training document; see data.path and data.validation_fraction")
    settings = asdict(config)
    del settings["cache_dir"]  # equal preparations are equal byte for byte, wherever they lie
    manifest = {
        "format": FORMAT,
        "fingerprint": name,
        "settings": settings,
        "source": source.description,
        "empty_documents": empty,
        "dtype": dtype,
        "tokenizer": {
            "name": config.tokenizer.name,
            "fingerprint": fingerprint(tokenizer),
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": tokenizer.pad_token_id,
        },
        "splits": splits,
    }
    write_manifest(folder, manifest)


def _write(
    writers: dict[str, ShardWriter],
    config: DataConfig,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    bar: tqdm,
) -> int:
    """Tokenize the source into the writers, up to the cap; returns how many documents were empty."""
    separator = [tokenizer.eos_token_id] if config.append_eos else []
    cap = math.inf if config.max_tokens is None else config.max_tokens
    train, empty = writers["train"], 0
    began = time.monotonic()
    for batch, encoded in _encoded(tokenizer, _batches(_texts(source, config))):
        before = train.tokens
        for text, ids in zip(batch, encoded, strict=True):
            if train.tokens >= cap:
                break
            if text.bytes:
                writers[text.split].add(ids + separator, text.bytes)
            else:
                empty += 1
        bar.update(sum(text.bytes for text in batch) if config.max_tokens is None else train.tokens - before)
        tokens = sum(writer.tokens for writer in writers.values())
        bar.set_postfix_str(f"{tokens / (time.monotonic() - began) / 1e6:.2f}M tokens/s")
        if train.tokens >= cap:
            break
    return empty


def _progress_bar(config: DataConfig, source: Source, progress: bool) -> tqdm:
    """Counts what bounds the work: tokens under `max_tokens`, else bytes of text. Silent off a terminal."""
    disable = None if progress else True
    if config.max_tokens is not None:
        return tqdm(total=config.max_tokens, unit="tok", unit_scale=True, desc="tokenizing", disable=disable)
    total = source.total_bytes() if config.max_documents is None else None
    return tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", disable=disable)


def _batches(texts: Iterable[_Text]) -> Iterator[list[_Text]]:
    batch: list[_Text] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += text.bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(
    tokenizer: PreTrainedTokenizerBase, batches: Iterable[list[_Text]]
) -> Iterator[tuple[list[_Text], list[list[int]]]]:
    """Each batch with its ids. One batch is tokenized (off the GIL) while the one before is written."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending = None
        for batch in batches:
            future = pool.submit(encode, tokenizer, [text.text for text in batch])
            if pending is not None:
                yield pending[0], pending[1].result()
            pending = batch, future
        if pending is not None:
            yield pending[0], pending[1].result()
