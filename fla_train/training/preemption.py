"""Being asked to leave: SIGUSR1 and SIGTERM, which batch systems send, mean "save a checkpoint, then end"."""

import signal
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


class Preempted(Exception):
    """The workers have saved a checkpoint and left, because this process was asked to."""
