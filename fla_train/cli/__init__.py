"""Console commands: each module's `main` is a script of pyproject.toml.

A command has all three standard streams, and Ctrl-C ends it with a line, from its first import on. Programs
that import this package are left alone.
"""

import os
import sys
from types import TracebackType


def _end_by_a_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)  # Python then ends with SIGINT's status, 130 in a shell
    else:
        sys.__excepthook__(kind, error, trace)


def _open_streams() -> None:
    """Open /dev/null for closed standard streams: their numbers would go to other files."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # children need them as well
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0)
    sys.stdout = sys.stdout or open(1, "w")
    sys.stderr = sys.stderr or open(2, "w")


if os.path.basename(sys.argv[0]).startswith("fla-"):
    _open_streams()
    sys.excepthook = _end_by_a_line
