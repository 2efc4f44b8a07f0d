"""Tokenize a source into shards, in this process or in several.

Each slice of the source becomes one shard. So neither the number of processes nor interruptions change a
shard, and a resumed preparation leaves out the shards that are complete. Tokenizing processes import this
module, so it imports neither torch nor, unless the tokenizer needs it, transformers.
"""

import hashlib
import json
import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import tokenizers

from fla_train.data.config import DataConfig
from fla_train.data.files import Slice, TextSlice
from fla_train.data.shards import SPLITS, Record, read_record, shard_file, write_shard
from fla_train.utils.errors import Interrupted
from fla_train.utils.filesystem import write_whole
from fla_train.utils.processes import available_cores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
_BATCH_CHARACTERS = 1 << 19  # size of a batch of documents to tokenize
_AHEAD = 3  # slices per process that may wait for an earlier one


def is_held_out(raw: bytes, validation_fraction: float) -> bool:
    """Return whether a document belongs to the validation split: a pure function of its UTF-8 text."""
    return int.from_bytes(hashlib.sha1(raw).digest()[:8], "big") / 2**64 < validation_fraction


class Limits(NamedTuple):
    """Documents of both splits and tokens of the training split that may still be read."""

    documents: float = math.inf
    tokens: float = math.inf

    def after(self, record: Record) -> "Limits":
        return Limits(self.documents - record["documents"], self.tokens - record["train"]["tokens"])

    def reached_by(self, record: Record) -> bool:
        return record["documents"] >= self.documents or record["train"]["tokens"] >= self.tokens

    def allow(self, record: Record) -> bool:
        """Return whether the record's shard was not cut below these limits."""
        return all(limit >= left for limit, left in zip(record["limits"], self, strict=True))


@dataclass
class Encoder:
    """Tokenizes slices into shards. Pickled, it carries settings only: each process builds its tokenizer.

    Attributes:
        folder: the saved tokenizer.
        separator: id that ends each document, if any.
        dtype: of the tokens, uint16 or uint32.
    """

    folder: Path
    separator: int | None
    validation_fraction: float
    dtype: str

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tokenize"}

    def write(self, folder: Path, number: int, piece: Slice, limits: Limits) -> Record:
        """Tokenize a slice into shard `number` of `folder` and return its record.

        Stop after the document that reaches one of the limits.

        Raises:
            ValueError: a document is invalid or its file has changed; no shard is written.
        """
        documents = train_tokens = 0
        tokens: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        text_bytes = dict.fromkeys(SPLITS, 0)
        for raw, ids in self._encoded(piece.texts()):
            documents += 1
            if raw and ids:  # a document has at least one token
                split = "validation" if is_held_out(raw, self.validation_fraction) else "train"
                tokens[split].append(np.array(ids, self.dtype))
                text_bytes[split] += len(raw)
                train_tokens += len(ids) if split == "train" else 0
            if documents >= limits.documents or train_tokens >= limits.tokens:
                break
        piece.check_unchanged()
        path = folder / shard_file(number)
        record = write_shard(path, tokens)
        for split in SPLITS:
            record[split]["text_bytes"] = text_bytes[split]
        record |= {"documents": documents, "limits": limits}
        record |= {"slice": piece.key, "size": piece.size, "after": piece.after}
        write_whole(path.with_suffix(".json"), json.dumps(record))
        return record

    def _encoded(self, texts: Iterable[tuple[str, bytes]]) -> Iterator[tuple[bytes, list[int]]]:
        """Yield the UTF-8 and the tokens of each text, with the separator."""
        separator = [] if self.separator is None else [self.separator]
        for batch in batches(texts, lambda text: len(text[0])):
            for (_, raw), ids in zip(batch, self._tokenize([text for text, _ in batch]), strict=True):
                yield raw, ids + separator

    @cached_property
    def _tokenize(self) -> Callable[[list[str]], Iterable[list[int]]]:
        file = self.folder / "tokenizer.json"
        if not file.exists():
            # Only tokenizers without tokenizer.json need transformers, which takes seconds to import.
            from fla_train.data.tokenizers import encode, load_saved

            return partial(encode, load_saved(self.folder))
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        tokenizer.encode_special_tokens = True  # `</s>` in a text stays text and ends no document
        encode_batch = partial(tokenizer.encode_batch_fast, add_special_tokens=False)
        return lambda texts: (encoding.ids for encoding in encode_batch(texts))


def batches(texts: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the texts in batches.

    Args:
        size_of: returns the characters of a text.
    """
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += size_of(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def make_encoder(
    tokenizer: "PreTrainedTokenizerBase", folder: Path, config: DataConfig, dtype: str
) -> Encoder:
    """Return the encoder of a corpus with these settings; `folder` holds the saved tokenizer."""
    separator = tokenizer.eos_token_id if config.append_eos else None
    return Encoder(folder, separator, config.validation_fraction, dtype)


def tokenize_source(
    encoder: Encoder,
    slices: Callable[[Sequence[Record]], Iterator[Slice | None]],
    folder: Path,
    num_workers: int | None = 0,
    max_documents: int | None = None,
    max_tokens: int | None = None,
) -> Iterator[Record]:
    """Write the shards of a source that `folder` does not hold yet. Yield the records of all shards in order.

    Args:
        slices: `Source.slices`.
        num_workers: processes; None: one per core if there is more than one slice; 0: this process alone,
            with the tokenizer's threads.
        max_documents: most documents of both splits.
        max_tokens: stop after the document that completes this number of training tokens.

    Raises:
        ValueError: as reading the source. The shards that are complete stay.
        Interrupted: a process died.
    """
    left = Limits(max_documents or math.inf, max_tokens or math.inf)
    pieces = slices(_finished_records(folder, left))
    first_two = list(islice(pieces, 2))
    if num_workers is None:
        num_workers = available_cores() if len(first_two) > 1 else 0
    numbered = enumerate(chain(first_two, pieces))
    # Slices that have begun, in order. An earlier slice may finish after later ones.
    pending: deque[tuple[int, Slice | None, Future[Record]]] = deque()
    with writers(encoder, num_workers) as write:
        while True:
            # Begin slices ahead until the next record is there. It may take long, since streams are fetched.
            while not (pending and pending[0][2].done()) and len(pending) <= _AHEAD * num_workers:
                # Fetch no more of a stream than reaches the limit of documents.
                fetched = sum(len(piece.values) for _, piece, _ in pending if isinstance(piece, TextSlice))
                if fetched >= left.documents or not (following := next(numbered, None)):
                    break
                number, piece = following
                record, future = read_record(folder, number), Future()
                if piece is None or (record and record["slice"] == piece.key and left.allow(record)):
                    future.set_result(record | {"resumed": True})  # the shard is complete
                else:
                    future = write(folder, number, piece, left)
                pending.append((number, piece, future))
            if not pending:
                return
            number, piece, future = pending.popleft()
            record = future.result()
            # This slice began before the earlier ones were finished, so its limits may have been too high.
            if left.reached_by(record) and tuple(record["limits"]) != left:
                record = encoder.write(folder, number, piece, left)
            yield record
            if left.reached_by(record):
                return
            left = left.after(record)


def _finished_records(folder: Path, left: Limits) -> list[Record]:
    """Return the records of the first shards up to a missing one or the limits. A stream continues there."""
    records: list[Record] = []
    while (record := read_record(folder, len(records))) and not left.reached_by(record):
        records.append(record)
        left = left.after(record)
    return records


def _write_now(encoder: Encoder, *arguments: Any) -> Future[Record]:
    """Write in this process. Return a finished future, as a pool does."""
    future: Future[Record] = Future()
    future.set_result(encoder.write(*arguments))
    return future


@contextmanager
def writers(encoder: Encoder, size: int) -> Iterator[Callable[..., Future[Record]]]:
    """Yield a function that calls `Encoder.write` in one of `size` processes and returns a future.

    The processes end with the block, or with this process, even by kill -9, because their pipe ends.
    """
    if size == 0:
        yield partial(_write_now, encoder)
        return
    alive, ours = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(size, context, begin_process, (encoder, alive))
    try:
        yield partial(pool.submit, _write_in_process)
    except BrokenProcessPool as failure:
        raise Interrupted("a tokenizing process died (out of memory?): lower data.num_workers") from failure
    finally:
        ours.close()
        pool.shutdown(cancel_futures=True)


def begin_process(encoder: Encoder, alive: Connection) -> None:
    """Set up a tokenizing process."""
    global _encoder
    _encoder = encoder
    # Terminals and batch systems send these to the whole process group; the parent handles them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The processes are the parallelism.
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()


def _end_with_parent(alive: Connection) -> None:
    """End this process when the parent closes its end of the pipe, or ends."""
    alive.poll(None)
    os._exit(1)


def _write_in_process(*arguments: Any) -> Record:
    return _encoder.write(*arguments)  # the global that `begin_process` sets
