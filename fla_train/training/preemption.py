"""Being asked to leave: SIGUSR1 and SIGTERM, which batch systems send, mean "save a checkpoint, then end"."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# What `fla-train` and its workers end with after such a checkpoint: sysexits.h's "try again later".
EXIT_CODE = 75
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class StopRequest:
    """Whether this process has been asked to leave. Only the main thread may make one."""

    def __init__(self) -> None:
        self.made = False
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.made = True


class Preempted(BaseException):
    """This process was asked to leave: the workers, if there were any, have saved a checkpoint and left.

    Like KeyboardInterrupt it passes by what handles errors.
    """


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Inside, a request to leave raises `Preempted`: what the launcher does by itself can go on later."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Preempted

    previous = {number: signal.signal(number, leave) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
