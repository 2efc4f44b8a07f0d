"""Failures are described in one line, and are final if a restart would fail again."""

import signal
from collections.abc import Callable

import pytest
import torch

from fla_train.training.config import TrainConfig
from fla_train.training.failures import TrainingStopped, describe_exit, describe_failure
from fla_train.utils.errors import Interrupted
from fla_train.utils.watchdog import RankHung

Make = Callable[..., TrainConfig]
ON_GPU = "launch.device=cuda"
# Messages of torch and NCCL on a GPU
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
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), "DistBackendError", False),
    ],
)
def test_failures_that_would_recur_are_final(failure: Exception, line: str, final: bool):
    described, is_final = describe_failure(failure)
    assert described.startswith(line) and is_final == final


def test_the_end_by_any_signal_is_described():
    """Real-time signals have no name."""
    assert all(describe_exit(-number) for number in signal.valid_signals())
    assert "SIGTERM" in describe_exit(-signal.SIGTERM)
    assert str(signal.SIGRTMIN + 5) in describe_exit(-signal.SIGRTMIN - 5)


@pytest.mark.parametrize(
    "cause",
    [
        torch.OutOfMemoryError(ALLOCATOR),
        RuntimeError(DRIVER),
        RuntimeError(CUBLAS),
        torch.distributed.DistBackendError(NCCL),
    ],
)
def test_exhausted_gpu_memory_is_final_and_names_settings(cause: Exception, make_config: Make):
    """Also as the cause of another error."""
    failure = RuntimeError("the engine failed")
    failure.__cause__ = cause
    for error in (cause, failure):
        line, final = describe_failure(error, make_config(ON_GPU, "trainer.micro_batch_size=4"))
        assert final and "\n" not in line and line.startswith("out of GPU memory")
        assert ("20.00 GiB" in line) == (ALLOCATOR in str(cause))
        assert "micro_batch_size (now 4)" in line and "activation_checkpointing=true" in line
