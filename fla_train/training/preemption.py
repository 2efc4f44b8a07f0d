"""Requests to stop, by a batch system, a terminal that closes or Ctrl-C: "save a checkpoint, then end"."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from subprocess import Popen
from types import FrameType
from typing import Self

from fla_train.training.log import log

# What `fla-train` and its workers end with after such a checkpoint: sysexits.h's "try again later".
EXIT_CODE = 75
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
REPEAT = 1.0  # seconds after which a request is passed on again
Handler = Callable[[int, FrameType | None], object] | int | None


def answer(handler: Handler) -> dict[int, Handler]:
    """Have SIGNALS call `handler`; returns what they called before. Only the main thread may ask for it.

    They are let through, too: a process inherits which signals are blocked, and one that is blocked is never
    seen, whoever would handle it. A hang-up that is ignored stays so: that is what `nohup` is for.
    """
    numbers = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in numbers}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    return previous


def restore(handlers: dict[int, Handler]) -> None:
    """Undo `answer`, but for what was blocked."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


class StopRequest:
    """A request to stop that this process may get at any time."""

    def __init__(self) -> None:
        self._made = False
        answer(self._handle)

    def made(self) -> bool:
        """Whether a request has come so far.

        Installs the handlers again each time: LLVM, with which Triton compiles, replaces them when a process
        compiles its first kernel, and SIGUSR1 would be lost.
        """
        answer(self._handle)
        return self._made

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._made = True


class Preempted(BaseException):
    """This process got a request to stop: the workers, if there were any, have saved a checkpoint and left.

    Like KeyboardInterrupt it passes by what handles errors.
    """

    def __init__(self, message: str = "stopped      the same command starts again from here") -> None:
        super().__init__(message)


class StopSignals:
    """Inside `with`, SIGNALS and a first Ctrl-C ask this process's workers to stop.

    Without workers they end it at once, by `Preempted` or `KeyboardInterrupt`; a second Ctrl-C always does.

    Attributes:
        requested: the request has been passed to the workers.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupted, self._told = False, False
        self._workers: Sequence[Popen] = ()
        self._sent = 0.0

    def __enter__(self) -> Self:
        self._previous = answer(self._handle) | {signal.SIGINT: signal.signal(signal.SIGINT, self._handle)}
        return self

    def __exit__(self, *_: object) -> None:
        restore(self._previous)

    def pass_to(self, workers: Sequence[Popen]) -> None:
        """From now on ask these."""
        self._workers = workers
        answer(self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def repeat(self) -> None:
        """Send the request again after a second: a worker that was compiling may have missed it."""
        if self._interrupted and not self._told:  # not in the handler, which may interrupt another print
            self._told = True
            log("stopping     saving a checkpoint in a few steps; Ctrl-C again quits at once")
        if self.requested and time.monotonic() - self._sent >= REPEAT:
            self._send()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (self._interrupted or not self._workers):
            raise KeyboardInterrupt
        if not self._workers:
            _leave(number, frame)
        if number == signal.SIGINT:
            self._interrupted = True
        self.requested = True
        self._send()

    def _send(self) -> None:
        self._sent = time.monotonic()
        for worker in self._workers:
            worker.send_signal(SIGNALS[0])


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Inside, a request to leave raises `Preempted`: what the launcher does by itself can be resumed.

    After `Preempted` SIGNALS are ignored: another one would end the process with another exit status.
    """
    previous = answer(_leave)
    try:
        yield
    except Preempted:
        previous = dict.fromkeys(previous, signal.SIG_IGN)
        raise
    finally:
        restore(previous)


def _leave(number: int, frame: FrameType | None) -> None:
    answer(signal.SIG_IGN)
    raise Preempted
