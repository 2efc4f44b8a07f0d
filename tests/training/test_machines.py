"""Several machines, played by launchers side by side on this one."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fla_train.training.agreement import differences
from fla_train.training.launch import launch
from fla_train.training.metrics import read_metrics
from fla_train.training.schema import TrainConfig


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_machines_train_one_run(
    make_config: Callable[..., TrainConfig], overrides: list[str], tmp_path: Path, port: int
):
    more = ["launch.num_machines=2", "launch.num_processes=2", f"launch.main_process_port={port}"]
    more += ["launch.device=cpu", "trainer.max_steps=3", f"run.dir={tmp_path}"]
    code = "from fla_train.cli.train import main; main()"
    command = [sys.executable, "-c", code, *overrides, *more, "launch.machine_rank=1"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        launch(make_config(*more))
        stdout, stderr = other.communicate()
    finally:
        other.kill()
    assert other.returncode == 0, stderr[-3000:]
    assert f"waiting for all 2 at 127.0.0.1:{port}" in stdout
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl") if "loss" in r] == [1, 2, 3]
    checkpoint = tmp_path / "checkpoints" / "step-0000003"
    assert [path.name for path in sorted(checkpoint.glob("rng-*.pt"))] == ["rng-0.pt", "rng-1.pt"]
    assert (tmp_path / "config-machine-1.yaml").is_file()
    assert (tmp_path / "train-machine-1.log").is_file()  # two machines can't append to one file on NFS


def test_what_differs_between_machines_is_named():
    facts = {"seed": "0", "the prepared data": "abc", "the checkpoint to resume": None}
    assert differences([facts, dict(facts)]) == []
    assert differences(
        [facts, facts | {"the checkpoint to resume": "step-0000003"}, facts | {"seed": "1"}]
    ) == [
        "seed",
        "the checkpoint to resume",
    ]
