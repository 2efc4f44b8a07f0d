"""Signals, restarts and SLURM, played on this machine: nothing is lost and nothing is done twice."""

import contextlib
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from test_resume import losses, steps_logged, wait_for, weights, workers

from fla_train.training.launch import TrainingFailed, launch
from fla_train.training.preemption import EXIT_CODE, Preempted
from fla_train.training.schema import TrainConfig

Make = Callable[..., TrainConfig]
SCRIPTS = Path(__file__).parents[2] / "scripts"
MORE = ["trainer.precision=fp32", "launch.device=cpu", "trainer.checkpoint_every=5", "trainer.log_every=2"]
COMMAND = [sys.executable, "-c", "from fla_train.cli.train import main; main()"]


@pytest.fixture(scope="module")
def whole(make_config: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, never disturbed."""
    run = tmp_path_factory.mktemp("preemption") / "whole"
    launch(make_config(*MORE, f"run.dir={run}", "launch.num_processes=2"))
    return run


def same(run: Path, whole: Path) -> bool:
    return losses(run) == losses(whole) and weights(run) == weights(whole)


def without_saves(run: Path) -> list[dict]:
    """The records but those of checkpoints, of which a preempted run has one more."""
    return [record for record in losses(run) if len(record) > 2]


def test_a_signal_saves_a_checkpoint_and_the_same_command_goes_on(
    overrides: list[str], whole: Path, tmp_path: Path, make_config: Make
):
    run = tmp_path / "run"
    more = [*MORE, f"run.dir={run}", "launch.num_processes=2", "trainer.max_steps=12"]
    launcher = subprocess.Popen([*COMMAND, *overrides, *more], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: steps_logged(run) >= 1)
    launcher.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGUSR1)  # more than one changes nothing
    _, errors = launcher.communicate()
    if launcher.returncode == 0:
        pytest.skip("the run was over before the signal came")
    assert launcher.returncode == EXIT_CODE
    assert "stopped on request" in errors
    (saved, *others) = reversed(sorted(path.name for path in (run / "checkpoints").iterdir()))
    assert re.fullmatch(r"step-\d+", saved) and not any(name.startswith(".") for name in others)
    assert int(saved.removeprefix("step-")) < 12
    assert "asked to stop; the same command goes on from here" in (run / "train.log").read_text()
    launch(make_config(*more))
    assert without_saves(run) == without_saves(whole) and weights(run) == weights(whole)


def test_a_signal_while_the_data_are_prepared_can_be_tried_again(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def slow(*arguments: object, **options: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        except Exception:
            pytest.fail("taken for a fault of the data")

    monkeypatch.setattr("fla_train.training.launch.prepare", slow)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with pytest.raises(Preempted):
            launch(make_config(*MORE, f"run.dir={tmp_path / 'run'}"))
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_workers_that_die_are_started_again(
    make_config: Make, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    run = tmp_path / "run"
    killed: list[int] = []

    def kill() -> None:
        for reached in (3, 8):
            wait_for(lambda: workers(os.getpid()), poll=0.1)
            wait_for(lambda reached=reached: steps_logged(run) * 2 >= reached)
            victim = workers(os.getpid())[0]
            victim.send_signal(signal.SIGKILL)
            killed.append(victim.pid)
            wait_for(lambda: killed[-1] not in [w.pid for w in workers(os.getpid())], poll=0.1)

    killer = threading.Thread(target=kill)
    killer.start()
    launch(make_config(*MORE, f"run.dir={run}", "launch.num_processes=2", "launch.max_restarts=3"))
    killer.join()
    assert "restart      1 of 3, rank" in capfd.readouterr().out
    assert same(run, whole)


def test_a_fault_that_would_come_again_is_not_tried_again(
    make_config: Make, tmp_path: Path, capfd: pytest.CaptureFixture
):
    more = ["optimizer.lr=1e30", "trainer.max_skipped_steps=3", "launch.max_restarts=5"]
    with pytest.raises(TrainingFailed, match="in 3 steps in a row"):
        launch(make_config(f"run.dir={tmp_path / 'run'}", *more))
    assert "restart" not in capfd.readouterr().out


def test_a_rank_that_hangs_is_noticed_and_the_run_goes_on(
    make_config: Make, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    run = tmp_path / "run"

    def freeze() -> None:
        wait_for(lambda: steps_logged(run) >= 2)
        workers(os.getpid())[1].suspend()

    freezer = threading.Thread(target=freeze)
    freezer.start()
    config = make_config(*MORE, f"run.dir={run}", "launch.num_processes=2", "launch.max_restarts=1")
    config.trainer.hang_timeout = 20.0
    launch(config)
    freezer.join()
    said = capfd.readouterr().out
    assert re.search(r"restart      1 of 1, rank 0: no progress for 20 s while \w", said), said
    assert same(run, whole)


FAKE_SRUN = """#!/usr/bin/env bash
# One process per node, on this machine; signals go to all of them, as srun's do.
shift  # --kill-on-bad-exit
pids=()
trap 'kill -USR1 "${pids[@]}"' USR1
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
  SLURM_NODEID=$node "$@" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
  while :; do
    wait "$pid"; code=$?
    kill -0 "$pid" 2>/dev/null || break
  done
  [ "$code" -gt 128 ] && { wait "$pid"; code=$?; }
  [ "$code" -ne 0 ] && status=$code
done
exit "$status"
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then for node in $(seq "$SLURM_JOB_NUM_NODES"); do echo 127.0.0.1; done; fi
if [ "$1" = requeue ]; then touch "$REQUEUED"; fi
"""
FAKE_TRAIN = '#!/usr/bin/env bash\nexec {} -c "from fla_train.cli.train import main; main()" "$@"\n'


def free_port() -> int:
    """One below those that the system hands out to outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def is_training(process: psutil.Process) -> bool:
    try:
        return "fla-train" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment in which two nodes of SLURM job 4711 are this machine."""
    tools = tmp_path / "tools"
    tools.mkdir()
    fakes = {"srun": FAKE_SRUN, "scontrol": FAKE_SCONTROL, "fla-train": FAKE_TRAIN.format(sys.executable)}
    for name, text in fakes.items():
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    return os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "REQUEUED": str(tmp_path / "requeued"),
        "SLURM_JOB_ID": str(free_port() - 20000),  # the script adds it to 20000
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
    }


def test_a_preempted_slurm_job_of_two_nodes_is_queued_again_and_finishes(
    overrides: list[str], cluster: dict[str, str], whole: Path, tmp_path: Path
):
    run, requeued = tmp_path / "run", Path(cluster["REQUEUED"])
    command = ["bash", str(SCRIPTS / "train.slurm"), *overrides, *MORE, f"run.dir={run}"]
    job = subprocess.Popen(command, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: steps_logged(run) >= 1 or job.poll() is not None)
    job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate()
    assert requeued.exists() and job.returncode == 0, out
    assert "checkpoint saved: back to the queue" in out
    assert not (run / "hf" / "step-0000012").exists()
    requeued.unlink()

    done = subprocess.run(command, env=cluster, capture_output=True, text=True)
    assert done.returncode == 0 and not requeued.exists(), done.stdout + done.stderr
    assert without_saves(run) == without_saves(whole) and weights(run) == weights(whole)


def test_an_array_task_takes_its_override_and_its_folder(
    overrides: list[str], cluster: dict[str, str], tmp_path: Path
):
    environment = cluster | {
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_ARRAY_TASK_ID": "1",
        "SWEEP": "optimizer.lr=1e-4 optimizer.lr=5e-4",
    }
    more = ["dry_run=true", f"run.dir={tmp_path / 'sweep'}", "launch.device=cpu"]
    command = ["bash", str(SCRIPTS / "train.slurm"), *overrides, *more]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "lr: 0.0005" in out and f"dir: {tmp_path / 'sweep' / '1'}" in out


def test_one_machine_takes_all_its_gpus(overrides: list[str], cluster: dict[str, str], tmp_path: Path):
    counter = tmp_path / "tools" / "nvidia-smi"
    counter.write_text("#!/usr/bin/env bash\nprintf 'GPU 0\\nGPU 1\\n'\n")
    counter.chmod(stat.S_IRWXU)
    command = ["bash", str(SCRIPTS / "train_node.sh"), *overrides, "dry_run=true", "launch.device=cpu"]
    out = subprocess.run(command, env=cluster, capture_output=True, text=True, check=True).stdout
    assert "2 process(es) x 2 micro-batch(es)" in out and "max_restarts: 3" in out


def test_hosts_without_a_batch_system(overrides: list[str], cluster: dict[str, str], tmp_path: Path):
    """Two names for this machine in the place of two hosts."""
    ssh = Path(tmp_path / "tools" / "reach")
    ssh.write_text('#!/usr/bin/env bash\nexec bash -c "$2"\n')
    ssh.chmod(stat.S_IRWXU)
    run = tmp_path / "run"
    environment = cluster | {"SSH": str(ssh), "HOSTS": "127.0.0.1 localhost", "GPUS": "1"}
    more = [
        "launch.device=cpu",
        "trainer.max_steps=3",
        f"run.dir={run}",
        f"launch.main_process_port={free_port()}",
    ]
    command = ["bash", str(SCRIPTS / "train_hosts.sh"), *overrides, *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "127.0.0.1: Trained 3 steps" in done.stdout and "localhost: machines" in done.stdout
    assert sorted(path.name for path in (run / "checkpoints" / "step-0000003").glob("rng-*")) == [
        "rng-0.pt",
        "rng-1.pt",
    ]
    assert not any(map(is_training, psutil.Process().children(recursive=True)))
