"""Several machines, SLURM, ssh, torchrun and accelerate, simulated on one machine."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from test_preemption import without_saves
from test_resume import TIMEOUT, steps_logged, wait_for, weights
from warm_ranks import TWO_RANKS

from fla_train.run.launch import launch
from fla_train.run.resolve import resolve
from fla_train.training.config import load_config
from tests.ranks import free_port

SCRIPTS = Path(__file__).parents[2] / "scripts"
FAKE_SRUN = """#!/usr/bin/env bash
# Start one process per node on this machine, and pass signals to all of them.
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
TORCHRUN = ["torchrun", "--nproc-per-node=2"]
# On a CPU only its DeepSpeed launcher starts several ranks.
ACCELERATE = ["accelerate", "launch", "--use_deepspeed", "--zero_stage=3", "--num_processes=2"]
ACCELERATE += ["--num_machines=1", "--mixed_precision=bf16", "--dynamo_backend=no"]
REACH = '#!/usr/bin/env bash\nexec bash -c "$2"\n'


def is_training(process: psutil.Process) -> bool:
    try:
        return "fla-train" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


def put(tool: Path, text: str) -> Path:
    """Write an executable."""
    tool.write_text(text)
    tool.chmod(stat.S_IRWXU)
    return tool


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a loopback address for the main machine."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which this machine is both nodes of a SLURM job."""
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
    }


@pytest.mark.long
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
    assert "checkpoint saved: back to the queue" in out and "to resume" in out
    assert "waiting for all 2 at 127.0.0.1:" in out
    assert not (run / "hf" / "step-0000012").exists()

    # Two names of this machine stand for two hosts.
    reach = put(tmp_path / "tools" / "reach", REACH)
    environment = cluster | {"SSH": str(reach), "HOSTS": "127.0.0.1 localhost"}
    command[1] = str(SCRIPTS / "train_hosts.sh")
    command.append(f"launch.main_process_port={free_port()}")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": Trained 12 steps" in done.stdout
    assert "127.0.0.1: machines" in done.stdout and "localhost: machines" in done.stdout
    assert not any(map(is_training, psutil.Process().children(recursive=True)))

    assert without_saves(run) == without_saves(whole) and weights(run) == weights(whole)
    written = (run / "checkpoints" / "step-0000012").glob("rank-*")
    assert sorted(path.name for path in written) == ["rank-0.pt", "rank-1.pt"]
    assert (run / "logs" / "rank-1.log").is_file()  # two machines can't append to one file on NFS


@pytest.mark.usefixtures("unwatched")
@pytest.mark.long
def test_hosts_that_are_asked_to_stop_save_a_checkpoint_and_are_waited_for(overrides, cluster, tmp_path):
    run = tmp_path / "run"
    reach = put(tmp_path / "tools" / "reach", REACH)
    environment = cluster | {"SSH": str(reach), "HOSTS": "127.0.0.1 localhost"}
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
    assert "127.0.0.1: stopped" in out and "localhost: stopped" in out
    assert list((run / "checkpoints").glob("step-*"))
    assert not any(map(is_training, psutil.Process().children(recursive=True)))


@pytest.mark.usefixtures("unwatched")
@pytest.mark.long
def test_a_machine_that_is_killed_and_started_again_joins_the_others(overrides, whole, tmp_path):
    """The one that serves the store is killed before there is a checkpoint, and the other one later."""
    run, port = tmp_path / "run", free_port()
    agents: list[subprocess.Popen] = []
    options = ["launch.num_machines=2", "launch.max_restarts=2", f"launch.main_process_port={port}"]
    code = "from fla_train.cli.train import main; main()"
    command = [sys.executable, "-c", code, *overrides, *TWO_RANKS, *options, f"run.dir={run}"]

    def start() -> None:
        with (tmp_path / f"said-{len(agents)}").open("w") as file:
            agents.append(subprocess.Popen(command, stdout=file, stderr=file))

    def said(number: int) -> str:
        return (tmp_path / f"said-{number}").read_text()

    def kill_and_start(victim: int, survivor: int) -> None:
        agents[victim].kill()
        agents[victim].wait()
        start()
        # It notices the end of its rank or the end of the store first.
        wait_for(lambda: "restart      " in said(survivor), poll=0.1)

    try:
        start()
        wait_for(lambda: "waiting for all 2" in said(0), poll=0.1)
        start()
        wait_for(lambda: steps_logged(run) >= 1)
        kill_and_start(0, survivor=1)
        wait_for((run / "checkpoints" / "step-0000005").exists)
        kill_and_start(1, survivor=2)
        codes = [agent.wait(TIMEOUT) for agent in agents[2:]]
    finally:
        for agent in agents:
            agent.kill()
    assert codes == [0, 0], said(2) + said(3)
    assert f"run          {run}, from {run}/checkpoints/step-" in said(2) + said(3)
    assert without_saves(run) == without_saves(whole) and weights(run) == weights(whole)


def test_an_array_task_trains_its_job_of_the_sweep(run_command, tmp_path):
    """scripts/train.slurm adds `run.job`; dry_run prints what the job would train."""
    words = ["fla-train", "-m", "debug=smoke", "launch.device=cpu", "seed=3,4", "dry_run=true"]
    words.append(f"run.dir={tmp_path / 'sweep'}")
    code, out, err = run_command(*words, "run.job=1")
    assert code == 0, err
    assert "seed=4" in out and "seed=3" not in out
    assert f"{tmp_path / 'sweep' / '1-'}" in out
    code, _, err = run_command(*words, "run.job=2")
    assert code == 2 and err.count("its jobs are 0 to 1") == 1


def test_all_gpus_of_each_machine_are_taken_unless_told_otherwise(make_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    more = ("run.dir=run", "trainer.global_batch_tokens=auto")
    expected = {"num_machines=1": 8, "num_machines=4": 32, "num_processes=2": 2, "device=cpu": 1}
    for option, processes in expected.items():
        assert resolve(make_config(f"launch.{option}", *more)).config.launch.num_processes == processes


@pytest.mark.long  # test_start.py runs a rank of another launcher up to its first step
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_another_launcher_starts_the_ranks(overrides, whole, tmp_path, launcher):
    run = tmp_path / "run"
    own = [option for option in TWO_RANKS if "num_processes" not in option]
    tool = Path(sys.executable).with_name(launcher[0])
    command = [str(tool), *launcher[1:], "-m", "fla_train.cli.train", *overrides, *own, f"run.dir={run}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Trained 12 steps") == 1 and done.stdout.count("parameters ") == 1
    assert without_saves(run) == without_saves(whole) and weights(run) == weights(whole)
    assert "parameters " in (run / "train.log").read_text()
    assert load_config(run / "config.yaml").launch.num_processes == "auto"


def test_ranks_of_another_launcher_need_a_run_folder_and_its_number(make_config, tmp_path, monkeypatch):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=r"run\.dir"):
        launch(make_config("launch.device=cpu"))
    with pytest.raises(ValueError, match=r"launch\.num_processes=3"):
        launch(make_config("launch.device=cpu", "launch.num_processes=3", f"run.dir={tmp_path}"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resolve(make_config("run.dir=run")).config.launch.num_machines == 2
