"""Being asked to leave, by a batch system or a terminal that closes: "save a checkpoint, then end"."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# What `fla-train` and its workers end with after such a checkpoint: sysexits.h's "try again later".
EXIT_CODE = 75
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], object] | int | None


def answer(handler: Handler) -> dict[int, Handler]:
    """Have SIGNALS call `handler`; returns what they called before. Only the main thread may ask for it.

    They are let through, too: a process inherits which signals are blocked, and one that is blocked is never
    seen, whoever would handle it. A hang-up that is ignored stays so: that is what `nohup` is for.
    """
    asked = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in asked}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)
    return previous


def restore(handlers: dict[int, Handler]) -> None:
    """Undo `answer`, but for what was blocked."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


class StopRequest:
    """Whether this process has been asked to leave."""

    def __init__(self) -> None:
        self._made = False
        answer(self._handle)

    def heard(self) -> bool:
        """Whether a request has come so far.

        Listens anew each time: LLVM, with which Triton compiles, puts its own handlers in place of ours when
        a process compiles its first kernel, and SIGUSR1 is lost on them.
        """
        answer(self._handle)
        return self._made

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._made = True


class Preempted(BaseException):
    """This process was asked to leave: the workers, if there were any, have saved a checkpoint and left.

    Like KeyboardInterrupt it passes by what handles errors.

    Attributes:
        agreed: the workers of all machines leave together.
    """

    def __init__(self, agreed: bool = False):
        super().__init__()
        self.agreed = agreed


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Inside, a request to leave raises `Preempted`: what the launcher does by itself can go on later."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Preempted

    previous = answer(leave)
    try:
        yield
    finally:
        restore(previous)
