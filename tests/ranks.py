"""Processes of one job, as a launcher would start them."""

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence


def free_port() -> int:
    """One below those that the system hands out to outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def start_ranks(arguments: Sequence[str], world: int) -> list[subprocess.Popen]:
    """`python ARGUMENTS` once per rank, with pipes for what it prints."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    shared |= {"LOCAL_WORLD_SIZE": str(world)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            **pipes,
        )
        for rank in range(world)
    ]
