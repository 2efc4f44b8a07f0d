"""`fla-bench precompile`: a short run that leaves compiled kernels and nothing else."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fla_train.bench.kernel_cache import precompile_run
from fla_train.cli import bench
from fla_train.cli.app import compose
from fla_train.training.config import TrainConfig, register, to_config
from fla_train.training.launch import launch

TINY = ["model=gated_delta_product/tiny", "logger=none", "trainer.seq_len=64", "trainer.micro_batch_size=2"]
SMALL = ["model.num_hidden_layers=1", "model.hidden_size=64", "model.num_heads=2", "model.head_dim=16"]
MANY = [
    "launch.num_processes=16",
    "launch.num_machines=2",
    "hub.repo_id=nobody/none",
    "trainer.max_steps=9999",
]
TASK = ["task=mqar", "task.train.settings=[[32,4]]", "task.batch_size=4", "task.options.vocab_size=64"]
TASK += ["task.test_sequences=8", "task.train_sequences=64"]


@pytest.fixture
def config() -> Callable[..., TrainConfig]:
    register()
    return lambda *more: to_config(compose("train", [*TINY, *SMALL, *more]))


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR", ""))


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("more", [["data=fineweb", "data.document_boundaries=true"], TASK])
def test_the_run_needs_no_data_and_leaves_nothing(
    config: Callable[..., TrainConfig],
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd,
) -> None:
    """Also of a config for other machines, whose data are not here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert precompile_run(config("launch.device=cpu", *MANY, *more), tmp_path / "cache") == 0
    assert "Trained 2 steps" in capfd.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert not list((tmp_path / "cache").iterdir())


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="GPU"):
        bench.run(["precompile", "--folder", str(tmp_path / "cache"), "--", *TINY])
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.usefixtures("unwatched")
def test_gpu_a_run_compiles_nothing_more(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    more = ["model.vocab_size=4096", "trainer.global_batch_tokens=512", "trainer.eval_tokens=128"]
    assert precompile_run(config(*more), cache) > 0
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    launch(config(*more, "trainer.max_steps=3", "data=stdlib", f"run.dir={tmp_path / 'run'}"))
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
