"""The faults of `fault_drill.py`, by name: what is done to the run, and what must come of it."""

import contextlib
import fcntl
import json
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

from fla_train.utils.filesystem import delete

Spoil = Callable[[Path], object]  # damages a file, or a folder


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


def lost_a_checkpoint(act: Inject, said: str, undo: Inject = lambda drill: None) -> Inject:
    """No checkpoint, which is said, and a later one once the cause is gone."""

    def inject(drill: Drill) -> None:
        before = drill.said(said)
        act(drill)
        drill.wait(lambda: drill.said(said) > before, said)
        undo(drill)
        drill.wait_for_checkpoint()

    return inject


def unharmed(act: Inject) -> Inject:
    """Training continues in the same processes."""

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


def refused(name: str | Callable[[Path], Path], spoil: Spoil, codes: tuple[int, ...], said: str) -> Inject:
    """A file that a start reads is damaged: the start ends with a line that says so, until it is back."""

    def inject(drill: Drill) -> None:
        path = drill.run / name if isinstance(name, str) else name(drill.run)
        kept = drill.run.with_name("kept")
        path.rename(kept)
        try:
            if kept.is_file():
                shutil.copyfile(kept, path)
            spoil(path)
            code = drill.launch("launch.max_restarts=0").wait(120)
            if code not in codes or said not in drill.text() or "Traceback" in drill.text():
                raise Unnoticed(f"a start ended with {code}:\n{drill.text()[-2000:]}")
        finally:
            delete(path)
            kept.rename(path)

    return inject


def outlived(name: str, spoil: Spoil) -> Inject:
    """A file of the run is damaged, and a start continues in spite of it."""

    def inject(drill: Drill) -> None:
        drill.reset()
        spoil(drill.run / name)
        drill.launch()
        drill.wait_for_progress()

    return inject


def passed_over(name: str, spoil: Spoil) -> Inject:
    """The newest checkpoint is damaged: a start names it, and continues from the one before."""

    def inject(drill: Drill) -> None:
        drill.reset()
        newest = drill.checkpoints()[-1]
        spoil(newest / name)
        drill.launch()
        drill.wait(lambda: drill.said(f"{newest} is damaged"), f"word of {newest}")
        drill.wait_for_progress()

    return inject


def fail(role: str, at: str, do: str) -> Inject:
    """`worker-N` or `writer-N` fails when it next calls a function; see `failpoints/sitecustomize.py`."""

    def inject(drill: Drill) -> None:
        fired = put(role, at, do)
        pick = writer if role.startswith("writer") else rank
        pick(int(role[-1]))(drill).send_signal(signal.SIGUSR2)
        drill.wait(fired.exists, f"the failpoint {at}")

    return inject


def fail_at_start(role: str, at: str, do: str, said: str = "") -> Inject:
    """A rank that is started again fails on its way into the run, and is started once more."""

    def inject(drill: Drill) -> None:
        fired = put(role, at, do)
        restarted(kill_all_ranks)(drill)
        restarted(lambda drill: drill.wait(fired.exists, f"the failpoint {at}"), said)(drill)

    return inject


def killed_at_start(number: int, at: str, by: str = "SIGKILL") -> Inject:
    return fail_at_start(f"worker-{number}", at, by, f"rank {number}: was killed by {by}")


def killed_at_end(number: int, at: str) -> Inject:
    """A rank is killed in the last steps; started again it ends the run."""
    return ended(restarted(fail(f"worker-{number}", at, "SIGKILL"), f"rank {number}: was killed"), 0)


def put(role: str, at: str, do: str) -> Path:
    """The only failpoint from now on; returns what shows that it was reached."""
    points = Path(os.environ["DRILL_POINTS"])
    for file in points.iterdir():
        file.unlink()
    file = points / "point.json"
    file.write_text(json.dumps({"role": role, "at": at, "do": do}))
    return file.with_suffix(".fired")


def send(number: signal.Signals, pick: Callable[[Drill], object]) -> Inject:
    return lambda drill: pick(drill).send_signal(number)


def rank(number: int) -> Callable[[Drill], psutil.Process]:
    return lambda drill: drill.workers()[number]


def writer(number: int) -> Callable[[Drill], psutil.Process]:
    def pick(drill: Drill) -> psutil.Process:
        owner = rank(number)(drill)
        drill.wait(owner.children, "a writer")
        return owner.children()[0]

    return pick


def agent(drill: Drill) -> subprocess.Popen:
    return drill.launcher


def suspend(*picks: Callable[[Drill], object]) -> Inject:
    """SIGSTOP, and SIGCONT 3 s later."""

    def inject(drill: Drill) -> None:
        processes = [psutil.Process(pick(drill).pid) for pick in picks]
        for process in processes:
            process.suspend()
        time.sleep(3)
        for process in processes:
            process.resume()

    return inject


def kill_all_ranks(drill: Drill) -> None:
    for process in drill.workers():
        process.kill()


def kill_in_a_write(drill: Drill) -> None:
    drill.wait(lambda: any((drill.run / "checkpoints").glob(".writing-*")), "a write")
    rank(1)(drill).kill()


def limit(pick: Callable[[Drill], psutil.Process], what: int, value: int) -> Inject:
    def inject(drill: Drill) -> None:
        pick(drill).rlimit(what, (value, resource.RLIM_INFINITY if what != psutil.RLIMIT_NOFILE else 4096))

    return inject


def move(name: str, to: str) -> Inject:
    return lambda drill: (drill.run / name).rename(drill.run / to)


def flip(path: Path) -> None:
    """Invert the lowest bit of the byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def append(content: bytes) -> Spoil:
    def spoil(path: Path) -> None:
        with path.open("ab") as file:
            file.write(content)

    return spoil


def instead(make: Spoil) -> Spoil:
    """Something else in place of a file or folder."""
    return lambda path: (delete(path), make(path))


def first_shard(run: Path) -> Path:
    folder = Path(json.loads((run / "plan.json").read_text())["data_folder"])
    return next((folder / "train").glob("tokens-*.bin"))


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


def block_exports(drill: Drill) -> None:
    exports, kept, before = drill.run / "hf", drill.run / "kept", drill.said("NO EXPORT")
    exports.mkdir(exist_ok=True)
    exports.rename(kept)
    exports.touch()
    drill.wait(lambda: drill.said("NO EXPORT") > before, "word of it")
    exports.unlink()
    kept.rename(exports)


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
    """Its ranks die with it, and the same command under our launcher continues."""
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


WORKER_AT = "trainer.py:Trainer._read"
WRITER_KILLED = "writer process was killed by SIGKILL"

# Ranks fail on their way into training.
AT_START: dict[str, Inject] = {
    "kill -9 of rank 1 while it imports": killed_at_start(1, "training/trainer.py:<module>"),
    "kill -9 of rank 0 before it joins": killed_at_start(0, "process_group.py:join"),
    "rank 0 aborts while it verifies a checkpoint": killed_at_start(0, "checkpoint.py:find_error", "SIGABRT"),
    "kill -9 of rank 0 while it writes config.yaml": killed_at_start(0, "filesystem.py:write_whole!replace"),
    "bus error of rank 1 while it loads": killed_at_start(1, "load_checkpoint.py:load_checkpoint", "SIGBUS"),
    "segmentation fault of rank 1 in its first step": killed_at_start(1, "engine.py:train_step", "SIGSEGV"),
    "kill -9 of rank 1 while it evaluates": killed_at_start(1, "trainer.py:Trainer._evaluate"),
    "kill -9 of rank 0 in the middle of an export": killed_at_start(0, "export.py:_load_back"),
    "kill -9 of rank 1 while it stages a checkpoint": killed_at_start(
        1, "staging_buffer.py:StagingBuffer.stage"
    ),
    "rank 1 ends with 0 in the middle": fail_at_start("worker-1", "engine.py:train_step", "exit 0"),
    "rank 0 ends with 75 unasked": fail_at_start("worker-0", "engine.py:train_step", "exit 75"),
    "a read error (EIO) of the data": fail_at_start(
        "worker-0", "run_data.py:to_batch", "raise EIO", "rank 0: OSError: [Errno 5] Input/output error"
    ),
    "all files and connections of rank 0 break": fail_at_start("worker-0", "engine.py:train_step", "close"),
}
# What a launched run outlives.
IN_RUN: dict[str, Inject] = {
    "kill -9 of a rank": restarted(send(signal.SIGKILL, rank(0)), "rank 0: was killed by SIGKILL"),
    "kill -9 of a rank while a checkpoint is written": restarted(kill_in_a_write, "was killed by SIGKILL"),
    "SIGSTOP of a rank": restarted(send(signal.SIGSTOP, rank(1)), "no progress for"),
    "kill -9 of all ranks at once": restarted(kill_all_ranks, "was killed by SIGKILL"),
    "SIGQUIT to a rank": restarted(send(signal.SIGQUIT, rank(1)), "rank 1: was killed by SIGQUIT"),
    "a limit on CPU time ends a rank": restarted(
        limit(rank(0), psutil.RLIMIT_CPU, 1), "rank 0: was killed by SIGXCPU"
    ),
    "a rank falls asleep in Python": restarted(fail("worker-1", WORKER_AT, "sleep"), "no progress for"),
    "the launcher is stopped for 3 s": unharmed(suspend(agent)),
    "all processes are stopped for 3 s": unharmed(suspend(agent, rank(0), rank(1), writer(0), writer(1))),
    "rank 1's writer is stopped for 3 s": unharmed(suspend(writer(1))),
    "kill -9 of an idle writer": lambda drill: (writer(1)(drill).kill(), drill.wait_for_checkpoint()),
    "rank 0's writer is stopped for good": restarted(send(signal.SIGSTOP, writer(0)), "no progress for"),
    "rank 0's writer runs out of file descriptors": lost_a_checkpoint(
        limit(writer(0), psutil.RLIMIT_NOFILE, 4),
        "rank 0: Too many open files",
        limit(writer(0), psutil.RLIMIT_NOFILE, 1024),
    ),
    "rank 1's writer may write no file as large as a shard": lost_a_checkpoint(
        limit(writer(1), psutil.RLIMIT_FSIZE, 4096),
        "NO CHECKPOINT, rank 1",
        limit(writer(1), psutil.RLIMIT_FSIZE, resource.RLIM_INFINITY),
    ),
    "the folder of checkpoints is renamed": lost_a_checkpoint(
        move("checkpoints", "moved"), "NO CHECKPOINT", move("moved", "checkpoints")
    ),
    "the folder of exports is replaced by a file": block_exports,
    "train.log and the other rank's log renamed": unharmed(
        lambda drill: (move("train.log", "old.log")(drill), move("logs", "old-logs")(drill))
    ),
}
# Another launcher comes, which takes seconds.
SECOND: dict[str, Inject] = {
    "a second fla-train": unharmed(second_launcher()),
    "`.lock` deleted, then a second fla-train": unharmed(
        second_launcher(lambda drill: (drill.run / ".lock").unlink())
    ),
}
# Writer processes fail beside training.
IN_A_WRITE: dict[str, Inject] = {
    f"{name} in the writer of rank {number}": lost_a_checkpoint(fail(f"writer-{number}", at, do), said)
    for name, number, at, do, said in (
        ("kill -9 before the manifest", 0, "checkpoint.py:write_manifest", "SIGKILL", WRITER_KILLED),
        ("kill -9 before the rename", 0, "filesystem.py:move_folder!rename", "SIGKILL", WRITER_KILLED),
        ("kill -9 after the rename", 0, "checkpoint.py:prune", "SIGKILL", WRITER_KILLED),
        ("segmentation fault", 0, "async_writer.py:_collect_parts", "SIGSEGV", "was killed by SIGSEGV"),
        ("kill -9 before its part", 1, "async_writer.py:_leave_part", "SIGKILL", "rank 1: the writer"),
        ("no space left (ENOSPC)", 0, "async_writer.py:_write_file", "raise ENOSPC", "rank 0: No space"),
        ("a flush that fails (EIO)", 0, "async_writer.py:_write_file!fsync", "raise EIO", "rank 0: Input"),
        ("no quota left (EDQUOT)", 1, "async_writer.py:_write_file", "raise EDQUOT", "rank 1: Disk quota"),
        ("a read-only disk (EROFS)", 0, "pathlib.py:Path.mkdir", "raise EROFS", "rank 0: Read-only"),
        ("a stale handle (ESTALE)", 1, "filesystem.py:sync", "raise ESTALE", "rank 1: Stale file handle"),
        ("a bug", 0, "checkpoint.py:write_manifest", "raise KeyError", "NO CHECKPOINT, rank 0: 'drill'"),
    )
}
# What ends a launched run; the same command continues it.
ENDING: dict[str, Inject] = {
    "SIGTERM": ended(send(signal.SIGTERM, agent), 75, "stopped on request"),
    "SIGUSR1": ended(send(signal.SIGUSR1, agent), 75, "stopped on request"),
    "SIGHUP": ended(send(signal.SIGHUP, agent), 75, "stopped on request"),
    "kill -9 of the launcher": ended(send(signal.SIGKILL, agent), -signal.SIGKILL),
    "one Ctrl-C": ended(send(signal.SIGINT, agent), 75, "stopped on request"),
    "two Ctrl-C": ended(ctrl_c_twice, 130, "interrupted"),
    "150 requests to stop within a second": ended(storm, 75, "stopped on request"),
    "SIGTERM to one rank only": ended(send(signal.SIGTERM, rank(1)), 75, "stopped on request"),
    "kill -9 of a launcher that is stopped": kill_stopped_agent,
    "no memory left (MemoryError)": ended(
        fail("worker-0", WORKER_AT, "raise MemoryError"), 2, "out of host memory: set trainer."
    ),
    "an error that would come again": ended(
        fail("worker-0", WORKER_AT, "raise ValueError"), 2, "rank 0: drill"
    ),
    "the launcher's temporary files deleted, then a rank killed": ended(
        delete_scratch, 2, "config.yaml is no config"
    ),
    "the run's folder renamed": rename_run,
    "the run's folder replaced": exchange_run,
}
# Starts that begin in a certain way, and end.
STARTS: dict[str, Inject] = {
    "output to a full disk (/dev/full)": full_output,
    "output to a pipe whose reader is gone": no_reader,
    "the terminal closes": close_terminal,
    "kill -9 of torchrun": kill_torchrun,
    "SIGTERM while the ranks import": stop_imports,
    "kill -9 of the launcher, which is started again at once": relaunch_at_once,
}
# What a start refuses, until it is repaired.
REFUSED: dict[str, Inject] = {
    "config.yaml is no text": refused(
        "config.yaml", lambda path: path.write_bytes(b"\xff{["), (2,), "config.yaml is no config"
    ),
    "`.lock` is a link": refused(
        ".lock", instead(lambda path: path.symlink_to("nothing")), (2,), ".lock is a symbolic link: delete it"
    ),
    "`.lock` is a folder": refused(".lock", instead(Path.mkdir), (2,), "can't be written (Is a directory)"),
    "metrics.jsonl is a folder": refused("metrics.jsonl", instead(Path.mkdir), (1,), "metrics.jsonl"),
    "train.log is a folder": refused("train.log", instead(Path.mkdir), (1,), "train.log"),
    "checkpoints is a file": refused("checkpoints", Path.touch, (2,), "can't be written"),
    "a token shard is cut short": refused(first_shard, cut, (2,), "tokens-"),
}
# What a start continues in spite of.
OUTLIVED: dict[str, Inject] = {
    "config.yaml is a link to nothing": outlived(
        "config.yaml", instead(lambda path: path.symlink_to("nothing"))
    ),
    "environment.json is no JSON": outlived("environment.json", lambda path: path.write_bytes(b"\xff")),
    "plan.json is empty": outlived("plan.json", instead(Path.touch)),
    "metrics.jsonl ends in the middle of a line, and with zeros": outlived(
        "metrics.jsonl", append(b'{"step": 999, "lo' + bytes(4096))
    ),
    "train.log ends with bytes that are no text": outlived("train.log", append(bytes(range(256)))),
    "logs of the other ranks deleted": outlived("logs", delete),
    "starts is a file": outlived("starts", instead(Path.touch)),
    "an export of a later step": outlived("hf/step-9999999", lambda path: path.mkdir(parents=True)),
    "remains of a checkpoint that was being written": outlived(
        "checkpoints/.writing-step-0009999", lambda path: path.mkdir()
    ),
    "remains of a checkpoint that was being deleted": outlived(
        "checkpoints/.deleting-step-0000001", lambda path: path.mkdir()
    ),
}
WEIGHTS = "deepspeed/mp_rank_00_model_states.pt"
MOMENTS = "deepspeed/zero_pp_rank_1_mp_rank_00_optim_states.pt"
# Damage to the newest checkpoint.
AT_REST: dict[str, Inject] = {
    "one bit of the weights": passed_over(WEIGHTS, flip),
    "weights cut short": passed_over(WEIGHTS, cut),
    "an optimizer's shard deleted": passed_over(MOMENTS, delete),
    "one bit of the manifest": passed_over("manifest.json", flip),
    "manifest deleted": passed_over("manifest.json", delete),
    "a link to nothing in place of the weights": passed_over(
        WEIGHTS, instead(lambda path: path.symlink_to("gone"))
    ),
}
# Ranks are killed in the last steps.
AT_END: dict[str, Inject] = {
    "kill -9 of rank 1 in the last step": killed_at_end(1, "trainer.py:Trainer._finish"),
    "kill -9 of rank 0 before it plots": killed_at_end(0, "metrics.py:plot_losses"),
    "kill -9 of rank 1 while it leaves the group": killed_at_end(
        1, "distributed_c10d.py:destroy_process_group"
    ),
}
