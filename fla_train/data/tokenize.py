"""Tokenize chunks of documents, in this process or in several: chunks in, encoded chunks out, in order.

The processes are started as plain commands, not by multiprocessing: they need no `__main__` guard in the
caller's script, inherit no threads and no open files, and end with the process that started them, even by
kill -9, because their pipe ends. To start quickly they import neither torch nor, unless the tokenizer needs
it, transformers.
"""

import hashlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fla_train.data.config import DataConfig
from fla_train.data.files import CHUNK_BYTES, Chunk, Cursor, Document
from fla_train.utils.errors import Interrupted
from fla_train.utils.processes import available_cores, python_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Chunks after which processes are started: a smaller corpus is done sooner without them.
START_CHUNKS = (16 << 20) // CHUNK_BYTES
_SERVE = "from fla_train.data.tokenize import serve; serve(int(sys.argv[1]))"


@dataclass(frozen=True)
class Encoded:
    """The D documents of a chunk, including empty ones.

    Attributes:
        tokens: [sum of lengths] uint16 or uint32: the documents in order, each with its separator.
        lengths: [D] int64, tokens of each document; 0 if it is empty.
        sizes: [D] int64, bytes of each text.
        held_out: [D] bool, whether it belongs to the validation split.
        after: the position in the source behind the chunk.
        error: why the document after the D is invalid, if there is one; the chunk ends there.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sizes: np.ndarray
    held_out: np.ndarray
    after: Cursor
    error: str | None = None


def is_held_out(raw: bytes, validation_fraction: float) -> bool:
    """Whether a document belongs to the validation split: a pure function of its UTF-8 text."""
    return int.from_bytes(hashlib.sha1(raw).digest()[:8], "big") / 2**64 < validation_fraction


def utf8(document: Document) -> bytes:
    """The text's bytes. Raises `ValueError` for lone surrogates, which JSON allows and UTF-8 does not."""
    try:
        return document["text"].encode("utf-8")
    except UnicodeEncodeError as failure:
        raise ValueError(
            f"document {document['id']}: not valid Unicode ({failure}); repair or remove it"
        ) from failure


@dataclass
class Encoder:
    """Tokenizes chunks. Pickled, it carries settings only: each process builds the tokenizer on first use.

    Args:
        backend: content of a tokenizer.json, or None for a tokenizer without one.
        folder: the saved tokenizer.
        separator: id that ends each document, if any.
        dtype: of the tokens.
    """

    backend: str | None
    folder: str
    separator: int | None
    validation_fraction: float
    dtype: str
    _tokenizer: Any = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokenizer": None}

    def __call__(self, chunk: Chunk) -> Encoded:
        """Tokenize the chunk's documents up to the first invalid one."""
        texts, sizes, held_out, error = [], [], [], None
        try:
            for document in chunk.documents():
                raw = utf8(document)
                texts.append(document["text"])
                sizes.append(len(raw))
                held_out.append(is_held_out(raw, self.validation_fraction))
        except ValueError as failure:
            error = str(failure)
        tokens, lengths = self._tokens(texts)
        return Encoded(
            tokens, lengths, np.array(sizes, np.int64), np.array(held_out, bool), chunk.after, error
        )

    def _tokens(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._tokenizer is None:
            self._tokenizer = self._build()
        if self.backend is None:
            from fla_train.data.tokenizers import encode

            encoded = encode(self._tokenizer, texts)
            lengths = [len(ids) for ids in encoded]
        else:
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            lengths = [len(encoding) for encoding in encoded]
        separator = [] if self.separator is None else [self.separator]

        def ids() -> Iterator[list[int]]:
            for text, encoding in zip(texts, encoded, strict=True):
                if text:
                    yield encoding if self.backend is None else encoding.ids
                    yield separator

        ends = [length + len(separator) if text else 0 for text, length in zip(texts, lengths, strict=True)]
        total = np.array(ends, dtype=np.int64)
        return np.fromiter(chain.from_iterable(ids()), dtype=self.dtype, count=int(total.sum())), total

    def _build(self) -> Any:
        if self.backend is None:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(self.backend)
        tokenizer.encode_special_tokens = True  # `</s>` in a text stays text and ends no document
        return tokenizer


def make_encoder(
    tokenizer: "PreTrainedTokenizerBase", folder: Path, config: DataConfig, dtype: str
) -> Encoder:
    """The encoder of a corpus with these settings; `folder` holds the saved tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return Encoder(
        backend=backend.to_str() if backend else None,
        folder=str(folder),
        separator=tokenizer.eos_token_id if config.append_eos else None,
        validation_fraction=config.validation_fraction,
        dtype=dtype,
    )


def encode_all(encoder: Encoder, chunks: Iterable[Chunk], num_workers: int | None) -> Iterator[Encoded]:
    """Encode each chunk and yield them in order, while a bounded number of others is in progress.

    Args:
        num_workers: processes; None: one per core, once a corpus turns out to be large; 0: this process
            alone, with the tokenizer's threads.

    Raises:
        ValueError: as reading the chunks, after all chunks before it.
        Interrupted: a process died.
    """
    started = 0 if num_workers is None else num_workers
    pending: deque[Future[Encoded]] = deque()
    failure: Exception | None = None
    iterator = iter(chunks)
    pool = Pool(encoder, started)
    try:
        for number in range(sys.maxsize):
            if num_workers is None and number == START_CHUNKS and available_cores() > 1:
                yield from (future.result() for future in pending)
                pending.clear()
                pool.close()
                pool = Pool(encoder, available_cores())
            try:
                pending.append(pool.submit(next(iterator)))
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            if len(pending) > pool.depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if failure is not None:
            raise failure
    finally:
        pool.close()


class Pool:
    """`size` processes, each with a thread that feeds it; with size 0 one thread that does the work."""

    def __init__(self, encoder: Encoder, size: int):
        self.depth = 3 * max(1, size)  # chunks in progress: enough to keep all busy while one is written
        self._encoder = encoder
        pickled = pickle.dumps(encoder) if size else b""
        self._workers = [Worker(pickled) for _ in range(size)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max(1, size), thread_name_prefix="tokenize")

    def submit(self, chunk: Chunk) -> Future[Encoded]:
        return self._threads.submit(self._encode if self._workers else self._encoder, chunk)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)

    def _encode(self, chunk: Chunk) -> Encoded:
        worker = self._idle.get()  # as many threads as workers: one is always idle
        try:
            return worker.encode(chunk)
        finally:
            self._idle.put(worker)


class Worker:
    """One process and the pipe to it.

    The encoder is sent before the first chunk, by the thread that feeds the process. It is larger than a
    pipe's buffer, so sending it blocks until the process has started; the other processes start meanwhile.
    """

    def __init__(self, encoder: bytes):
        self._unsent = encoder  # pickled
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            # One thread each: the processes are the parallelism.
            threads = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                python_command(_SERVE, str(theirs.fileno())),
                env=os.environ | threads,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def encode(self, chunk: Chunk) -> Encoded:
        try:
            if self._unsent:
                self._connection.send_bytes(self._unsent)
                self._unsent = b""
            self._connection.send(chunk)
            result = self._connection.recv()
        except (EOFError, OSError) as failure:
            code = self._process.wait()
            raise Interrupted(
                f"a tokenizing process ended with code {code} (-9 may mean too little memory: set a lower "
                "data.num_workers); run the same command again, it goes on from here"
            ) from failure
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        self._process.kill()  # it has no state to lose
        self._process.wait()
        self._connection.close()


def serve(descriptor: int) -> None:
    """Main function of a tokenizing process: encode chunks from the pipe until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole process group; the parent handles them
    connection = Connection(descriptor)
    try:
        encoder: Encoder = connection.recv()
        while True:
            chunk = connection.recv()
            try:
                result: Encoded | Exception = encoder(chunk)
            except Exception as failure:
                result = failure
            connection.send(result)
    except (EOFError, OSError):
        return
