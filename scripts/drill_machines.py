"""Faults of two machines, played by two launchers on this one's loopback, for `fault_kinds.py`."""

import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence

from drill import Drill, Inject, Unnoticed
from drill_processes import rank, restarted, send, suspend, unharmed


def _free_port() -> int:
    """One below those that the system hands out to outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


PORT = _free_port()
PATIENT, HASTY = 120, 5  # seconds to wait for the other machine


def join(drill: Drill, number: int, *more: str, wait: int = PATIENT) -> subprocess.Popen:
    """A launcher as the machine of this number, which serves the store if it is 0."""
    return drill.join(
        *("launch.num_machines=2", f"launch.main_process_port={PORT}", f"launch.machine_rank={number}"),
        *(f"launch.rendezvous_timeout={wait}", *more),
    )


def start(drill: Drill) -> None:
    drill.reset()
    for number in (0, 1):
        join(drill, number)
    drill.wait_for_progress()


def kill_and_start(number: int) -> Inject:
    """kill -9 of a launcher, which is started again and joins the other."""

    def inject(drill: Drill) -> None:
        before, ranks = drill.said("restart  "), drill.workers()
        drill.launchers[number].kill()
        drill.launchers[number].wait()
        join(drill, number)
        drill.launchers[number] = drill.launchers.pop()
        drill.wait(lambda: drill.said("restart  ") > before, "a restart")
        drill.wait_for_progress()
        drill.check_dead(ranks)

    return inject


def machine(number: int) -> Callable[[Drill], subprocess.Popen]:
    return lambda drill: drill.launchers[number]


def refused(drill: Drill, codes: Sequence[int], said: str) -> None:
    """The newest launcher ends like this; the others are not asked."""
    code = drill.launchers.pop().wait(120)
    text = drill.logs[-1].read_text()
    if code not in codes or said not in text or "Traceback" in text:
        raise Unnoticed(f"a launcher ended with {code} instead of {codes}, {said!r}:\n{text[-3000:]}")


def third(drill: Drill) -> None:
    join(drill, 1, wait=HASTY)
    refused(drill, [2], "another training process writes")


def another_run(drill: Drill) -> None:
    join(drill, 1, f"run.dir={drill.run.with_name('another')}", wait=HASTY)
    refused(drill, [1], "1 of 2 machines joined")


def connect(times: int, content: bytes) -> Inject:
    """To the store's port."""

    def inject(drill: Drill) -> None:
        for _ in range(times):
            with socket.create_connection(("127.0.0.1", PORT), timeout=10) as connection:
                with contextlib.suppress(OSError):
                    connection.sendall(content)

    return inject


def hold_connections(drill: Drill) -> None:
    """Say nothing, until the drill ends."""
    drill.held = [socket.create_connection(("127.0.0.1", PORT), timeout=10) for _ in range(50)]


IN_RUN: dict[str, Inject] = {
    "kill -9 of the machine that serves the store, which is started again": kill_and_start(0),
    "kill -9 of the other machine, which is started again": kill_and_start(1),
    "kill -9 of one machine's rank": restarted(
        send(signal.SIGKILL, rank(1)), "rank 1: was killed by SIGKILL"
    ),
    "one machine's rank is stopped": restarted(send(signal.SIGSTOP, rank(1)), "no progress for"),
    "one machine's launcher is stopped for 3 s": unharmed(suspend(machine(1))),
    "a third machine": unharmed(third),
    "another run at the same port": unharmed(another_run),
    "random bytes to the store's port": unharmed(connect(1, os.urandom(1 << 16))),
    "an HTTP request to the store's port": unharmed(connect(1, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
    "200 connections to the store's port": unharmed(connect(200, b"")),
    "50 silent connections to the store's port": unharmed(hold_connections),
}


def both_end(act: Inject, codes: set[int]) -> Inject:
    """Both launchers end with one of these."""

    def inject(drill: Drill) -> None:
        start(drill)
        started = drill.started()
        act(drill)
        found = {launcher.wait(120) for launcher in drill.launchers}
        if not found <= codes or "Traceback" in drill.text():
            raise Unnoticed(f"the launchers ended with {found}:\n{drill.text()[-3000:]}")
        drill.check_dead(started)

    return inject


def nobody_comes(drill: Drill) -> None:
    drill.reset()
    join(drill, 0, wait=HASTY)
    refused(drill, [1], "1 of 2 machines joined")


def no_store(drill: Drill) -> None:
    drill.reset()
    join(drill, 1, wait=HASTY)
    refused(drill, [1], f"no store answers at 127.0.0.1:{PORT} within {HASTY} s")


def port_taken(drill: Drill) -> None:
    drill.reset()
    with socket.create_server(("127.0.0.1", PORT)):
        join(drill, 0, wait=HASTY)
        refused(drill, [1, 2], "error: ")


def unlike(*more: str, said: str) -> Inject:
    """The second machine has another config: refused, and nobody trains."""

    def inject(drill: Drill) -> None:
        drill.reset()
        join(drill, 0)
        join(drill, 1, *more)
        codes = [launcher.wait(120) for launcher in drill.launchers]
        if not set(codes) <= {1, 2} or said not in drill.text() or "Traceback" in drill.text():
            raise Unnoticed(f"unlike machines ended with {codes}:\n{drill.text()[-3000:]}")

    return inject


ENDING: dict[str, Inject] = {
    "SIGTERM to the machine that serves the store": both_end(send(signal.SIGTERM, machine(0)), {75}),
    "SIGTERM to the other machine": both_end(send(signal.SIGTERM, machine(1)), {75}),
    "no other machine comes": nobody_comes,
    "the machine that serves the store does not come": no_store,
    "the store's port is taken": port_taken,
    "machines with different settings": unlike("trainer.log_every=3", said="the machines differ in trainer"),
    "machines with different numbers of ranks": unlike("launch.num_processes=4", said="error: "),
}
