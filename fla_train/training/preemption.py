"""Handle requests to stop from a batch system, a closed terminal or Ctrl-C: save a checkpoint, then end."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from subprocess import Popen
from types import FrameType
from typing import Self

from fla_train.training.log import log

# Exit code of `fla-train` and its workers after such a checkpoint: "try again later" in sysexits.h.
EXIT_CODE = 75
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
REPEAT = 1.0  # seconds until a request is sent again
Handler = Callable[[int, FrameType | None], object] | int | None


def install(handler: Handler) -> dict[int, Handler]:
    """Install `handler` for SIGNALS and return the previous handlers. Only the main thread may call it.

    It also unblocks the signals, because a process inherits blocked signals and would never receive them. An
    ignored SIGHUP stays ignored, as `nohup` requires.
    """
    numbers = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in numbers}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    return previous


def restore(handlers: dict[int, Handler]) -> None:
    """Restore the handlers that `install` replaced. Signals stay unblocked."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


class StopRequest:
    """Receive requests to stop in this process at any time."""

    def __init__(self) -> None:
        self._arrived = False
        install(self._handle)

    def arrived(self) -> bool:
        """Return whether a request has arrived.

        It reinstalls the handlers each time: LLVM, with which Triton compiles, replaces them when a process
        compiles its first kernel, and SIGUSR1 would be lost.
        """
        install(self._handle)
        return self._arrived

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._arrived = True


class Preempted(BaseException):
    """Report that this process was asked to stop, and that its workers, if any, have saved a checkpoint.

    Like KeyboardInterrupt, it is not an `Exception`, so error handlers do not catch it.
    """

    def __init__(self, message: str = "stopped      the same command starts again from here") -> None:
        super().__init__(message)


class StopSignals:
    """Ask this process's workers to stop when SIGNALS or a first Ctrl-C arrive inside the `with` block.

    Without workers a signal raises `Preempted` or `KeyboardInterrupt` at once. A second Ctrl-C always does.

    Attributes:
        workers: the processes to which requests are passed.
        requested: whether a request has been passed to the workers.
    """

    def __init__(self) -> None:
        self.workers: Sequence[Popen] = ()
        self.requested = False
        self._interrupted, self._announced = False, False
        self._sent = 0.0

    def __enter__(self) -> Self:
        self._previous = install(self._handle) | {signal.SIGINT: signal.signal(signal.SIGINT, self._handle)}
        return self

    def __exit__(self, *_: object) -> None:
        restore(self._previous)

    def repeat(self) -> None:
        """Send the request again after a second, because a worker that was compiling may have missed it."""
        # Print outside the handler, which may interrupt another print.
        if self._interrupted and not self._announced:
            self._announced = True
            # A sweep writes stdout to a file.
            log("stopping     saving a checkpoint in a few steps; Ctrl-C again quits at once", error=True)
        if self.requested and time.monotonic() - self._sent >= REPEAT:
            self._send()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (self._interrupted or not self.workers):
            raise KeyboardInterrupt
        if not self.workers:
            _leave(number, frame)
        self._interrupted |= number == signal.SIGINT
        self.requested = True
        self._send()

    def _send(self) -> None:
        self._sent = time.monotonic()
        for worker in self.workers:
            worker.send_signal(SIGNALS[0])


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Raise `Preempted` on a request to leave inside the `with` block, for work that can be resumed.

    After `Preempted` SIGNALS are ignored, because another signal would change the exit status.
    """
    previous = install(_leave)
    try:
        yield
    except Preempted:
        previous = dict.fromkeys(previous, signal.SIG_IGN)
        raise
    finally:
        restore(previous)


def _leave(number: int, frame: FrameType | None) -> None:
    install(signal.SIG_IGN)
    raise Preempted
