"""`precompile` for an H100 on any machine; prints as JSON each kernel (its name, whether Triton's
cache had it, whether the main thread compiled it), which were loaded where, and what failed.

In another process, with a driver that only says which GPU it stands for.
"""

import json
import threading

import torch
import triton
import triton.language as tl

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.precompile import precompile
from tests.kernels.other_process import PretendedDriver, pretend_driver


class LoadingDriver(PretendedDriver):
    """The part of a driver that loading asks, too. What is loaded is counted."""

    def __init__(self) -> None:
        super().__init__(90)
        self.utils = self
        self.loaded: list[tuple[str, bool]] = []  # name, whether by the main thread

    def launcher_cls(self, source: object, metadata: object) -> object:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, *_: object) -> tuple[object, object, int, int, int]:
        self.loaded.append((name, threading.current_thread() is threading.main_thread()))
        return self, self, 32, 0, 1024


@triton.jit
def double_kernel(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, 2 * tl.load(x + at))


@triton.jit
def halve_kernel(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at) / 2)


@triton.jit
def wrong_kernel(x, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 0)


@triton.autotune([triton.Config({"SIZE": 16}), triton.Config({"SIZE": 32})], key=[])
@triton.jit
def tuned_kernel(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), 1.0)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        y = torch.ones_like(x)
        for size in (16, 32, 16):  # twice the same
            run_kernel(double_kernel, (1,), x=x, y=y, SIZE=size)
        return y

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        dx = torch.ones_like(dy)
        halve_kernel[(1,)](dy, dx, 16)
        return dx


def main() -> None:
    gpu = LoadingDriver()
    pretend_driver(gpu)
    torch.cuda.set_device = lambda device: None
    compiled: list[tuple[str, bool, bool]] = []

    def listener(*, metadata: dict, cache_hit: bool, **_: object) -> None:
        compiled.append((metadata["name"], cache_hit, threading.current_thread() is threading.main_thread()))

    triton.knobs.compilation.listener = listener
    x = torch.zeros(32, requires_grad=True)
    results = []

    def work() -> None:
        wrong_kernel[(1,)](x, 16)
        y = Double.apply(x)
        results.append((y.sum().item(), torch.autograd.grad(y.sum(), x)[0].sum().item()))

    precompile(work, threads=2)
    first = sorted(compiled)
    precompile(work, threads=2)  # finds all of them
    try:
        wrong_kernel[(1,)](x, 16)
        failed = False
    except triton.CompilationError:
        failed = True
    try:  # on which a tuner would take times of launches that do not happen
        precompile(lambda: tuned_kernel[(1,)](x), threads=2)
        tuned = True
    except RuntimeError:
        tuned = bool(tuned_kernel.cache)
    print(
        json.dumps(
            {
                "compiled": first,
                "loaded": sorted(gpu.loaded),
                "again": len(compiled) - len(first),
                "failed": failed,
                "tuned": tuned,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
