"""Ends a rank that makes no progress, so that the launcher can say so and start again."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


class Watchdog:
    """Calls `give_up` with one line when no `beat` has followed the last one for `timeout` seconds.

    Before the first beat, while the ranks find each other, the process group's own timeout counts. The watch
    runs in a thread, since a rank that waits for another, or for a GPU, hangs inside a call. The rank that
    hangs beat last before the others, which wait for it, so its line is the first.

    Args:
        timeout: seconds; 0: no watch.
        give_up: gets the line; by default it ends the process at once.
    """

    def __init__(self, timeout: float, give_up: Callable[[str], None]):
        self._timeout, self._give_up = timeout, give_up
        self._doing, self._since = "", float("inf")
        self._closed = threading.Event()
        if timeout:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str) -> None:
        """Progress: what this rank does from now on."""
        self._doing, self._since = doing, time.monotonic()

    def over(self, items: Iterable[_T], doing: str) -> Iterator[_T]:
        """`items`, of which each one asked for is progress."""
        for item in items:
            self.beat(doing)
            yield item

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout / 10)):
            if time.monotonic() - self._since > self._timeout:
                faulthandler.dump_traceback(file=sys.stderr)  # of all threads: where it hangs
                self._give_up(f"no progress for {self._timeout:g} s while {self._doing}")
                return


def end_process(report: Callable[[BaseException], None]) -> Callable[[str], None]:
    """A `give_up` that reports a `RankHung` and ends the process without waiting for any thread."""

    def give_up(line: str) -> None:
        report(RankHung(line))
        os._exit(1)

    return give_up


class RankHung(RuntimeError):
    """A rank made no progress; the message is one line for the user."""
