"""Fault drill, part two: one fault of each kind, injected into a run on two ranks.

    python scripts/fault_kinds.py --report docs/dev/fault_drill.md    # about 15 minutes on two cores

Trains a tiny model on two ranks twice: once left alone, once with a fault after the other, among them those
of two machines that this one plays. Each must be noticed, or survived, as docs/reliability.md promises, and
at the end weights and losses must equal the undisturbed run's bit for bit. Ends with status 1 if not.

Faults at a certain place in a process are made by `failpoints/sitecustomize.py`.
"""

import argparse
import os
import resource
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import drill_files as files
import drill_machines as machines
import drill_points as points
import drill_processes as processes
from drill import Drill, Inject, Outcome, Unnoticed, arguments_of, run_drill

from fla_train.training import checkpoint

STEPS = 300
ROOM = 120  # steps before the end that a launch must have ahead
EARLY = 60  # a run that has less goes on from a checkpoint up to here
HANG_TIMEOUT = 8  # seconds
OPTIONS = [
    *("trainer.checkpoint_every=2", "trainer.keep_checkpoints=0", f"trainer.hang_timeout={HANG_TIMEOUT}"),
    *("trainer.eval_every=8", "trainer.eval_tokens=512", "trainer.export_every=24"),
    *("launch.max_restarts=1000", "launch.num_machines=1"),
]
FAILPOINTS = Path(__file__).parent / "failpoints"


class Kinds:
    """Injects the faults of all groups, and keeps count."""

    def __init__(self, drill: Drill, points: Path):
        self.drill, self._points, self._begin = drill, points, time.monotonic()
        self.done: dict[str, list[str]] = {}
        self.lost: list[str] = []

    @contextmanager
    def fault(self, group: str, name: str) -> Iterator[None]:
        """Inside, one fault is injected and its effect awaited."""
        mark = "lost"
        try:
            yield
            self.done.setdefault(group, []).append(name)
            mark = f"step {self.drill.step():3}"
        except Exception as failure:
            self.lost.append(name)
            print(failure if isinstance(failure, Unnoticed) else traceback.format_exc())
            self.drill.reset()
        number = sum(map(len, self.done.values())) + len(self.lost)
        passed = time.monotonic() - self._begin
        print(f"{passed:5.0f} s  {number:3}  {mark:8}  {group}: {name}", flush=True)

    def rewind(self, room: int = ROOM) -> None:
        """Have the next launch go on from an early checkpoint unless it has so many steps ahead."""
        present = self.drill.checkpoints()
        if present and checkpoint.step_of(present[-1].name) > STEPS - room:
            for path in present:
                if checkpoint.step_of(path.name) > EARLY:
                    shutil.rmtree(path)

    def train(self, room: int = ROOM) -> None:
        """Have one launcher train, with so many steps ahead."""
        drill = self.drill
        alone = len(drill.launchers) == 1 and drill.launcher.poll() is None
        if alone and drill.step() > STEPS - room:
            drill.launcher.terminate()
            drill.wait_for_end(75)
            alone = False
        if not alone:
            drill.reset()
            self.rewind(room)
            drill.launch()
        drill.wait_for_progress()

    def stop(self) -> None:
        """Stop all launchers, with enough steps ahead of the next ones."""
        self.drill.reset()
        self.rewind()

    def train_machines(self) -> None:
        """Have two machines train."""
        if len(self.drill.launchers) == 2 and self.drill.step() <= STEPS - ROOM:
            self.drill.wait_for_progress()
        else:
            self.stop()
            machines.start(self.drill)

    def inject(self, group: str, faults: Mapping[str, Inject], begin: Callable[[], None]) -> None:
        """Inject faults one after another, each after `begin`."""
        for name, inject in faults.items():
            with self.fault(group, name):
                begin()
                inject(self.drill)

    def at_points(self, group: str, chosen: Mapping[str, points.Point], end: bool = False) -> None:
        """Failpoints that one start after another reaches."""
        drill = self.drill
        drill.reset()
        if not end:
            self.rewind()
        fired = [points.put(self._points, f"{i:03}", point) for i, point in enumerate(chosen.values())]
        drill.launch()
        before: Counter[str] = Counter()
        for (name, point), file in zip(chosen.items(), fired, strict=True):
            if not drill.launchers:  # the one before was lost
                before.clear()
                drill.launch()
            before.update({"restart  ", point.said} - {""})
            with self.fault(group, name):
                drill.wait(file.exists, f"the failpoint {point}")
                drill.wait(
                    partial(
                        lambda said: all(drill.said(text) >= n for text, n in said.items()), dict(before)
                    ),
                    f"a restart by {point.said}",
                )
                continue
            file.with_suffix(".json").unlink(missing_ok=True)  # lost: out of the way of those after it
        for file in self._points.iterdir():
            file.unlink()

    def at_rest(self, group: str) -> None:
        """Damage the newest checkpoints, each in its own way: one start must name them all, and pass them."""
        drill, damages = self.drill, files.DAMAGES
        while len(drill.checkpoints()) < len(damages) + 2:
            self.train()
        drill.reset()
        shutil.rmtree(drill.checkpoints()[-1])  # which is the newest may change in the launcher's last moment
        intact, *present = drill.checkpoints()[-len(damages) - 1 :]
        for path, damage in zip(present, damages.values(), strict=True):
            damage(path, intact)
        for harm in files.HARMLESS.values():
            harm(intact, intact)
        drill.launch()
        drill.wait(lambda: drill.said(f", from {intact}"), f"a start from {intact}")
        for path, name in zip(present, damages, strict=True):
            with self.fault(group, name):
                if name not in files.NO_FOLDER and not drill.said(f"{path} is damaged"):
                    raise Unnoticed(f"{path} was not named")
        for name in files.HARMLESS:
            with self.fault(group, name):
                pass  # else the start would not have been from it
        newest = checkpoint.step_of(present[-1].name)
        drill.wait(lambda: drill.step() > newest + 4, "the way over all of them")
        if damaged := [path for path in drill.checkpoints()[:-2] if checkpoint.find_error(path)]:
            raise Unnoticed(f"not written again: {damaged}")

    def outlived(self, group: str) -> None:
        """Damage several files of the run; a start goes on in spite of it."""
        drill = self.drill
        drill.reset()
        for spoil in files.OUTLIVED.values():
            spoil(drill.run)
        drill.launch()
        drill.wait_for_progress()
        for name in files.OUTLIVED:
            with self.fault(group, name):
                pass


def run_all(kinds: Kinds, chosen: list[str]) -> None:
    """Groups of faults, and then to the end."""
    single = kinds.train
    short = partial(kinds.train, room=STEPS - EARLY)
    faults: dict[str, tuple[Mapping[str, Inject], Callable[[], None]]] = {
        "while training": (processes.IN_RUN, single),
        "two launchers": (processes.SECOND, short),
        "in a writer process": (points.IN_A_WRITE, single),
        "ends of a run": (processes.ENDING, single),
        "starts of a run": (processes.STARTS, kinds.stop),
        "two machines that train": (machines.IN_RUN, kinds.train_machines),
        "two machines that meet or end": (machines.ENDING, kinds.stop),
        "files of the run": (files.REFUSED, kinds.stop),
    }
    groups: dict[str, Callable[[str], None]] = {
        "on the way into training": lambda group: kinds.at_points(group, points.AT_START),
        **{group: partial(kinds.inject, faults=each, begin=begin) for group, (each, begin) in faults.items()},
        "files of the run, outlived": kinds.outlived,
        "checkpoints at rest": kinds.at_rest,
        "the last steps": lambda group: kinds.at_points(group, points.AT_END, end=True),
    }
    kinds.train()
    for group, inject in groups.items():
        if not chosen or group in chosen:
            inject(group)
    if "the last steps" not in kinds.done:
        kinds.drill.launch()
    kinds.drill.wait_for_end(0)


def disturb(drill: Drill, points_folder: Path, chosen: list[str]) -> Outcome:
    kinds = Kinds(drill, points_folder)
    run_all(kinds, chosen)
    count = sum(map(len, kinds.done.values()))
    rows = [f"| {group} | {len(names)} | {'; '.join(names)} |" for group, names in kinds.done.items()]
    return Outcome(
        f"{count} faults of as many kinds",
        f"noticed or survived as it should be; {len(kinds.lost)} lost.",
        ["| where | faults | which |", *rows],
        len(kinds.lost),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", nargs="*", default=[], help="leave the rest out, to try it")
    arguments = arguments_of(parser, "runs/fault_kinds")
    out = arguments.out
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in ("points", "tmp"):
        (out / name).mkdir()
    os.environ |= {
        "DRILL_POINTS": str(out / "points"),
        "PYTHONPATH": str(FAILPOINTS),
        "TMPDIR": str(out / "tmp"),
    }
    inject = partial(disturb, points_folder=out / "points", chosen=arguments.groups)
    return run_drill(Path(__file__).name, arguments, out / "disturbed", STEPS, OPTIONS, inject)


if __name__ == "__main__":
    sys.exit(main())
