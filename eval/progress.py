"""Whether bars of progress show: one switch for ours, lm-eval's and those of `datasets`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """A block in which no bar shows unless `shown`; not every bar of lm-eval has a switch of its own."""
    if shown:
        yield
        return
    plain = tqdm.__init__

    def hidden(self: tqdm, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options | {"disable": True})

    tqdm.__init__ = hidden
    try:
        yield
    finally:
        tqdm.__init__ = plain
