"""Watch for a hang: end a process that makes no progress.

It needs only the standard library, so that it runs before torch is imported.
"""

import faulthandler
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable

# First occurrences of each kind of work, which compile and tune kernels and allocate memory.
FIRST_TIMES = 3
# Multiple of `timeout` for those, and for work without a kind.
LONGER = 5


class RankHung(RuntimeError):
    """Report that a rank made no progress, in one message for the user."""


class Watchdog:
    """Report a `RankHung` and end this process when the next `beat` does not arrive in time.

    Work that repeats, such as a training step, names its kind and has `timeout` seconds. The first
    `FIRST_TIMES` occurrences of a kind in this process have `LONGER` times as many, because compiling and
    tuning kernels takes minutes. Work without a kind, which waits for disks or other processes, always has
    the longer time.

    Before the first beat, while the ranks meet and read their checkpoint, only the timeout of the process
    group counts. The watch runs in a thread, because a rank that waits for another, or for a GPU, hangs
    inside a call. The rank that hangs beat last before the others, which wait for it, so its message is the
    first.

    Args:
        timeout: seconds; 0: no watch.
        report: receives the error, in the watch's thread, before the process ends without waiting for others.
    """

    def __init__(self, timeout: float, report: Callable[[BaseException], object]):
        self._timeout, self._report = timeout, report
        self._times: Counter[Hashable] = Counter()  # occurrences of each kind of work
        # Seconds that the watch has waited. They stop while the process is suspended (`scontrol suspend`).
        self._clock = 0.0
        # Current work, its deadline, and the seconds it was granted.
        self._now = ("", float("inf"), 0.0)
        self._closed = threading.Event()
        if timeout:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str, kind: Hashable = None) -> None:
        """Record progress: this rank starts the work `doing`.

        Args:
            doing: description for the message.
            kind: equal for work that uses equal kernels; None: may always be slow.
        """
        usual = kind is not None and self._times[kind] >= FIRST_TIMES
        self._times[kind] += 1
        seconds = self._timeout * (1 if usual else LONGER)
        self._now = (doing, self._clock + seconds, seconds)

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        period = min(1.0, self._timeout / 10)
        while not self._closed.wait(period):
            self._clock += period
            doing, until, seconds = self._now
            if self._clock > until:
                # Dump the stacks of all threads, which show the call that hangs.
                faulthandler.dump_traceback(file=sys.stderr)
                self._report(RankHung(f"no progress for {seconds:g} s while {doing}"))
                os._exit(1)
