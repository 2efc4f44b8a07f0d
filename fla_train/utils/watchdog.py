"""Watchdog: ends a process that makes no progress.

It needs only the standard library, so that it runs before torch is imported.
"""

import faulthandler
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable

FIRST_TIMES = 3  # of each kind of work: kernels are compiled and tuned, memory is allocated
LONGER = 5  # times `timeout` for those, and for work without a kind


class RankHung(RuntimeError):
    """A rank made no progress; the message is one line for the user."""


class Watchdog:
    """Calls `give_up` with one line when no `beat` has followed the last one in time.

    Work that repeats, such as a training step, names its kind, and has `timeout` seconds. It has `LONGER`
    times as many the first `FIRST_TIMES` that its kind occurs in this process: compiling and tuning kernels
    takes minutes. Work without a kind, which waits for disks or other processes, always has as many.

    Before the first beat, while the ranks meet and read their checkpoint, only the process group's own
    timeout counts. The watch runs in a thread, since a rank that waits for another, or for a GPU, hangs
    inside a call. The rank that hangs beat last before the others, which wait for it, so its line is the
    first.

    Args:
        timeout: seconds; 0: no watch.
        give_up: gets the line, in the watch's thread.
    """

    def __init__(self, timeout: float, give_up: Callable[[str], None]):
        self._timeout, self._give_up = timeout, give_up
        self._times: Counter[Hashable] = Counter()  # that each kind of work has occurred
        self._now = ("", float("inf"), 0.0)  # what is done, until when (monotonic), and the seconds it has
        self._closed = threading.Event()
        if timeout:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str, kind: Hashable = None) -> None:
        """Progress: what this rank does from now on.

        Args:
            doing: for the line.
            kind: equal for work that takes the same kernels; None: may always take long.
        """
        usual = kind is not None and self._times[kind] >= FIRST_TIMES
        self._times[kind] += 1
        seconds = self._timeout * (1 if usual else LONGER)
        self._now = (doing, time.monotonic() + seconds, seconds)

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout / 10)):
            doing, until, seconds = self._now
            if time.monotonic() > until:
                faulthandler.dump_traceback(file=sys.stderr)  # of all threads: where it hangs
                self._give_up(f"no progress for {seconds:g} s while {doing}")
                return


def end_process(report: Callable[[BaseException], None]) -> Callable[[str], None]:
    """A `give_up` that reports a `RankHung` and ends the process without waiting for any thread."""

    def give_up(line: str) -> None:
        report(RankHung(line))
        os._exit(1)

    return give_up
