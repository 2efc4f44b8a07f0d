"""`fla-runs queue`: which runs start, where, in which order, what is left of them, and that they continue.

Most tests have a trainer of a few lines in the place of `fla-train`, one has the real one.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from fla_train.cli import run_queue as run_queue_module
from fla_train.cli import runs
from fla_train.cli.run_queue import run_queue
from fla_train.run import Run
from fla_train.training.run_folder import RunFolder, RunLock
from fla_train.utils.records import read_metrics

TRAINER = """
import json, os, pathlib, signal, sys, time
given = dict(text.split("=", 1) for text in sys.argv[1:])
run = pathlib.Path(given["run.dir"])
with (run / "calls").open("a") as calls:
    calls.write(os.environ.get("CUDA_VISIBLE_DEVICES", "none") + "\\n")
with (run / "mps").open("a") as mps:
    mps.write(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "none") + "\\n")
(run / "tuning").write_text(os.environ.get("TRITON_CACHE_AUTOTUNING", "not kept"))
attempts = len((run / "calls").read_text().splitlines())
if given.get("model") == "fla/gla/tiny":
    print("error: this model needs a package")
    sys.exit(2)
if given.get("model") == "hf/mamba2/tiny" and attempts == 1:
    print("error: rank 0: out of GPU memory (tried to allocate 3.00 GiB): set trainer.micro_batch_size=64")
    sys.exit(2)
if given.get("model") == "fla/retnet/tiny" and attempts == 1 or given.get("model") == "fla/rwkv7/tiny":
    sys.exit("RuntimeError: out of memory")
if given.get("model") == "hf/xlstm/tiny":
    while not (run / "go").exists():
        time.sleep(0.01)
    sys.exit("error: another process writes here")
def save(step):
    for place in ("checkpoints", "hf"):
        (run / place / f"step-{step:07d}").mkdir(parents=True)
        (run / place / f"step-{step:07d}" / "weights").write_text(str(step))
def stop(*_):
    save(6)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
def test(step):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "longer/scaled_accuracy": 0.5}) + "\\n")
environment = {"hardware": "an abacus", "commit": None, "packages": {}, "time": "2031-02-03T04:05:06+00:00"}
(run / "environment.json").write_text(json.dumps(environment))
(run / "config.yaml").write_text("task: {batch_size: 256}")
test(4)
if given.get("model.num_householder") == "4":
    time.sleep(0.7)
if given.get("model.num_householder") == "3" and attempts == 1:
    time.sleep(60)
test(800)
save(800)
"""


@pytest.fixture
def queue(tmp_path: Path) -> Callable[..., int]:
    """`queue(option, ...)` with the trainer above, in tmp_path/runs; the exit status."""

    def start(name: str, overrides: list[str], log: Path, **variables: str) -> subprocess.Popen:
        assert name == "train"
        with log.open("w") as file:
            # -I -S: no site-packages, which would take longer than the rest
            command = [sys.executable, "-I", "-S", "-c", TRAINER, *overrides]
            return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | variables)

    return lambda *options: run_queue(["--folder", str(tmp_path / "runs"), *options], start)


def only(*rows: str) -> list[str]:
    return ["--seeds", "0", *[word for row in rows for word in ("--only", f"formal/{row}/parity/*")]]


def run_of(tmp_path: Path, row: str) -> Path:
    return tmp_path / "runs" / "formal" / row / "parity" / "seed-0"


def test_runs_are_spread_over_gpus_stop_in_time_and_continue(queue, tmp_path, capsys) -> None:
    rows = only("DeltaNet_-1_1", "DeltaProduct_[34]_-1_1")
    began, archive = time.monotonic(), tmp_path / "queue.tgz"
    assert queue(*rows, "--gpus", "4,7", "--seconds", "6", "--pack", str(archive)) == 0
    assert time.monotonic() - began < 30
    one, three, four = (
        run_of(tmp_path, row) for row in ("DeltaNet_-1_1", "DeltaProduct_3_-1_1", "DeltaProduct_4_-1_1")
    )
    assert {(run / "calls").read_text() for run in (one, four)} == {"4\n", "7\n"}  # --only's order
    said = capsys.readouterr().out
    assert "3 runs: 1 begun, 2 complete" in said
    assert "0.500 (0.500; 0.500 to 0.500; seeds 0; 800 steps; 1% of the words" in said  # of 80,000 by 256
    assert "seeds 0; 4 steps; 0.005% of the words" in said and "1 cut" in said
    with tarfile.open(archive) as tar:
        weights = {name.split("/", 2)[2] for name in tar.getnames() if name.endswith("weights")}
        assert "runs/tables.md" in tar.getnames()
    assert weights == {
        "DeltaNet_-1_1/parity/seed-0/hf/step-0000800/weights",
        "DeltaProduct_3_-1_1/parity/seed-0/checkpoints/step-0000006/weights",
        "DeltaProduct_4_-1_1/parity/seed-0/hf/step-0000800/weights",
    }

    assert queue(*rows, "--gpus", "none") == 0
    assert len((three / "calls").read_text().splitlines()) == 2 and (three / "calls").read_text()[-1] == "\n"
    assert (one / "calls").read_text().count("\n") == (four / "calls").read_text().count("\n") == 1
    assert "3 runs: 3 complete" in capsys.readouterr().out


def test_a_failure_is_named_and_a_crash_gets_a_second_attempt(queue, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    rows = only("GLA", "RetNet", "RWKV-7", "DeltaNet_-1_1")
    assert queue(*rows, "--jobs", "2") == 1
    attempts = {
        row: len((run_of(tmp_path, row) / "calls").read_text().splitlines())
        for row in ("GLA", "RetNet", "RWKV-7", "DeltaNet_-1_1")
    }
    assert attempts == {"GLA": 1, "RetNet": 2, "RWKV-7": 2, "DeltaNet_-1_1": 1}
    assert (run_of(tmp_path, "RetNet") / "tuning").read_text() == "1"  # of flash-linear-attention's kernels
    first, second = (run_of(tmp_path, "RetNet") / "mps").read_text().splitlines()
    assert first == str(tmp_path) and not Path(second).exists()  # an error under MPS ends other runs, too
    text = (tmp_path / "runs" / "tables.md").read_text()
    assert "GLA did not run or end (parity seed-0): this model needs a package." in text
    assert "RWKV-7 did not run or end (parity seed-0): exit status 1, RuntimeError: out of memory." in text
    assert "RetNet did not" not in text
    assert "4 runs: 2 complete, 2 failed" in capsys.readouterr().out
    assert queue(*only("RWKV-7")) == 1
    mps = (run_of(tmp_path, "RWKV-7") / "mps").read_text().splitlines()
    assert mps[0] == str(tmp_path) and len(mps) == 4 and mps[0] not in mps[1:]


@pytest.mark.parametrize(("jobs", "failed"), [("2", 0), ("1", 1)], ids=["beside another", "alone"])
def test_a_run_without_memory_beside_others_waits_for_them(queue, tmp_path, jobs: str, failed: int) -> None:
    rows = only("DeltaProduct_4_-1_1", "Mamba-2")
    assert queue(*rows, "--jobs", jobs, "--gpus", "5") == failed
    assert (run_of(tmp_path, "Mamba-2") / "complete").exists() is not bool(failed)
    assert (run_of(tmp_path, "Mamba-2") / "failed").exists() is bool(failed)


def test_a_run_over_its_own_time_makes_room(queue, tmp_path) -> None:
    assert queue(*only("DeltaProduct_3_-1_1", "DeltaNet_-1_1"), "--run-seconds", "1", "--gpus", "none") == 0
    assert (run_of(tmp_path, "DeltaNet_-1_1") / "complete").exists()
    assert not (run_of(tmp_path, "DeltaProduct_3_-1_1") / "complete").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_the_runs_with_checkpoints_and_writes_the_tables(
    queue, tmp_path, number: int, status: int
) -> None:
    run = run_of(tmp_path, "DeltaProduct_3_-1_1")

    def send() -> None:
        while not (run / "metrics.jsonl").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert queue(*only("DeltaProduct_3_-1_1"), "--gpus", "none") == status
    thread.join()
    assert (run / "checkpoints" / "step-0000006").is_dir() and (tmp_path / "runs" / "tables.md").exists()


def test_a_time_in_which_no_run_is_tested_is_no_error_but_tables_of_nothing_are(tmp_path) -> None:
    def start(name: str, overrides: list[str], log: Path, **variables: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])

    request = ["--folder", str(tmp_path), *only("DeltaNet_-1_1"), "--gpus", "none"]
    assert run_queue([*request, "--seconds", "1"], start) == 0
    with pytest.raises(ValueError):
        run_queue([*request, "--seconds", "0"], start)


def test_claims_come_first_and_what_was_begun_before_what_is_new(queue, tmp_path, capsys) -> None:
    begun = run_of(tmp_path, "DeltaProduct_3_-1_1")
    begun.mkdir(parents=True)
    (begun / "metrics.jsonl").write_text('{"step": 1200}\n')
    assert queue("--only", "parity/*", "--seeds", "0,1", "--dry-run") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    names = [next(word for word in line.split() if "/seed-" in word) for line in lines]
    claimed = ["claim" in line.split() for line in lines]
    assert claimed == sorted(claimed, reverse=True) and set(claimed) == {True, False}
    assert names[0] == "formal/DeltaProduct_3_-1_1/parity/seed-0" and "1,200 steps" in lines[0]
    assert not names[1].endswith("seed-1") and len(set(names)) == len(names)
    assert last == f"{len(names)} runs: 1 begun, {len(names) - 1} new"
    assert not (begun / "calls").exists()
    queue("--only", "z60/*", "--only", "A5/seed-1", "--seeds", "1", "--dry-run")
    names = [line.split("  ")[-2].strip() for line in capsys.readouterr().out.splitlines()[:-1]]
    kinds = [name.split("/")[2] for name in names]
    assert kinds == sorted(kinds, reverse=True) and {*kinds} == {"Z60", "A5"}


def test_archives_are_written_while_runs_go_on(queue, tmp_path) -> None:
    """A machine that is taken away leaves the newest of them."""
    archive, found = tmp_path / "queue.tgz", []

    def look() -> None:
        while not archive.exists():
            time.sleep(0.01)
        with tarfile.open(archive) as tar:
            found.extend(name for name in tar.getnames() if name.endswith("metrics.jsonl"))

    reader = threading.Thread(target=look, daemon=True)
    reader.start()
    stopped = [*only("DeltaProduct_3_-1_1"), "--gpus", "none", "--seconds", "8"]
    assert queue(*stopped, "--pack", str(archive), "--pack-every", "3") == 0
    reader.join()
    run = run_of(tmp_path, "DeltaProduct_3_-1_1")
    assert found == [f"{run.relative_to(tmp_path)}/metrics.jsonl"]
    with tarfile.open(archive) as tar:  # what it saved when it was stopped, too
        assert any(name.endswith("checkpoints/step-0000006/weights") for name in tar.getnames())


def test_an_archive_that_cannot_be_written_costs_no_run(queue, tmp_path, capsys, monkeypatch) -> None:
    """Refused before training where that shows; later, as on a full disk, a line."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        queue(*only("DeltaNet_0_1"), "--gpus", "none", "--pack", str(tmp_path / "file" / "queue.tgz"))
    assert not run_of(tmp_path, "DeltaNet_0_1").exists()
    packed, calls = run_queue_module.pack, []

    def full(folder: Path, archive: Path) -> int:
        calls.append(archive)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return packed(folder, archive)

    monkeypatch.setattr(run_queue_module, "pack", full)
    pack = ["--pack", str(tmp_path / "runs" / "queue.tgz"), "--pack-every", "0.1"]
    assert queue(*only("DeltaProduct_4_-1_1"), "--gpus", "none", *pack) == 0
    assert "No space left on device" in capsys.readouterr().out
    assert (run_of(tmp_path, "DeltaProduct_4_-1_1") / "complete").exists() and len(calls) > 1
    with tarfile.open(tmp_path / "runs" / "queue.tgz") as tar:  # without the archives before it
        assert not any("queue.tgz" in name for name in tar.getnames())


def test_what_another_queue_trains_meanwhile_is_left_to_it(queue, tmp_path) -> None:
    """One run is complete before its turn, of the other another process has the lock."""
    first, second, third = (
        run_of(tmp_path, row) for row in ("DeltaProduct_4_-1_1", "DeltaNet_-1_1", "mLSTM")
    )

    def others() -> None:
        while not (first / "calls").exists():
            time.sleep(0.01)
        second.mkdir(parents=True)
        (second / "complete").touch()
        while not (third / "calls").exists():
            time.sleep(0.01)
        lock = RunLock(RunFolder(third))
        (third / "go").touch()
        ended.wait(60)
        lock.close()

    ended = threading.Event()
    thread = threading.Thread(target=others, daemon=True)
    thread.start()
    rows = only("DeltaProduct_4_-1_1", "DeltaNet_-1_1", "mLSTM")
    assert queue(*rows, "--gpus", "none") == 0
    ended.set()
    thread.join()
    assert (first / "complete").exists()
    assert not (second / "calls").exists()
    assert not (third / "failed").exists() and not (third / "complete").exists()


def test_a_run_of_another_recipe_is_left_alone(queue, tmp_path, capsys) -> None:
    """Others are trained, and the queue says which it was."""
    assert queue(*only("DeltaNet_-1_1"), "--gpus", "none", "trainer.max_steps=4") == 0
    before = (run_of(tmp_path, "DeltaNet_-1_1") / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    both = [*only("DeltaNet_-1_1"), *only("DeltaNet_0_1")]
    assert queue(*both, "--gpus", "none", "trainer.max_steps=8") == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "DeltaNet_-1_1/parity/seed" in line]
    assert [line.split()[0] for line in lines] == ["foreign"]
    assert "(experiment=formal/parity_fast " in lines[0] and "trainer.max_steps=4" in lines[0]
    assert (run_of(tmp_path, "DeltaNet_-1_1") / "metrics.jsonl").read_bytes() == before
    assert (run_of(tmp_path, "DeltaNet_0_1") / "complete").exists()
    assert queue(*only("DeltaNet_-1_1"), "--full", "trainer.max_steps=4") == 1


def test_a_run_of_an_experiment_that_has_changed_is_left_alone(queue, tmp_path, capsys, monkeypatch) -> None:
    assert queue(*only("DeltaNet_-1_1"), "--gpus", "none") == 0
    configs = tmp_path / "configs"
    shutil.copytree(str(files("fla_train.configs")), configs)
    changed = configs / "experiment" / "formal" / "parity_fast.yaml"
    changed.write_text("# another comment\n" + changed.read_text())
    ours = run_queue_module.files
    monkeypatch.setattr(run_queue_module, "files", lambda name: configs if "configs" in name else ours(name))
    for line, code in (("", 0), ("\nseed: 7\n", 1)):
        base = configs / "experiment" / "formal" / "common.yaml"
        base.write_text(base.read_text() + line)
        run_queue_module.experiment_content.cache_clear()
        assert queue(*only("DeltaNet_-1_1"), "--gpus", "none") == code
    run_queue_module.experiment_content.cache_clear()
    assert "foreign" in capsys.readouterr().out


def test_what_does_not_fit_is_refused(queue, tmp_path) -> None:
    with pytest.raises(ValueError, match="fits no run"):
        queue("--only", "formal/GLU")
    for more in ([], ["--dry-run"]):
        with pytest.raises(ValueError, match=r"trainer\.max_step=4: .*trainer\.max_steps"):
            queue(*only("DeltaNet_0_1"), "trainer.max_step=4", *more)
    assert not run_of(tmp_path, "DeltaNet_0_1").exists()
    with pytest.raises(SystemExit):
        queue("--seeds", "a")


def test_a_place_that_cannot_be_written_is_an_error_in_one_line(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "runs")
    monkeypatch.setattr(sys, "argv", ["fla-runs", "queue", *only("DeltaNet_0_1"), "--folder", folder])
    with pytest.raises(SystemExit) as end:
        runs.main()
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and folder in error and error.count("\n") == 1


@pytest.mark.long
def test_a_real_run_continues_from_an_archive_in_another_place(tmp_path, unwatched) -> None:
    name, archive, steps = "state_tracking/DeltaProduct_2_-1_1/S3/seed-0", tmp_path / "queue.tgz", 100_000
    small = [
        *("task.batch_size=8", "task.test_sequences=8", "model.hidden_size=32", "model.num_heads=1"),
        *("trainer.cuda_graph=false", "trainer.eval_every=3", "trainer.log_every=1", "task.curriculum=[]"),
        *("trainer.check_backend=false", "task.tests.longer.length=32", "task.train.length=16"),
    ]
    command = [sys.executable, "-m", "fla_train.cli.runs", "queue", "--only", name, "--seeds", "0", *small]

    def place(home: str) -> list[str]:
        return ["--folder", str(tmp_path / home / "runs"), f"trainer.max_steps={steps}"]

    process = subprocess.Popen([*command, *place("a"), "--pack", str(archive)])
    first, second = (tmp_path / home / "runs" / name for home in ("a", "b"))
    while not any("longer/sequence_accuracy" in record for record in read_metrics(first / "metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "b")  # of this project: its filter came with Python 3.11.4
    assert archive.stat().st_size < 1e6
    (stopped,) = Run(second).checkpoints
    assert 0 < stopped < steps
    (second / "recipe").write_text((second / "recipe").read_text().replace(str(steps), str(stopped + 4)))
    steps = stopped + 4
    subprocess.run([*command, *place("b")], check=True)
    assert (second / "complete").exists()
    starts = [json.loads(file.read_text())["step"] for file in sorted(second.glob("starts/*/start.json"))]
    assert starts == [stopped] and list(Run(second).checkpoints) == [steps]
    assert read_metrics(second / "metrics.jsonl")[-1]["step"] == steps


def test_the_queue_continues_from_the_records_in_the_docs(tmp_path, capsys) -> None:
    """A recipe that was changed since would be refused."""
    records = Path(__file__).resolve().parents[2] / "docs" / "reports" / "expressivity-runs.tar.xz"
    with tarfile.open(records) as archive:
        archive.extractall(tmp_path)
    complete = len(list(tmp_path.glob("*/*/*/seed-*/complete")))
    assert complete > 0
    assert run_queue(["--dry-run", "--folder", str(tmp_path)]) == 0
    assert re.search(rf" {complete} complete\b", capsys.readouterr().out)
