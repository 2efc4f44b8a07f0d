"""Throughput of training: tokens per second, model FLOP utilization (MFU), peak FLOP/s of GPUs, memory."""

import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fla_train.utils.records import Record

# Dense bf16 matrix products with fp32 accumulation, TFLOP/s, from NVIDIA's data sheets (which state twice as
# much "with sparsity"). The first one counts that a device's name holds as whole words: an A10G is no A10.
PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.0),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("A100", 312.0),
    ("L40S", 362.05),
    ("A40", 149.7),
    ("A10", 125.0),
    ("RTX 4090", 165.2),
)


def peak_flops(device_name: str, precision: str, override: float | None = None) -> float | None:
    """Peak FLOP/s of one device, for the model FLOP utilisation; None where it is not known.

    Args:
        device_name: as `torch.cuda.get_device_name` says; "cpu" is in no table.
        precision: only `bf16` is in the table; the utilisation of `fp8` is of that peak, too.
        override: TFLOP/s that count whatever the device.
    """
    if override is not None:
        return override * 1e12
    if precision not in ("bf16", "fp8"):
        return None
    known = (tflops * 1e12 for name, tflops in PEAK_TFLOPS if re.search(rf"\b{name}\b", device_name))
    return next(known, None)


@dataclass
class Throughput:
    """Seconds and tokens of training since the last reading; evaluation and checkpoints don't count.

    Args:
        flops_per_token: forward and backward, by the model's own formula; recomputation does not count.
        peak: FLOP/s of all devices together; None: no utilisation.
        device: where the memory is read; the process's own on a CPU.
    """

    flops_per_token: float
    peak: float | None
    device: torch.device
    seconds: float = 0.0
    waited: float = 0.0  # of them for data
    tokens: int = 0

    def start(self) -> None:
        """Training begins or continues."""
        self._begin = time.perf_counter()

    def stop(self, tokens: int) -> None:
        """Something else follows the step of `tokens` tokens."""
        self.seconds += time.perf_counter() - self._begin
        self.tokens += tokens

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, training waits for data."""
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin

    def read(self) -> Record:
        """Speed, utilisation, the share of time that data was waited for, memory; all since the last call."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        record: Record = {
            "tokens_per_second": round(rate, 1),
            "data_wait": round(self.waited / self.seconds, 5) if self.seconds else 0.0,
            "memory_gib": round(self._memory() / 2**30, 3),
        }
        if self.peak is not None:
            record["mfu"] = round(rate * self.flops_per_token / self.peak, 4)
        self.seconds, self.waited, self.tokens = 0.0, 0.0, 0
        return record

    def _memory(self) -> int:
        """Peak bytes: allocated on the GPU since the last call, or of this process so far."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
