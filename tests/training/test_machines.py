"""Several machines and the scripts that start on them, played by this one."""

import contextlib
import os
import random
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from test_preemption import without_saves
from test_resume import TIMEOUT, steps_logged, wait_for, weights
from warm_ranks import TWO_RANKS

from fla_train.cli.app import compose
from fla_train.training.agreement import differences
from fla_train.training.schema import TrainConfig, register, to_config

SCRIPTS = Path(__file__).parents[2] / "scripts"
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
RECORD = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > {}\n'
REACH = '#!/usr/bin/env bash\nexec bash -c "$2"\n'


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


def put(tool: Path, text: str) -> Path:
    """An executable."""
    tool.write_text(text)
    tool.chmod(stat.S_IRWXU)
    return tool


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment in which two nodes of a SLURM job are this machine."""
    tools = tmp_path / "tools"
    tools.mkdir()
    fakes = {"srun": FAKE_SRUN, "scontrol": FAKE_SCONTROL, "fla-train": FAKE_TRAIN.format(sys.executable)}
    for name, text in fakes.items():
        put(tools / name, text)
    return os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "REQUEUED": str(tmp_path / "requeued"),
        "SLURM_JOB_ID": str(free_port() - 20000),  # the script adds it to 20000
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
    }


def asked_for(script: str, overrides: list[str], environment: dict[str, str], tmp_path: Path) -> TrainConfig:
    """The config that `script` would have `fla-train` train; it ends as a run that succeeds."""
    put(tmp_path / "tools" / "fla-train", RECORD.format(tmp_path / "asked"))
    command = ["bash", str(SCRIPTS / script), *overrides]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    register()
    return to_config(compose("train", (tmp_path / "asked").read_text().splitlines()))


@pytest.mark.slow
def test_a_preempted_slurm_job_is_queued_again_and_goes_on_on_hosts_without_slurm(
    overrides: list[str], cluster: dict[str, str], whole: Path, tmp_path: Path
):
    run = tmp_path / "run"
    command = ["bash", str(SCRIPTS / "train.slurm"), *overrides, *TWO_RANKS, f"run.dir={run}"]
    job = subprocess.Popen(command, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: steps_logged(run) >= 1 or job.poll() is not None)
    job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate()
    assert Path(cluster["REQUEUED"]).exists() and job.returncode == 0, out
    assert "checkpoint saved: back to the queue" in out and "stopped on request" in out
    assert "waiting for all 2 at 127.0.0.1:" in out
    assert not (run / "hf" / "step-0000012").exists()

    # two names for this machine in the place of two hosts
    reach = put(tmp_path / "tools" / "reach", REACH)
    environment = cluster | {"SSH": str(reach), "HOSTS": "127.0.0.1 localhost", "GPUS": "1"}
    command[1] = str(SCRIPTS / "train_hosts.sh")
    command.append(f"launch.main_process_port={free_port()}")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "127.0.0.1: Trained 12 steps" in done.stdout and "localhost: machines" in done.stdout
    assert not any(map(is_training, psutil.Process().children(recursive=True)))

    assert without_saves(run) == without_saves(whole) and weights(run) == weights(whole)
    random_states = (run / "checkpoints" / "step-0000012").glob("rng-*")
    assert sorted(path.name for path in random_states) == ["rng-0.pt", "rng-1.pt"]
    assert (run / "config-machine-1.yaml").is_file()
    assert (run / "train-machine-1.log").is_file()  # two machines can't append to one file on NFS


@pytest.mark.usefixtures("unwatched")
@pytest.mark.slow
def test_hosts_that_are_asked_to_stop_save_a_checkpoint_and_are_waited_for(
    overrides: list[str], cluster: dict[str, str], tmp_path: Path
):
    run = tmp_path / "run"
    reach = put(tmp_path / "tools" / "reach", REACH)
    environment = cluster | {"SSH": str(reach), "HOSTS": "127.0.0.1 localhost", "GPUS": "1"}
    long = ["trainer.max_steps=3000", "trainer.eval_every=0", "trainer.checkpoint_every=0"]
    settings = [*overrides, *TWO_RANKS, *long, f"run.dir={run}", f"launch.main_process_port={free_port()}"]
    script = ["bash", str(SCRIPTS / "train_hosts.sh"), *settings]
    hosts = subprocess.Popen(
        script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(lambda: steps_logged(run) >= 1 or hosts.poll() is not None)
    hosts.terminate()
    out, _ = hosts.communicate(timeout=TIMEOUT)
    assert hosts.returncode == 75, out
    assert "127.0.0.1: error: stopped on request" in out and "localhost: error: stopped on request" in out
    assert list((run / "checkpoints").glob("step-*"))
    assert not any(map(is_training, psutil.Process().children(recursive=True)))


@pytest.mark.usefixtures("unwatched")
@pytest.mark.slow
def test_a_machine_that_is_killed_and_started_again_is_met_again(
    overrides: list[str], whole: Path, tmp_path: Path
):
    """At once, though `trainer.hang_timeout` is long; the other machine's launcher lives on. First machine 0,
    before there is a checkpoint, then machine 1.
    """
    run, port = tmp_path / "run", free_port()
    launchers: dict[int, subprocess.Popen] = {}

    def start(machine: int) -> None:
        options = [f"launch.machine_rank={machine}", "launch.num_machines=2", "launch.max_restarts=1"]
        options += [f"launch.main_process_port={port}", f"run.dir={run}"]
        code = "from fla_train.cli.train import main; main()"
        command = [sys.executable, "-c", code, *overrides, *TWO_RANKS, *options]
        with (tmp_path / f"said-{machine}").open("a") as file:
            launchers[machine] = subprocess.Popen(command, stdout=file, stderr=file)

    def said(machine: int) -> str:
        return (tmp_path / f"said-{machine}").read_text()

    def kill_and_start(machine: int) -> None:
        launchers[machine].kill()
        launchers[machine].wait()
        start(machine)
        wait_for(lambda: "restart      1 of 1, " in said(1 - machine), poll=0.1)

    try:
        for machine in range(2):
            start(machine)
        wait_for(lambda: steps_logged(run) >= 1)
        kill_and_start(0)
        wait_for((run / "checkpoints" / "step-0000005").exists)
        kill_and_start(1)
        codes = [launchers[machine].wait(TIMEOUT) for machine in range(2)]
    finally:
        for launcher in launchers.values():
            launcher.kill()
    assert codes == [0, 0], said(0) + said(1)
    assert [said(machine).count("restart      1 of 1, ") for machine in range(2)] == [1, 1]
    assert f"run          {run}, from {run}/checkpoints/step-" in said(0)
    assert without_saves(run) == without_saves(whole) and weights(run) == weights(whole)


def test_an_array_task_trains_its_job_of_the_sweep(
    overrides: list[str], cluster: dict[str, str], tmp_path: Path
):
    """Here the second of two; dry_run prints what it would train."""
    environment = cluster | {"SLURM_JOB_NUM_NODES": "1", "SLURM_ARRAY_TASK_ID": "1"}
    places = [f"run.dir={tmp_path / 'sweep'}", f"hydra.sweep.dir={tmp_path / 'hydra'}"]
    command = ["bash", str(SCRIPTS / "train.slurm"), "-m", *overrides, "seed=3,4", "dry_run=true", *places]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nseed: 4\n" in done.stdout and "\nseed: 3\n" not in done.stdout
    assert f"dir: {tmp_path / 'sweep' / '1'}\n" in done.stdout


def test_one_machine_takes_all_its_gpus(overrides: list[str], cluster: dict[str, str], tmp_path: Path):
    put(tmp_path / "tools" / "nvidia-smi", "#!/usr/bin/env bash\nprintf 'GPU 0\\nGPU 1\\n'\n")
    config = asked_for("train_node.sh", overrides, cluster, tmp_path)
    assert (config.launch.num_processes, config.launch.max_restarts) == (2, 3)


def test_what_differs_between_machines_is_named():
    facts = {"seed": "0", "the prepared data": "abc", "the checkpoint to resume": None}
    assert differences([facts, dict(facts)]) == []
    assert differences(
        [facts, facts | {"the checkpoint to resume": "step-0000003"}, facts | {"seed": "1"}]
    ) == [
        "seed",
        "the checkpoint to resume",
    ]
