"""Console commands: each module's `main` is a script of pyproject.toml.

What holds for all of them from their first import on stands here: each has all three standard streams, and
Ctrl-C ends it with a line.
"""

import os
import sys
from types import TracebackType

while (_descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a closed stream's number goes to a file
    os.set_inheritable(_descriptor, True)  # children need them as well
os.close(_descriptor)
sys.stdin = sys.stdin or open(0)
sys.stdout = sys.stdout or open(1, "w")
sys.stderr = sys.stderr or open(2, "w")


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)  # Python then ends with SIGINT's status, 130 in a shell
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _hook
