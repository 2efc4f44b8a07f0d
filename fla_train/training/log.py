"""Output of a run: a progress bar on a terminal, plain lines elsewhere, and everything in train.log."""

import logging
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from fla_train.utils.ranks import is_first
from fla_train.utils.records import Record

PLAIN_INTERVAL = 5.0  # seconds between progress lines without a terminal


def redirect_output(log: Path) -> TextIO:
    """Append this process's stdout and stderr, native libraries included, to `log`; return the old stdout."""
    log.parent.mkdir(parents=True, exist_ok=True)
    console = os.fdopen(os.dup(1), "w", buffering=1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    return console


def log(text: str) -> None:
    """Print a line for whoever gave the command, if their terminal is still there. Ranks but 0 print none."""
    with suppress(OSError):
        if is_first():
            print(text, flush=True)


class Console:
    """Progress of rank 0. Lines go to the terminal and, through the redirected stdout, to train.log.

    A terminal that has gone or a full disk costs lines, not the run.
    """

    def __init__(self, stream: TextIO, *, total: int, done: int):
        self._stream, self._total = stream, total
        self._start, self._first = time.monotonic(), done
        self._last_line = float("-inf")
        self._bar = None
        if stream.isatty():
            self._bar = tqdm(total=total, initial=done, file=stream, unit="step", dynamic_ncols=True)

    def line(self, text: str) -> None:
        """A line of its own, above the bar."""
        _print(text, sys.stdout)
        if self._bar is None:
            _print(text, self._stream)
        else:
            with suppress(OSError):
                self._bar.write(text, file=self._stream)

    def progress(self, record: Record) -> None:
        """Show one training record."""
        step = int(record["step"])
        if self._bar is not None:
            self._bar.n = step
            with suppress(OSError):
                self._bar.set_postfix_str(
                    f"loss {record['loss']:.4f}, {record['tokens_per_second']:,.0f} tokens/s", refresh=True
                )
        now = time.monotonic()
        if now - self._last_line >= PLAIN_INTERVAL or step == self._total:
            self._last_line = now
            text = self._plain(record, now)
            _print(text, sys.stdout)
            if self._bar is None:
                _print(text, self._stream)

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()

    def _plain(self, record: Record, now: float) -> str:
        step = int(record["step"])
        remaining = (now - self._start) / max(1, step - self._first) * (self._total - step)
        utilisation = f"MFU {record['mfu']:.1%}  " if "mfu" in record else ""
        return (
            f"step {step:,}/{self._total:,}  loss {record['loss']:.4f}  lr {record['lr']:.2e}  "
            f"grad {record['grad_norm']:.3f}  {record['tokens_per_second']:,.0f} tokens/s  {utilisation}"
            f"ETA {timedelta(seconds=round(remaining))}"
        )


def _print(text: str, stream: TextIO) -> None:
    with suppress(OSError):
        print(text, file=stream, flush=True)
