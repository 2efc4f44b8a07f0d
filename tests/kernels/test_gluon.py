"""The Gluon gradient kernel: it compiles for Hopper anywhere, and is right on a Hopper GPU."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fla_train.kernels.delta_product.launches import forced, lookup
from tests.kernels.test_triton import BF16, BF16_HARD, BF16_LOOSE, check, real, uniform

# Run without TRITON_INTERPRET, which the session has set: compile for sm_90 and print the shared memory.
COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from fla_train.kernels.delta_product.gluon_gradient import WARPS, gradient_kernel

dim, steps, packed, gated = map(int, sys.argv[1:])
constants = {"H": 8, "K": dim, "V": dim, "N": steps, "C": 64 // steps, "num_warps": WARPS}
constants |= {"MIN_LOG_DECAY": -34.6, "GATED": bool(gated), "L2NORM": bool(gated), "PACKED": bool(packed)}
absent = set() if packed else {"cu_seqlens", "chunk_offsets", "chunk_segment"}
absent |= set() if gated else {"g", "gc", "dg", "rq", "rk"}
rows = dict.fromkeys(("q", "k", "do", "dv", "errors"), 64) | dict.fromkeys(("states", "dstates"), dim)
types = {"scale": "fp32", "dq": "*bf16", "dk": "*bf16"}
types |= dict.fromkeys(("n_total", "T", "NT", "n_work"), "i32")
types |= dict.fromkeys(("cu_seqlens", "chunk_offsets", "chunk_segment"), "*i64")
types |= dict.fromkeys(("beta", "g", "gc", "rq", "rk", "dbeta", "dg"), "*fp32")
layout = gl.NVMMASharedLayout(128, 16, 2)
types |= {name: f"tensordesc<bf16[{count}, {dim}],{layout!r}>" for name, count in rows.items()}
signature, constexprs = {}, {}
for i, name in enumerate(gradient_kernel.arg_names):
    if name in constants or name in absent:
        signature[name], constexprs[(i,)] = "constexpr", constants.get(name)
    else:
        signature[name] = types[name]
source = GluonASTSource(gradient_kernel, signature, constexprs, {})
compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
print(compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))
"""


@pytest.mark.parametrize(("dim", "steps", "packed", "gated"), [(128, 1, 0, 1), (64, 3, 1, 0)])
def test_compiles_for_hopper_anywhere(dim: int, steps: int, packed: int, gated: int) -> None:
    command = [sys.executable, "-c", COMPILE, *map(str, (dim, steps, packed, gated))]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shared, products = map(int, done.stdout.split())
    assert shared <= 227 * 1024, "more shared memory than a Hopper SM gives a program"
    # E dS', dV S and dO S over V; dV E^T and E dO^T over V; K Q^T and K K^T over K; four over 64 rows; by 16.
    assert products == (5 * dim + 2 * dim + 4 * 64) // 16


def check_with_gluon(case, bounds, monkeypatch) -> None:
    from fla_train.kernels.delta_product import gluon_gradient

    launched = []
    launch = gluon_gradient.launch_gradient
    monkeypatch.setattr(
        gluon_gradient, "launch_gradient", lambda *a, **b: (launched.append(1), launch(*a, **b))
    )
    device = torch.device("cuda")
    present = lookup(device, case.dtype, case.key_dim, case.value_dim, case.sub_steps)
    with forced(replace(present, gradient=present.gradient | {"gluon": 1})):
        check(case, bounds, "cuda")
    assert launched


hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sub_steps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dim", [64, 128])
def test_gpu(dim, sub_steps, gated, l2norm, monkeypatch) -> None:
    case = real(key_dim=dim, value_dim=dim, sub_steps=sub_steps, gated=gated, l2norm=l2norm)
    check_with_gluon(case, BF16 if gated else BF16_LOOSE, monkeypatch)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("sub_steps", [1, 3])
@pytest.mark.parametrize("tokens", [1, 63, 65, 1000])
def test_gpu_lengths(tokens, sub_steps, monkeypatch) -> None:
    check_with_gluon(real(tokens=tokens, sub_steps=sub_steps), BF16, monkeypatch)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("sub_steps", [1, 2, 3])
def test_gpu_packed(sub_steps, monkeypatch) -> None:
    bounds = (0, 0, 64, 65, 200, 200, 333, 333)
    check_with_gluon(real(batch=1, cu_seqlens=bounds, sub_steps=sub_steps), BF16, monkeypatch)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("inputs", ["correlated", "zero beta", "resets", "fast decay"])
def test_gpu_hard_inputs(inputs, monkeypatch) -> None:
    check_with_gluon(real(inputs=inputs, sub_steps=2), BF16_HARD, monkeypatch)


@hopper
@pytest.mark.gpu
def test_gpu_more_chunks_than_processors_and_fp16(monkeypatch) -> None:
    case = real(tokens=700, heads=16, dtype=torch.float16)
    check_with_gluon(case, uniform(2e-3), monkeypatch)
