"""Tokenizing in several processes: chunks in, encoded chunks out, in order.

The processes are started as plain commands, not by multiprocessing: they need no `__main__` guard in the
caller's script, inherit no threads and no open files, and end with the process that started them, even by
kill -9, because their pipe ends.
"""

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
from multiprocessing.connection import Connection

from fla_train.data.chunks import CHUNK_BYTES, Chunk
from fla_train.data.encoding import Encoded, Encoder
from fla_train.data.faults import Interrupted

# A corpus below this is done before processes would have started.
_START_CHUNKS = (16 << 20) // CHUNK_BYTES
_COMMAND = "import sys; from fla_train.data.workers import serve; serve(int(sys.argv[1]))"


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_all(encoder: Encoder, chunks: Iterable[Chunk], num_workers: int | None) -> Iterator[Encoded]:
    """Each chunk encoded, in order, while a bounded number of others is under way.

    Args:
        num_workers: processes; None: one per core, once a corpus turns out to be large; 0: this process
            alone, with the tokenizer's own threads.

    Raises:
        ValueError: what reading the chunks raises, after all chunks before it.
        Interrupted: a process died.
    """
    started = 0 if num_workers is None else num_workers
    pending: deque[Future[Encoded]] = deque()
    failure: Exception | None = None
    iterator = iter(chunks)
    pool = _Pool(encoder, started)
    try:
        for number in range(sys.maxsize):
            if num_workers is None and number == _START_CHUNKS and available_cores() > 1:
                yield from (future.result() for future in pending)
                pending.clear()
                pool.close()
                pool = _Pool(encoder, available_cores())
            try:
                pending.append(pool.submit(next(iterator)))
            except StopIteration:
                break
            except Exception as fault:
                failure = fault
                break
            if len(pending) > pool.depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if failure is not None:
            raise failure
    finally:
        pool.close()


class _Pool:
    """`size` processes, each with a thread that feeds it; with size 0 one thread that does the work."""

    def __init__(self, encoder: Encoder, size: int):
        self.depth = 3 * max(1, size)  # chunks under way: enough to keep all busy while one is written
        self._encoder = encoder
        pickled = pickle.dumps(encoder) if size else b""
        self._workers = [_Worker(pickled) for _ in range(size)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
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


class _Worker:
    """One process and the pipe to it.

    The encoder goes ahead of the first chunk. It is larger than a pipe holds, so that whoever sends it waits
    until the process has started: the thread that feeds it, while the other processes start, too.
    """

    def __init__(self, encoder: bytes):
        self._unsent = encoder  # pickled
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            # One thread each: the processes are the parallelism.
            threads = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno())],
                env=os.environ | threads | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
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
        self._process.kill()  # it holds nothing that could be lost
        self._process.wait()
        self._connection.close()


def serve(descriptor: int) -> None:
    """The process's side: encode what comes until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group, they are the parent's to handle
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
