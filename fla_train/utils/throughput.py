"""Measure training: tokens per second, model FLOP utilization (MFU), peak FLOP/s of GPUs, memory."""

import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fla_train.utils.records import Record

# Peaks of dense bf16 matrix products with fp32 accumulation, in TFLOP/s. NVIDIA's data sheets state twice
# these numbers "with sparsity". The first entry whose words are all in a device's name counts, so an A10G is
# not an A10.
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
    """Return the peak FLOP/s of one device for the model FLOP utilization, or None if it is unknown.

    Args:
        device_name: result of `torch.cuda.get_device_name`; the table has no "cpu".
        precision: the table has only `bf16`; the utilization of `fp8` also relates to that peak.
        override: TFLOP/s to use for any device.
    """
    if override is not None:
        return override * 1e12
    if precision not in ("bf16", "fp8"):
        return None
    known = (tflops * 1e12 for name, tflops in PEAK_TFLOPS if re.search(rf"\b{name}\b", device_name))
    return next(known, None)


@dataclass
class Throughput:
    """Measure seconds and tokens of training since the last reading, without evaluation and checkpoints.

    Args:
        flops_per_token: forward and backward, by the model's formula; recomputation does not count.
        peak: FLOP/s of all devices together; None: no utilization.
        device: device whose memory is read; on a CPU that of the process.
    """

    flops_per_token: float
    peak: float | None
    device: torch.device
    seconds: float = 0.0
    waited: float = 0.0  # seconds of waiting for data
    tokens: int = 0

    def start(self) -> None:
        """Start or continue the measurement of training."""
        self._begin = time.perf_counter()

    def stop(self, tokens: int) -> None:
        """Pause after a step of `tokens` tokens, because other work follows."""
        self.seconds += time.perf_counter() - self._begin
        self.tokens += tokens

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the `with` block as waiting for data."""
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin

    def read(self) -> Record:
        """Return speed, utilization, fraction of time waiting for data, and memory since the last call."""
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
        """Return peak bytes: allocated on the GPU since the last call, or of this process so far."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
