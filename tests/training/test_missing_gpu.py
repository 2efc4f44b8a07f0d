"""A machine without the GPUs it was asked for, among others that have theirs."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_machines import free_port

from fla_train.training import launch as launch_module
from fla_train.training.schema import TrainConfig


def test_what_one_machine_lacks_ends_the_run_on_all(
    make_config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = ["launch.num_machines=2", "launch.num_processes=2", "launch.device=cpu"]
    options += [f"launch.main_process_port={free_port()}", f"run.dir={tmp_path / 'run'}"]

    def lacks(config: TrainConfig) -> list[str]:
        return ["no usable GPU"] if config.launch.machine_rank == 1 else []

    monkeypatch.setattr(launch_module, "device_faults", lacks)
    for name, result in {"prepare": None, "make_plan": None, "plan_lines": []}.items():
        monkeypatch.setattr(launch_module, name, lambda *_, found=result, **__: found)
    with ThreadPoolExecutor(2) as pool:
        both = [make_config(*options, f"launch.machine_rank={number}") for number in range(2)]
        first, second = (pool.submit(launch_module._launch, one) for one in both)
        assert isinstance(second.exception(30), ValueError)
        assert "machine 1: no usable GPU" in str(first.exception(30))
