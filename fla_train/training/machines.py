"""The machines of a run, as their launchers see each other: who takes part in an attempt, and how it ends."""

import os
import secrets
import threading
import time
from dataclasses import asdict, dataclass
from socketserver import BaseServer
from typing import Any

from fla_train.training.board import HERE, LEFT, ROLL, Board, Notices, ask, serve
from fla_train.training.preemption import Preempted
from fla_train.training.rendezvous import check_address
from fla_train.training.schema import LaunchConfig

DEFAULT_PORT = 29500
POLL = 0.2  # seconds between looks at the board while waiting
WATCH = 1.0  # and otherwise
LINGER = 5.0  # seconds that machine 0 gives the others to read its last notice
FAILED = "failed "  # begins the names of notices that say so


@dataclass(frozen=True)
class Failure:
    """How an attempt to train ended."""

    who: str  # "rank 3", "machine 1"
    line: str
    final: bool = False  # to start again would end the same way

    def __str__(self) -> str:
        return f"{self.who}: {self.line}"


class AttemptEnded(Exception):
    """This attempt is over, here or on another machine."""

    def __init__(self, failure: Failure):
        super().__init__(str(failure))
        self.failure = failure


class Machines:
    """This machine's launcher among those of a run. All make one and call its methods alike.

    A machine that has been started again joins the next attempt, which its coming begins. Inside `with`, an
    exception ends the run on all machines; `Preempted` the attempt only, or nothing where all have agreed.

    Args:
        run: the run's folder, as all machines are told it. A board of another run is none of theirs.

    Attributes:
        attempt: the name of the present attempt; unlike that of any other, before or elsewhere.
        greeting: what machine 0 said when it began.
        place: where machine 0's board is served, for a reader.
    """

    def __init__(self, launch: LaunchConfig, run: str | None = None):
        self._number, self._count = launch.machine_rank, launch.num_machines
        self._processes, self._timeout = launch.num_processes, launch.rendezvous_timeout
        self._address = launch.main_process_ip, launch.main_process_port or DEFAULT_PORT
        self.place = f"{self._address[0]}:{self._address[1]}"
        self.attempt = ""
        self.greeting: dict[str, Any] = {}
        self._run = os.path.abspath(run) if run else ""
        self._board = Board(self._run) if self._number == 0 else None
        self._server: BaseServer | None = None
        self._newest, self._heard = Notices(), time.monotonic()
        self._asking = threading.Lock()  # an older answer must not follow a newer one
        self._closed = threading.Event()

    def __enter__(self) -> "Machines":
        """Raises `ValueError`: the address is none for all machines, or its port is taken."""
        if self._count > 1:
            host, port = self._address
            check_address(host, port)
            if self._board is None:
                threading.Thread(target=self._watch, name="machines", daemon=True).start()
            else:
                try:
                    self._server = serve(self._board, port)
                except OSError as error:
                    raise ValueError(
                        f"launch.main_process_port={port} is taken ({error.strerror}): give all machines a "
                        "free port of machine 0"
                    ) from None
        return self

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        self._closed.set()
        if self._count == 1:
            return
        asked = isinstance(fault, Preempted)
        agreed = asked and fault.agreed
        if fault is not None and not agreed:
            line = "was asked to leave" if asked else " ".join(str(fault).split()) or "was interrupted"
            self.fail(Failure(f"machine {self._number}", line, final=not asked))
        if self._board is not None:
            if not agreed:
                self._linger(self._board)
            self._server.shutdown()
            self._server.server_close()

    def meet(self, greeting: dict[str, Any]) -> None:
        """Begin an attempt, once all machines have come to it.

        Raises:
            AttemptEnded: a machine did not come in time, or has left for good.
            ValueError: this machine was told of another number of machines or processes.
        """
        token = secrets.token_hex(4)  # tells this coming from an earlier one
        sizes = {"launch.num_machines": self._count, "launch.num_processes": self._processes}
        here = {"token": token, "sizes": sizes, "greeting": greeting}
        attempt = self._board.begin() if self._board is not None else ""
        names = [f"{HERE}{machine}" for machine in range(self._count)]
        deadline = time.monotonic() + self._timeout
        content: dict[str, Any] = {}
        while time.monotonic() < deadline:
            notices = self._look(attempt, {names[self._number]: here})
            content = notices.content if notices else {}
            if notices and notices.attempt != attempt:
                attempt = notices.attempt
                continue
            _check_sizes(sizes, content)
            # Machine 0 may have gone for good after it said so.
            if (over := _over(content or self._newest.content)) and over.final:
                raise AttemptEnded(over)
            if ROLL not in content:
                if self._board is not None and all(name in content for name in names):
                    self._look(attempt, {ROLL: [content[name]["token"] for name in names]})
                    continue
            elif content[ROLL][self._number] == token:
                self.attempt, self.greeting = attempt, content[names[0]]["greeting"]
                return
            else:  # the one before goes on without this machine, which had a part in it: it must end
                again = Failure(f"machine {self._number}", "was started again")
                self._look(attempt, {f"{FAILED}{self._number}": asdict(again)})
            time.sleep(POLL)
        raise AttemptEnded(self._missing(names, content))

    def gather(self, name: str, value: Any) -> list[Any]:
        """The JSON-able `value` of every machine, in order. One may take any time, while it is heard of.

        Raises:
            AttemptEnded: a machine has ended the attempt, or has gone.
        """
        names = [f"{name} {machine}" for machine in range(self._count)]
        while True:
            # Machine 0 may have gone after the last notice, which the watch then has heard of.
            notices = self._look(self.attempt, {names[self._number]: value}) or self._newest
            if notices.attempt == self.attempt and all(name in notices.content for name in names):
                return [notices.content[name] for name in names]
            if over := self._over(notices):
                raise AttemptEnded(over)
            if silent := self._silent():
                who = f"machine {', '.join(map(str, silent))}"
                raise AttemptEnded(Failure(who, f"was not heard of for {self._timeout:g} s"))
            time.sleep(POLL)

    def failure(self) -> Failure | None:
        """How another machine has ended the attempt, if one has. Does not wait."""
        return self._over(self._look("", {}) if self._board is not None else self._newest)

    def fail(self, failure: Failure) -> Failure:
        """End the attempt on all machines; returns the failure that was the first, or final."""
        name = f"{LEFT if failure.final else FAILED}{self._number}"
        notices = self._look(self.attempt, {name: asdict(failure)})
        if failure.final and notices and notices.attempt != self.attempt:  # the others have begun anew
            self._look(notices.attempt, {name: asdict(failure)})
        return _over(notices.content) or failure if notices and notices.attempt == self.attempt else failure

    def _look(self, attempt: str, posts: dict[str, Any]) -> Notices | None:
        """The board after `posts`; None if machine 0 does not answer."""
        if self._board is not None:
            return self._board.exchange(self._number, attempt, posts)
        with self._asking:
            try:
                self._newest = ask(self._address, self._run, self._number, attempt, posts)
            except (OSError, ValueError, TypeError):  # the last two: another program answers
                return None
            self._heard = time.monotonic()
            return self._newest

    def _watch(self) -> None:
        """Keep hearing and being heard."""
        while not self._closed.wait(WATCH):
            self._look("", {})

    def _over(self, notices: Notices) -> Failure | None:
        if notices.attempt != self.attempt:
            return Failure("machine 0", "has begun another attempt")
        return _over(notices.content)

    def _silent(self) -> list[int]:
        """Machines not heard of for too long."""
        since = time.monotonic() - self._timeout
        if self._board is None:
            return [0] if self._heard < since else []
        return [machine for machine, seen in list(self._board.seen.items()) if seen < since]

    def _missing(self, names: list[str], content: dict[str, Any]) -> Failure:
        within = f"within {self._timeout:g} s (launch.rendezvous_timeout): see what fla-train says there"
        missing = [str(machine) for machine, name in enumerate(names) if name not in content]
        if names[0] not in content:
            of = f" for run.dir={self._run}" if self._run else ""
            return Failure("machine 0", f"did not answer at {self.place}{of} {within}")
        if ROLL in content:
            return Failure("machine 0", f"did not begin another attempt {within}")
        return Failure(f"machine {', '.join(missing)}", f"did not come to {self.place} {within}")

    def _linger(self, board: Board) -> None:
        """Let the others read what hangs there now."""
        posted = time.monotonic()
        others = [machine for machine in list(board.seen) if machine != self._number]
        while time.monotonic() < posted + LINGER and any(board.seen[m] < posted for m in others):
            time.sleep(0.05)


def _check_sizes(sizes: dict[str, int], content: dict[str, Any]) -> None:
    first = content.get(f"{HERE}0", {}).get("sizes", sizes)
    if faults := [
        f"{key}={value} (machine 0: {first[key]})" for key, value in sizes.items() if value != first[key]
    ]:
        raise ValueError(f"the machines were told different things: {', '.join(faults)}")


def _over(content: dict[str, Any]) -> Failure | None:
    """Of the failures put up the first final one, else the first."""
    failures = [Failure(**said) for name, said in content.items() if name.startswith((FAILED, LEFT))]
    return next((failure for failure in failures if failure.final), failures[0] if failures else None)
