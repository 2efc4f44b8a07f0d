"""What the launchers of a run tell each other: notices on a board that machine 0 keeps.

A notice stays as it was first put up, but for that of a machine's coming: until the roll has been called it
may come anew. The board belongs to one attempt to train, whose name is drawn anew each time: what is said of
another attempt is not put up, so nobody takes its word for this one's. Who names another run gets no answer.

Every request is a connection of its own and ends within seconds. So a network that comes back is simply used
again, and nobody is held up by a machine that has gone.
"""

import json
import secrets
import socket
import socketserver
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

REQUEST = 5.0  # seconds for one request
LONGEST = 1 << 20  # bytes of one
HERE = "here "  # begins the names of notices that a machine has come
ROLL = "roll"  # the notice of who takes part
LEFT = "left "  # begins the names of notices that outlive an attempt


@dataclass
class Notices:
    """What hangs on the board, in the order in which it was put up."""

    attempt: str = ""
    content: dict[str, Any] = field(default_factory=dict)


class Board:
    """The board of a run itself, on machine 0. Threads may share it."""

    def __init__(self, run: str = "") -> None:
        self.run = run
        self._lock = threading.Lock()
        self._notices = Notices()
        self.seen: dict[int, float] = {}  # when each machine last looked, by time.monotonic()

    def begin(self) -> str:
        """Take everything down for a new attempt, but for who has left for good; returns its name."""
        with self._lock:
            left = {name: said for name, said in self._notices.content.items() if name.startswith(LEFT)}
            self._notices = Notices(secrets.token_hex(4), left)
            return self._notices.attempt

    def exchange(self, machine: int, attempt: str, posts: dict[str, Any]) -> Notices:
        """Put up `posts` of `machine`, if they are of the present attempt; what hangs there then."""
        with self._lock:
            self.seen[machine] = time.monotonic()
            if attempt == self._notices.attempt:
                content = self._notices.content
                for name, notice in posts.items():
                    if name not in content or (name.startswith(HERE) and ROLL not in content):
                        content[name] = notice
            return Notices(self._notices.attempt, dict(self._notices.content))


def serve(board: Board, port: int) -> socketserver.BaseServer:
    """Answer requests for `board` on all of this machine's addresses, in threads, until it is closed.

    Raises:
        OSError: the port is taken.
    """
    server = _Server(("", port), _Answer)
    server.board = board
    closes_within = 0.05  # seconds
    threading.Thread(target=server.serve_forever, args=(closes_within,), name="board", daemon=True).start()
    return server


def ask(address: tuple[str, int], run: str, machine: int, attempt: str, posts: dict[str, Any]) -> Notices:
    """`Board.exchange` with the board of `run` that is served at `address`.

    Raises:
        OSError: there is no answer, as from the board of another run.
        ValueError: something else answers there.
    """
    request = {"run": run, "machine": machine, "attempt": attempt, "posts": posts}
    with socket.create_connection(address, timeout=REQUEST) as connection, connection.makefile("rwb") as file:
        file.write(json.dumps(request).encode() + b"\n")
        file.flush()
        answer = file.readline(LONGEST)
    if not answer:
        raise ConnectionResetError("no answer")
    return Notices(**json.loads(answer))


class _Answer(socketserver.StreamRequestHandler):
    timeout = REQUEST
    server: "_Server"

    def handle(self) -> None:
        try:
            request = json.loads(self.rfile.readline(LONGEST))
            board = self.server.board
            if request["run"] != board.run:
                return
            notices = board.exchange(request["machine"], request["attempt"], request["posts"])
            self.wfile.write(json.dumps(asdict(notices)).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError):  # it has gone, or is none of ours
            return


class _Server(socketserver.ThreadingTCPServer):
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128  # machines may all ask at once
    board: Board

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:  # where IPv4 comes in too
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()
