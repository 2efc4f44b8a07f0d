"""Read and repair the records of metrics.jsonl and of starts: one JSON object a line, with a `step`.

A damaged line (a flipped byte, a write that a kill cut short) costs only itself: readers skip it and log it,
and `drop_records_after` keeps it.
"""

import json
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fla_train.utils.errors import described
from fla_train.utils.filesystem import write_whole

logger = logging.getLogger(__name__)

# `step`, `tokens`, and training keys (loss, lr, grad_norm, tokens_per_second, ...) or validation keys.
Record = dict[str, float | int | bool | None]


def read_metrics(path: Path) -> list[Record]:
    """Return the records of a file in order, none if it is missing. Log each damaged line once."""
    return [record for _, record in _lines(path) if record is not None]


def drop_records_after(path: Path, step: int) -> None:
    """Drop the records of later steps atomically. Damaged lines stay, and the file ends with a newline.

    Raises:
        OSError: the disk is full, or the folder can't be written.
    """
    kept = [line for line, record in _lines(path) if record is None or record["step"] <= step]
    content = b"".join(line + b"\n" for line in kept)
    if path.exists() and content != path.read_bytes():
        write_whole(path, content)


def _lines(path: Path) -> Iterator[tuple[bytes, Record | None]]:
    """Yield each line without its newline, and its record, or None if it is damaged."""
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n") if content else (), start=1):
        try:
            record = json.loads(line.decode())
            # A larger step would make names too long for a file system.
            if type(record["step"]) not in (int, float) or not 0 <= record["step"] <= 2**53:
                raise ValueError("its step is not a number from 0 to 2^53")
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            _warn(path, number, described(error))
            record = None
        yield line, record


@cache
def _warn(path: Path, number: int, why: str) -> None:
    logger.warning("%s line %d is damaged (%s): it is skipped, and stays in the file", path, number, why)
