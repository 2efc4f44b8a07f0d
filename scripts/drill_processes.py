"""Faults of processes on one machine, for `fault_kinds.py`."""

import contextlib
import fcntl
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from drill import TRAIN, Drill, Inject, Unnoticed
from drill_points import Point, put_now


def restarted(act: Inject, said: str = "") -> Inject:
    """The launcher starts the ranks again, and says why."""

    def inject(drill: Drill) -> None:
        before = drill.said("restart  "), drill.said(said)
        act(drill)
        drill.wait(
            lambda: drill.said("restart  ") > before[0] and drill.said(said) >= before[1] + bool(said),
            f"a restart by {said}",
        )

    return inject


def lost_a_checkpoint(act: Inject, undo: Inject, said: str) -> Inject:
    """No checkpoint, which is said, and a later one once the cause is gone."""

    def inject(drill: Drill) -> None:
        before = drill.said(said)
        act(drill)
        drill.wait(lambda: drill.said(said) > before, said)
        undo(drill)
        drill.wait_for_checkpoint()

    return inject


def unharmed(act: Inject) -> Inject:
    """Training goes on in the same processes."""

    def inject(drill: Drill) -> None:
        ranks = drill.workers()
        act(drill)
        if drill.launcher.poll() == 0:
            return  # it got to the end meanwhile
        drill.wait_for_checkpoint()
        if drill.workers() != ranks:
            raise Unnoticed(f"the ranks were started again:\n{drill.text()[-2000:]}")

    return inject


def ended(act: Inject, code: int, said: str = "") -> Inject:
    """The launcher ends with this status, and says why."""

    def inject(drill: Drill) -> None:
        act(drill)
        drill.wait_for_end(code)
        if said not in drill.text():
            raise Unnoticed(f"the launcher did not say {said!r}:\n{drill.text()[-2000:]}")

    return inject


def send(number: signal.Signals, pick: Callable[[Drill], object]) -> Inject:
    return lambda drill: pick(drill).send_signal(number)


def rank(number: int) -> Callable[[Drill], psutil.Process]:
    return lambda drill: drill.workers()[number]


def writer(number: int) -> Callable[[Drill], psutil.Process]:
    return lambda drill: drill.workers()[number].children()[0]


def agent(drill: Drill) -> subprocess.Popen:
    return drill.launcher


def raise_at(at: str, error: str) -> Inject:
    """An exception in rank 0 when it next comes to a function."""

    def inject(drill: Drill) -> None:
        put_now(Point("worker-0", at, f"raise {error}"))
        drill.workers()[0].send_signal(signal.SIGUSR2)

    return inject


def fall_asleep(drill: Drill) -> None:
    put_now(Point("worker-1", "trainer.py:Trainer._read", "sleep"))
    drill.workers()[1].send_signal(signal.SIGUSR2)


def suspend(*picks: Callable[[Drill], object], seconds: float = 3.0) -> Inject:
    """SIGSTOP, and SIGCONT some time later."""

    def inject(drill: Drill) -> None:
        processes = [psutil.Process(pick(drill).pid) for pick in picks]
        for process in processes:
            process.suspend()
        time.sleep(seconds)
        for process in processes:
            process.resume()

    return inject


def kill_all_ranks(drill: Drill) -> None:
    for process in drill.workers():
        process.kill()


def limit(pick: Callable[[Drill], psutil.Process], what: int, value: int) -> Inject:
    def inject(drill: Drill) -> None:
        pick(drill).rlimit(what, (value, resource.RLIM_INFINITY if what != psutil.RLIMIT_NOFILE else 4096))

    return inject


def move(name: str, to: str) -> Inject:
    """Rename in the run's folder; an empty `name` is the folder itself."""

    def inject(drill: Drill) -> None:
        old = drill.run / name
        old.rename(old.with_name(to) if name else drill.run.with_name(to))

    return inject


def second_launcher(before: Inject = lambda drill: None) -> Inject:
    """Another `fla-train` for the same folder is refused."""

    def inject(drill: Drill) -> None:
        before(drill)
        second = drill.join()
        code = second.wait(120)
        text = drill.logs[-1].read_text()
        drill.launchers.pop()
        if code != 2 or "another training process writes" not in text:
            raise Unnoticed(f"a second launcher ended with {code}:\n{text[-2000:]}")

    return inject


def replace_lock(make: Callable[[Path], object]) -> Inject:
    def inject(drill: Drill) -> None:
        lock = drill.run / ".lock"
        lock.unlink()
        make(lock)

    return inject


def block_exports(drill: Drill) -> None:
    exports, kept, before = drill.run / "hf", drill.run / "kept", drill.said("NO EXPORT")
    exports.mkdir(exist_ok=True)
    exports.rename(kept)
    exports.touch()
    drill.wait(lambda: drill.said("NO EXPORT") > before, "word of it")
    exports.unlink()
    kept.rename(exports)


# What a launched run outlives.
IN_RUN: dict[str, Inject] = {
    "kill -9 of all ranks at once": restarted(kill_all_ranks, "was killed by SIGKILL"),
    "SIGQUIT to a rank": restarted(send(signal.SIGQUIT, rank(1)), "rank 1: was killed by SIGQUIT"),
    "a limit on CPU time ends a rank": restarted(
        limit(rank(0), psutil.RLIMIT_CPU, 1), "rank 0: was killed by SIGXCPU"
    ),
    "a rank falls asleep in Python": restarted(fall_asleep, "no progress for"),
    "the launcher is stopped for 3 s": unharmed(suspend(agent)),
    "all processes are stopped for 3 s": unharmed(suspend(agent, rank(0), rank(1), writer(0), writer(1))),
    "rank 1's writer is stopped for 3 s": unharmed(suspend(writer(1))),
    "kill -9 of an idle writer": lambda drill: (writer(1)(drill).kill(), drill.wait_for_checkpoint()),
    "rank 0's writer is stopped for good": restarted(send(signal.SIGSTOP, writer(0)), "no progress for"),
    "rank 0's writer runs out of file descriptors": lost_a_checkpoint(
        limit(writer(0), psutil.RLIMIT_NOFILE, 4),
        limit(writer(0), psutil.RLIMIT_NOFILE, 1024),
        "rank 0: Too many open files",
    ),
    "the folder of checkpoints is renamed": lost_a_checkpoint(
        move("checkpoints", "moved"), move("moved", "checkpoints"), "NO CHECKPOINT"
    ),
    "the folder of exports is replaced by a file": block_exports,
    "train.log and the other rank's log renamed": unharmed(
        lambda drill: (move("train.log", "old.log")(drill), move("logs", "old-logs")(drill))
    ),
}


# Another launcher comes, which takes seconds.
SECOND: dict[str, Inject] = {
    "a second fla-train": unharmed(second_launcher()),
    "`.lock` deleted, then a second fla-train": unharmed(second_launcher(replace_lock(lambda lock: None))),
}


def ctrl_c_twice(drill: Drill) -> None:
    drill.launcher.send_signal(signal.SIGINT)
    time.sleep(0.05)
    drill.launcher.send_signal(signal.SIGINT)


def storm(drill: Drill) -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP) * 50:
        with contextlib.suppress(ProcessLookupError):
            drill.launcher.send_signal(number)
        time.sleep(0.002)


def kill_stopped_agent(drill: Drill) -> None:
    drill.launcher.send_signal(signal.SIGSTOP)
    drill.launcher.kill()
    drill.wait_for_end(-signal.SIGKILL)


def delete_scratch(drill: Drill) -> None:
    """What the launcher keeps in the system's folder for temporary files; then a rank is killed."""
    for folder in Path(os.environ["TMPDIR"]).glob("fla-train-*"):
        shutil.rmtree(folder)
    drill.workers()[1].kill()


def rename_run(drill: Drill) -> None:
    """And back once it has been noticed."""
    moved = drill.run.with_name("moved")
    drill.run.rename(moved)
    try:
        ended(lambda _: None, 2, "was renamed or deleted while it was trained")(drill)
    finally:
        shutil.rmtree(drill.run, ignore_errors=True)  # an empty one, if it was made again
        moved.rename(drill.run)


def exchange_run(drill: Drill) -> None:
    """Another folder takes the run folder's name."""
    moved = drill.run.with_name("moved")
    drill.run.rename(moved)
    (drill.run / "checkpoints").mkdir(parents=True)
    try:
        ended(lambda _: None, 2, "was renamed or deleted while it was trained")(drill)
        if len(found := list(drill.run.rglob("step-*"))) > 1:  # one may have been under way
            raise Unnoticed(f"checkpoints in the other folder: {found}")
    finally:
        shutil.rmtree(drill.run)
        moved.rename(drill.run)


# What ends a launched run; the same command goes on.
ENDING: dict[str, Inject] = {
    "one Ctrl-C": ended(send(signal.SIGINT, agent), 75, "stopped on request"),
    "two Ctrl-C": ended(ctrl_c_twice, 130, "interrupted"),
    "150 requests to stop within a second": ended(storm, 75, "stopped on request"),
    "SIGTERM to one rank only": ended(send(signal.SIGTERM, rank(1)), 75, "stopped on request"),
    "kill -9 of a launcher that is stopped": kill_stopped_agent,
    "no memory left (MemoryError)": ended(
        raise_at("trainer.py:Trainer._read", "MemoryError"), 2, "out of host memory: set trainer."
    ),
    "an error that would come again": ended(
        raise_at("trainer.py:Trainer._read", "ValueError"), 2, "rank 0: drill"
    ),
    "the launcher's temporary files deleted, then a rank killed": ended(
        delete_scratch, 2, "config.yaml is no config"
    ),
    "the run's folder renamed": rename_run,
    "the run's folder replaced": exchange_run,
}


def start_without_output(drill: Drill, **options: object) -> None:
    drill.launch(**options)
    drill.wait_for_progress()
    ended(send(signal.SIGTERM, agent), 75)(drill)


def full_output(drill: Drill) -> None:
    with open("/dev/full", "w") as full:
        start_without_output(drill, stdout=full, stderr=full)


def no_reader(drill: Drill) -> None:
    reader, end = os.pipe()
    os.close(reader)
    start_without_output(drill, stdout=end, stderr=end)
    os.close(end)


def close_terminal(drill: Drill) -> None:
    """The launcher's own terminal goes, as when an ssh connection breaks."""
    master, terminal = pty.openpty()

    def own() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    drill.launch(stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=own)
    os.close(terminal)
    drill.wait_for_progress()
    os.close(master)
    drill.wait_for_end(75)


def stop_imports(drill: Drill) -> None:
    drill.launch()
    drill.wait(lambda: len(drill.workers()) == 2, "a start of both ranks")
    ended(send(signal.SIGTERM, agent), 75, "stopped on request")(drill)


def relaunch_at_once(drill: Drill) -> None:
    """While the ranks of the launcher that was killed still die."""
    drill.launch()
    drill.wait_for_progress()
    started = drill.started()
    drill.launcher.kill()
    drill.launch()
    drill.wait_for_progress()
    drill.check_dead(started)
    ended(send(signal.SIGUSR1, agent), 75)(drill)


def kill_torchrun(drill: Drill) -> None:
    """Its ranks die with it, and the same command under our launcher goes on."""
    options = [option for option in drill.command[len(TRAIN) :] if "num_processes" not in option]
    drill.launch(
        args=[
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
            *("-m", "fla_train.cli.train", *options),
        ],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    before = drill.step()
    drill.wait(lambda: drill.step() != before, "a first step")
    drill.wait_for_checkpoint()
    drill.launcher.kill()
    drill.wait_for_end(-signal.SIGKILL)


# Starts that begin in a certain way, and end.
STARTS: dict[str, Inject] = {
    "output to a full disk (/dev/full)": full_output,
    "output to a pipe whose reader is gone": no_reader,
    "the terminal closes": close_terminal,
    "kill -9 of torchrun": kill_torchrun,
    "SIGTERM while the ranks import": stop_imports,
    "kill -9 of the launcher, which is started again at once": relaunch_at_once,
}
