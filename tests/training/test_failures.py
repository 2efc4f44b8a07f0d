"""Descriptions of failures, and which are final. Out-of-memory errors are real where a CPU has them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fla_train.training.config import TrainConfig
from fla_train.training.failures import TrainingStopped, describe_exit, describe_failure
from fla_train.training.resolve import resolve
from fla_train.utils.errors import Interrupted
from fla_train.utils.watchdog import RankHung

Make = Callable[..., TrainConfig]
ON_GPU = "launch.device=cuda"
# As torch and NCCL word them on a GPU
ALLOCATOR = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.00 "
    "GiB is free."
)
DRIVER = "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
    "Last error:\nFailed to CUDA calloc async 608 bytes: Cuda failure 2 'out of memory'"
)


@pytest.mark.parametrize(
    ("failure", "line", "final"),
    [
        (ValueError("a fault\nof the config"), "a fault of the config", True),
        (TrainingStopped("diverged"), "diverged", True),
        (Interrupted("no answer"), "no answer", False),
        (RankHung("no progress"), "no progress", False),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device", False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "RuntimeError: CUDA", False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "RuntimeError: CUDA", False),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), "DistBackendError", False),
    ],
)
def test_what_would_end_the_same_way_again_is_final(failure: Exception, line: str, final: bool):
    told, ends = describe_failure(failure)
    assert told.startswith(line) and ends == final


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError(ALLOCATOR),
        RuntimeError(DRIVER),
        RuntimeError(CUBLAS),
        torch.distributed.DistBackendError(NCCL),
    ],
)
def test_a_full_gpu_is_final_and_says_what_to_change(failure: Exception, make_config: Make):
    config = make_config(ON_GPU, "trainer.micro_batch_size=4")
    line, final = describe_failure(failure, config)
    assert final and "\n" not in line and line.startswith("out of GPU memory")
    assert ("20.00 GiB" in line) == (ALLOCATOR in str(failure))
    assert "trainer.micro_batch_size=2 (now 4)" in line
    assert "trainer.activation_checkpointing=true" in line
    line, final = describe_failure(failure)  # before the config could be read
    assert final and "trainer.micro_batch_size" in line


def test_an_error_that_a_full_gpu_led_to_is_told_as_its_cause(make_config: Make):
    try:
        try:
            raise torch.OutOfMemoryError(ALLOCATOR)
        except torch.OutOfMemoryError as failure:
            raise RuntimeError("the engine failed") from failure
    except RuntimeError as failure:
        line, final = describe_failure(failure, make_config(ON_GPU))
    assert final and line.startswith("out of GPU memory (tried to allocate 20.00 GiB)")


def too_much_for_torch() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def too_much_for_numpy() -> None:
    np.empty(2**60, dtype=np.uint8)


def too_much_for_python() -> None:
    bytearray(2**60)


@pytest.mark.parametrize("allocate", [too_much_for_torch, too_much_for_numpy, too_much_for_python])
def test_a_full_host_is_final(allocate: Callable[[], None], make_config: Make):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    line, final = describe_failure(caught.value, make_config("launch.device=cpu"))
    assert final and line.startswith("out of host memory") and "trainer.micro_batch_size=1 (now 2)" in line
    if allocate is too_much_for_torch:  # which says how much
        assert "(tried to allocate 1,073,741,824.0 GiB)" in line
    line, final = describe_failure(caught.value, make_config(ON_GPU))
    assert final and line.startswith("out of host memory") and "micro_batch_size" not in line


@pytest.mark.parametrize("size", [2, 3, 9, 16])
def test_the_smaller_micro_batch_fits_the_batch(size: int, make_config: Make):
    """Otherwise the advice would be refused."""
    config = make_config(
        *("launch.device=cpu", f"trainer.micro_batch_size={size}", f"trainer.global_batch_tokens={32 * size}")
    )
    line, _ = describe_failure(MemoryError(), config)
    config.trainer.micro_batch_size = int(line.split("micro_batch_size=")[1].split()[0])
    resolve(config)
    assert config.trainer.micro_batch_size < size


def test_a_batch_of_one_needs_other_advice(make_config: Make):
    more = ["trainer.micro_batch_size=1", "trainer.activation_checkpointing=true"]
    config = make_config(ON_GPU, *more, "model.recompute_operator=true")
    line, final = describe_failure(torch.OutOfMemoryError(ALLOCATOR), config)
    assert final and "trainer.seq_len (now 32)" in line and "launch.num_processes" in line
    assert "micro_batch_size" not in line and "=true" not in line


def test_a_graph_is_given_up_with_what_it_excludes(make_config: Make):
    config = make_config(ON_GPU, "trainer.cuda_graph=true")
    line, _ = describe_failure(torch.OutOfMemoryError(ALLOCATOR), config)
    assert "trainer.cuda_graph=false (now true)" in line
    assert "trainer.cuda_graph=false with trainer.micro_batch_size=1" in line
    assert "or trainer.activation_checkpointing=selective" in line  # which a graph can have


def test_a_killed_rank_may_have_been_killed_for_its_memory():
    killed = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert "SIGKILL" in describe_exit(killed.returncode) and "out of memory" in describe_exit(
        killed.returncode
    )
    assert "memory" not in describe_exit(-15) and "3" in describe_exit(3)


def test_failures_can_be_described_where_torch_cannot_be_imported(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')")
    code = "from fla_train.training.failures import describe_failure as d; print(d(ImportError('no torch')))"
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout == "('ImportError: no torch', False)\n", found.stderr


WITHOUT_LOG = """
import sys
from types import SimpleNamespace
from fla_train.training import worker
config = SimpleNamespace(run=SimpleNamespace(dir=sys.argv[1]))
worker.run(SimpleNamespace(config=config), None, None)
"""


def test_a_rank_that_can_write_no_log_leaves_one_line(tmp_path: Path):
    (tmp_path / "train.log").mkdir()
    error = tmp_path / "error.json"
    environment = os.environ | {"RANK": "0", "TORCHELASTIC_ERROR_FILE": str(error)}
    command = [sys.executable, "-c", WITHOUT_LOG, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert "Is a directory: " in error.read_text() and "train.log" in error.read_text()


def test_a_worker_whose_config_has_gone_fails_for_good(tmp_path: Path):
    error = tmp_path / "error.json"
    environment = os.environ | {"FLA_TRAIN_LAUNCHER": str(os.getpid()), "FLA_TRAIN_BEGAN": "0"}
    environment |= {"TORCHELASTIC_ERROR_FILE": str(error)}
    command = [sys.executable, "-m", "fla_train.training.worker", str(tmp_path / "config.yaml"), "."]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "") and "config.yaml" in error.read_text()
