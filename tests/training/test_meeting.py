"""Launchers of several machines, played by threads: who meets, what they agree on, how an attempt ends."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from test_checkpoint import DAMAGE, make
from test_machines import free_port

from fla_train.training import machines as machines_module
from fla_train.training import resuming
from fla_train.training.board import Board
from fla_train.training.machines import AttemptEnded, Failure, Machines
from fla_train.training.preemption import Preempted
from fla_train.training.schema import LaunchConfig

LIMIT = 30.0  # seconds for what takes one
Play = Callable[..., list[Future]]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> LaunchConfig:
    for name, seconds in {"POLL": 0.02, "WATCH": 0.05, "LINGER": 0.5}.items():
        monkeypatch.setattr(machines_module, name, seconds)
    return LaunchConfig("cpu", 2, 2, 0, "127.0.0.1", free_port(), rendezvous_timeout=LIMIT)


def on_each(config: LaunchConfig, play: Callable[[Machines, int], object], count: int = 2) -> list[Future]:
    """`play(machines, number)` on each of `count` machines, inside `with`, all at once; how each ended."""

    def one(number: int) -> object:
        with Machines(replace(config, machine_rank=number, num_machines=count)) as machines:
            return play(machines, number)

    with ThreadPoolExecutor(count) as pool:
        return list(map(pool.submit, [one] * count, range(count)))


def results(futures: list[Future]) -> list:
    return [future.result(timeout=LIMIT) for future in futures]


def test_all_meet_in_one_attempt_and_hear_each_other(config: LaunchConfig):
    ended = threading.Barrier(3)

    def play(machines: Machines, number: int) -> list:
        machines.meet({"from": number})
        first = machines.attempt
        said = machines.gather("number", number)
        ended.wait(LIMIT)
        machines.meet({"from": number})
        again = machines.gather("number", None)
        return [machines.greeting, first, machines.attempt, said, again, machines.failure()]

    played = results(on_each(config, play, count=3))
    assert played[0] == played[1] == played[2]
    greeting, first, second, *said = played[0]
    assert greeting == {"from": 0} and first != second
    assert said == [[0, 1, 2], [None] * 3, None]


def test_a_machine_alone_meets_nobody_and_serves_no_port(config: LaunchConfig):
    with Machines(replace(config, num_machines=1)) as machines:
        machines.meet({})
        assert machines.gather("x", 1) == [1] and machines.failure() is None
        with Machines(replace(config, num_machines=1)):  # at the same port
            pass


def test_who_does_not_come_is_named(config: LaunchConfig):
    short = replace(config, rendezvous_timeout=0.5)
    for number, line in ((0, "machine 1: did not come to "), (1, "machine 0: did not answer at ")):
        with pytest.raises(AttemptEnded, match=rf"^{line}127\.0\.0\.1:\d+ within 0\.5 s \(launch\.rendez"):
            with Machines(replace(short, machine_rank=number)) as machines:
                machines.meet({})


def test_a_machine_started_again_ends_the_attempt_and_joins_the_next(config: LaunchConfig):
    """It must not take the place in the old attempt that its forerunner left."""
    begun = threading.Event()

    def play(machines: Machines, number: int) -> list[str]:
        machines.meet({})
        old = machines.attempt
        if number == 1:
            begun.set()  # not before: two machines 1 that meet at once would each take the other's place
            raise Preempted(agreed=True)  # as good as killed: it says nothing
        with pytest.raises(AttemptEnded, match="machine 1: was started again"):
            machines.gather("never", None)
        machines.meet({})
        assert machines.gather("number", 0) == [0, 1]
        return [old, machines.attempt]

    def come_again() -> str:
        begun.wait(LIMIT)
        with Machines(replace(config, machine_rank=1)) as machines:
            machines.meet({})
            assert machines.gather("number", 1) == [0, 1]
            return machines.attempt

    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(come_again)
        zero, one = on_each(config, play)
    with pytest.raises(Preempted):
        one.result()
    old, new = zero.result()
    assert again.result() == new != old


def test_a_machine_started_again_while_it_waits_is_met_at_once(config: LaunchConfig):
    """What its forerunner put up does not count."""

    def here(machines: Machines) -> str | None:
        notices = machines._look("", {})
        return notices and notices.content.get("here 1", {}).get("token")

    def play(machines: Machines, number: int) -> list[int]:
        deadline = time.monotonic() + 5.0
        if number == 1:
            while not ((notices := machines._look("", {})) and notices.attempt):
                time.sleep(0.02)
            machines._look(notices.attempt, {"here 1": {"token": "killed", "sizes": {}, "greeting": {}}})
        elif number == 2:
            while here(machines) in (None, "killed") and time.monotonic() < deadline:
                time.sleep(0.02)
        machines.meet({})
        return machines.gather("number", number)

    assert results(on_each(config, play, count=3)) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_machine_that_is_asked_to_leave_says_so(config: LaunchConfig, leaving: int):
    """Another may yet start again, or has been asked too."""
    met = threading.Barrier(2)

    def play(machines: Machines, number: int) -> None:
        machines.meet({})
        met.wait(LIMIT)
        if number == leaving:
            raise Preempted
        machines.gather("never", None)

    with pytest.raises(AttemptEnded, match=rf"^machine {leaving}: was asked to leave$") as ended:
        on_each(config, play)[1 - leaving].result()
    assert not ended.value.failure.final


def test_another_run_at_the_same_port_is_not_met(config: LaunchConfig):
    """Nor can it end this one."""
    short = replace(config, rendezvous_timeout=0.5, machine_rank=1)
    with Machines(replace(config, rendezvous_timeout=0.5), "runs/a") as machines:
        with pytest.raises(
            AttemptEnded, match=r"machine 0: did not answer at .* for run\.dir=/.*/runs/b within 0\.5"
        ):
            with Machines(short, "runs/b") as other:
                other.meet({})
        with pytest.raises(AttemptEnded, match="machine 1: did not come"):
            machines.meet({})
        with pytest.raises(AttemptEnded, match="machine 1: did not come"):
            machines.meet({})
    with Machines(config, "runs/a") as machines, ThreadPoolExecutor(1) as pool:
        pool.submit(machines.meet, {})
        with Machines(replace(config, machine_rank=1), f"{Path.cwd()}/runs/a") as other:
            other.meet({})


def test_a_failure_ends_the_attempt_everywhere_under_one_name(config: LaunchConfig):
    met = threading.Barrier(2)

    def play(machines: Machines, number: int) -> str:
        machines.meet({})
        met.wait(LIMIT)
        if number == 1:
            return str(machines.fail(Failure("rank 1", "was killed by SIGKILL")))
        while (failure := machines.failure()) is None:
            pass
        assert not failure.final
        return str(machines.fail(Failure("rank 0", "lost its peer")))

    assert results(on_each(config, play)) == ["rank 1: was killed by SIGKILL"] * 2


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_machine_that_leaves_for_good_does_not_keep_the_others_waiting(config: LaunchConfig, leaving: int):
    """Not even those that have already begun the next attempt."""

    met = threading.Barrier(2)

    def play(machines: Machines, number: int) -> None:
        machines.meet({})
        met.wait(LIMIT)
        machines.fail(Failure("rank 0", "failed"))
        if number == leaving:
            raise ValueError("its disk is full")
        machines.meet({})

    futures = on_each(config, play)
    with pytest.raises(AttemptEnded, match=f"^machine {leaving}: its disk is full$"):
        futures[1 - leaving].result()


def test_the_last_notice_reaches_a_machine_though_machine_0_has_gone(
    config: LaunchConfig, monkeypatch: pytest.MonkeyPatch
):
    """Its watch has heard of it, while `gather` slept."""
    monkeypatch.setattr(machines_module, "POLL", 0.5)
    monkeypatch.setattr(machines_module, "WATCH", 0.02)
    quick = replace(config, rendezvous_timeout=2.0)

    def play(machines: Machines, number: int) -> list:
        machines.meet({})
        if number == 0:
            time.sleep(0.7)  # until the other has put up its notice and sleeps
        return machines.gather("done", number)

    assert results(on_each(quick, play)) == [[0, 1]] * 2


def test_a_machine_that_is_to_meet_again_hears_that_machine_0_has_left(
    config: LaunchConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machines_module, "WATCH", 0.02)
    met = threading.Barrier(2)

    def play(machines: Machines, number: int) -> None:
        machines.meet({})
        met.wait(LIMIT)
        if number == 0:
            raise ValueError("its disk is full")
        while machines._look("", {}) is not None:
            time.sleep(0.02)
        machines.meet({})

    _, one = on_each(replace(config, rendezvous_timeout=2.0), play)
    with pytest.raises(AttemptEnded, match=r"^machine 0: its disk is full$"):
        one.result()


def test_a_board_keeps_what_outlives_an_attempt_and_nothing_of_another():
    board = Board()
    first = board.begin()
    board.exchange(1, first, {"failed 1": 1, "left 1": 2, "here 1": 3})
    later = board.exchange(1, first, {"failed 1": 4, "here 1": 5}).content
    assert (later["failed 1"], later["here 1"]) == (1, 5)  # it has been started again
    board.exchange(0, first, {"roll": []})
    assert board.exchange(1, first, {"here 1": 6}).content["here 1"] == 5
    second = board.begin()
    assert board.exchange(1, first, {"here 1": 5}).content == {"left 1": 2}
    assert board.exchange(1, second, {"here 1": 6}).content == {"left 1": 2, "here 1": 6}


def test_machines_told_of_other_numbers_are_refused(config: LaunchConfig):
    def play(machines: Machines, number: int) -> None:
        machines._processes += 2 * number
        machines.meet({})
        machines.gather("next", None)  # machine 0 may have met before the other looks

    zero, one = on_each(config, play)
    with pytest.raises(ValueError, match=r"different things: launch\.num_processes=4 \(machine 0: 2\)"):
        one.result()
    with pytest.raises(AttemptEnded, match="machine 1: the machines were told different things"):
        zero.result()


def test_a_machine_that_falls_silent_is_named(config: LaunchConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machines_module, "WATCH", 1e3)
    quick = replace(config, rendezvous_timeout=1.0)
    done = threading.Event()

    def play(machines: Machines, number: int) -> None:
        machines.meet({})
        if number == 1:
            done.wait(LIMIT)
            raise Preempted
        with contextlib.ExitStack() as stack:
            stack.callback(done.set)
            machines.gather("never", None)

    zero, _ = on_each(quick, play)
    with pytest.raises(AttemptEnded, match="machine 1: was not heard of for 1 s"):
        zero.result()


def test_a_port_that_is_taken_is_a_fault_of_the_config(config: LaunchConfig):
    with Machines(config), pytest.raises(ValueError, match=r"launch\.main_process_port=\d+ is taken"):
        with Machines(config):
            pass


def agreed(config: LaunchConfig, folders: list[Path], said: list[str]) -> list[Future]:
    """What machines agree on that each see a folder of checkpoints of their own."""

    def play(machines: Machines, number: int) -> str | None:
        machines.meet({})
        own = resuming.checkpoint.choose("auto", folders[number])
        chosen = resuming.agree_on_checkpoint(machines, folders[number], own, said.append)
        return chosen and chosen.name

    return on_each(config, play)


def test_machines_go_on_from_the_newest_checkpoint_that_all_can_read(config: LaunchConfig, tmp_path: Path):
    """One has yet to see the newest, and the other finds the one before it corrupt."""
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder, steps in zip(folders, ((3, 6, 9, 12), (3, 6, 9)), strict=True):
        for step in steps:
            make(folder, step)
    DAMAGE["cut short"](folders[0] / "step-0000009")
    said: list[str] = []
    assert results(agreed(config, folders, said)) == ["step-0000006"] * 2
    assert "resume       not all machines can read step-0000012: looking up to step-0000009" in said


def test_machines_that_see_the_same_say_nothing(config: LaunchConfig, tmp_path: Path):
    said: list[str] = []
    assert results(agreed(config, [tmp_path] * 2, said)) == [None, None]
    make(tmp_path, 3)
    assert results(agreed(config, [tmp_path] * 2, said)) == ["step-0000003"] * 2
    assert said == []


def test_a_folder_that_shows_late_is_waited_for(config: LaunchConfig, tmp_path: Path, monkeypatch):
    """Else the run would begin anew over its own checkpoints."""
    folders = [tmp_path / "0", tmp_path / "1"]
    make(folders[0], 3)
    threading.Timer(0.8, lambda: make(tmp_path / "1", 3)).start()
    assert results(agreed(config, folders, [])) == ["step-0000003"] * 2
    (folders[1] / "step-0000003").rename(tmp_path / "lost")
    monkeypatch.setattr(resuming, "VISIBLE", 0)
    for future in agreed(config, folders, []):
        with pytest.raises(ValueError, match=r"machine 1 sees no checkpoint in .* is run\.dir one"):
            future.result()
