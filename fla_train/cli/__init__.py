"""Console commands: each module's `main` is a script of pyproject.toml.

A command has all three standard streams. Programs that import this package are left alone.
"""

import os
import sys


def _open_streams() -> None:
    """Open /dev/null for closed standard streams. Other files would get their numbers, and their output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # children need them as well
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0)
    sys.stdout = sys.stdout or open(1, "w")
    sys.stderr = sys.stderr or open(2, "w")


if os.path.basename(sys.argv[0]).startswith("fla-"):
    _open_streams()
