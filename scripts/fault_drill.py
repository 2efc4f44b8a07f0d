"""Fault drill: one error of each kind, injected into a run on two ranks.

    python scripts/fault_drill.py --report docs/dev/fault_drill.md    # about 15 minutes on two cores

Trains a tiny model on two ranks twice: once left alone, once with a fault after the other. Each must be
noticed, or survived, as docs/reliability.md promises, and at the end weights and losses must equal the
undisturbed run's bit for bit. Ends with status 1 if not.

Faults at a certain place in a process are made by `failpoints/sitecustomize.py`.
"""

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import drill_faults as faults
from drill import Drill, Inject, Unnoticed, command, corpus

from fla_train.training import checkpoint
from fla_train.utils.environment import git_commit
from fla_train.utils.records import read_metrics

STEPS = 300
ROOM = 120  # steps before the end that a launch must have ahead
EARLY = 60  # a run that has less continues from a checkpoint up to here
OF_THE_MACHINE = {"tokens_per_second", "data_wait", "memory_gib", "mfu", "checkpoint_stall_s"}
OPTIONS = [
    *("trainer.checkpoint_every=2", "trainer.keep_checkpoints=0", "trainer.hang_timeout=8"),
    *("trainer.eval_every=8", "trainer.eval_tokens=512", "trainer.export_every=24"),
    *("launch.max_restarts=1000", "launch.num_machines=1", f"trainer.max_steps={STEPS}"),
]


def stop(drill: Drill, room: int = ROOM) -> None:
    """Stop all launchers; unless so many steps are ahead, the next continues from an early checkpoint."""
    drill.reset()
    present = drill.checkpoints()
    if present and checkpoint.step_of(present[-1].name) > STEPS - room:
        for path in present:
            if checkpoint.step_of(path.name) > EARLY:
                shutil.rmtree(path)


def train(drill: Drill, room: int = ROOM) -> None:
    """Have one launcher train, with so many steps ahead."""
    alive = drill.launchers and drill.launcher.poll() is None
    if alive and drill.step() > STEPS - room:
        drill.launcher.terminate()
        drill.wait_for_end(75)
        alive = False
    if not alive:
        stop(drill, room)
        drill.launch()
    drill.wait_for_progress()


GROUPS: dict[str, tuple[Mapping[str, Inject], Callable[[Drill], None]]] = {
    "on the way into training": (faults.AT_START, train),
    "while training": (faults.IN_RUN, train),
    "two launchers": (faults.SECOND, partial(train, room=STEPS - EARLY)),
    "in a writer process": (faults.IN_A_WRITE, train),
    "ends of a run": (faults.ENDING, train),
    "starts of a run": (faults.STARTS, stop),
    "files of the run": (faults.REFUSED, stop),
    "files of the run, outlived": (faults.OUTLIVED, train),
    "checkpoints at rest": (faults.AT_REST, train),
    "the last steps": (faults.AT_END, train),
}


def inject_all(drill: Drill, groups: list[str]) -> tuple[dict[str, list[str]], int]:
    """Faults one after another, and then to the end: the noticed ones by group, and how many were not."""
    begin, done, lost = time.monotonic(), {}, 0
    train(drill)
    for group in groups:
        kinds, prepare = GROUPS[group]
        for name, inject in kinds.items():
            try:
                prepare(drill)
                inject(drill)
                done.setdefault(group, []).append(name)
                mark = f"step {drill.step():3}"
            except Exception as failure:
                lost, mark = lost + 1, "lost"
                print(failure if isinstance(failure, Unnoticed) else traceback.format_exc())
                drill.reset()
            passed = time.monotonic() - begin
            print(f"{passed:5.0f} s  {mark:8}  {group}: {name}", flush=True)
    if not drill.launchers or drill.launcher.poll() not in (None, 0):
        drill.launch()
    drill.wait_for_end(0)
    return done, lost


def weights(run: Path) -> bytes:
    return (run / "hf" / f"step-{STEPS:07d}" / "model.safetensors").read_bytes()


def records(run: Path) -> list[dict]:
    """What the run did, but for speeds and for checkpoints, of which a preempted run has more."""
    found = read_metrics(run / "metrics.jsonl")
    kept = [{key: value for key, value in record.items() if key not in OF_THE_MACHINE} for record in found]
    return [record for record in kept if record.keys() - {"step", "tokens"}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/fault_drill"), help="made new")
    parser.add_argument("--report", type=Path, help="Markdown file to write")
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=GROUPS, metavar="GROUP")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    corpus(out / "corpus")
    for name in ("points", "tmp"):
        (out / name).mkdir()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "DRILL_POINTS": str(out / "points"),
        "PYTHONPATH": str(Path(__file__).parent / "failpoints"),
        "TMPDIR": str(out / "tmp"),
    }
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup what is started here would ignore it, too
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    calm, run, begin = out / "undisturbed", out / "disturbed", time.monotonic()
    subprocess.run(command(out, calm, *OPTIONS), check=True, stdout=subprocess.DEVNULL)
    print(f"undisturbed run: {STEPS} steps in {time.monotonic() - begin:.0f} s", flush=True)
    drill, begin = Drill(run, command(out, run, *OPTIONS), out), time.monotonic()
    try:
        done, lost = inject_all(drill, arguments.groups)
    finally:
        drill.stop()
    if leftovers := [path for path in run.rglob("*") if path.name.startswith(".") and path.name != ".lock"]:
        raise Unnoticed(f"half-written or half-deleted files are left: {leftovers}")
    equal = {"weights": weights(run) == weights(calm), "metrics.jsonl": records(run) == records(calm)}
    verdict = ", ".join(f"{what} {'equal' if same else 'DIFFERENT'}" for what, same in equal.items())
    minutes, count = (time.monotonic() - begin) / 60, sum(map(len, done.values()))
    lines = [
        f"{count} faults of as many kinds in {minutes:.0f} minutes and {STEPS} steps on two CPU ranks, each "
        f"noticed or survived as it should be; {lost} lost. Compared with the undisturbed run, bit for bit: "
        f"{verdict}. {time.strftime('%Y-%m-%d')}, commit {(git_commit() or 'unknown')[:7]}.",
        "",
        "| where | faults | which |",
        "|---|---|---|",
        *(f"| {group} | {len(names)} | {'; '.join(names)} |" for group, names in done.items()),
    ]
    print("", *lines, sep="\n")
    if arguments.report:
        head = ["# Fault drill", "", "The newest report of `scripts/fault_drill.py`.", ""]
        arguments.report.write_text("\n".join([*head, *lines, ""]))
    return 0 if all(equal.values()) and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
