"""The Gluon kernels: they compile for Hopper anywhere, and are right on a Hopper GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from fla_train.kernels.delta_product import gluon_reverse
from fla_train.kernels.delta_product.gluon_reverse import busy
from fla_train.kernels.delta_product.launches import IN_GLUON, forced, lookup
from tests.kernels.test_triton import BF16, BF16_HARD, BF16_LOOSE, check, real, uniform

# Run without TRITON_INTERPRET, which the session has set: compile for sm_90 and print the shared memory.
COMPILE = """
import sys
from importlib import import_module
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from fla_train.kernels.delta_product.gluon_common import TILE

# Packed: and both states given; gated: and normalised.
name, (dim, steps, packed, gated, heads) = sys.argv[1], map(int, sys.argv[2:])
module = import_module(f"fla_train.kernels.delta_product.gluon_{name}")
kernel = getattr(module, f"{name}_kernel")
constants = {"H": heads, "K": dim, "V": dim, "N": steps, "C": 64 // steps, "num_warps": module.WARPS}
constants |= {"MIN_LOG_DECAY": -34.6, "GATED": bool(gated), "L2NORM": bool(gated), "PACKED": bool(packed)}
constants |= {"HAS_FINAL": bool(packed), "STORE_INITIAL": bool(packed)}
absent = {"dfinal_state", "dinitial_state", "cu_seqlens", "chunk_offsets", "chunk_segment"}
absent = set() if packed else absent
absent |= set() if gated else {"g", "gc", "dg"}
absent |= set() if gated or name == "prepare" else {"rq", "rk"}
rows = dict.fromkeys(("q", "k", "do", "dv", "errors"), 64) | dict.fromkeys(("states", "dstates"), dim)
types = {"x": "*fp16"} | dict.fromkeys(("p", "dv", "dq", "dk"), "*bf16")
types |= dict.fromkeys(("scale", "eps"), "fp32")
types |= dict.fromkeys(("dfinal_state", "dinitial_state"), "*fp32")
types |= dict.fromkeys(("n_total", "T", "NT", "n_work"), "i32")
types |= dict.fromkeys(("cu_seqlens", "chunk_offsets", "chunk_segment"), "*i64")
types |= dict.fromkeys(("beta", "g", "gc", "rq", "rk", "dbeta", "dg"), "*fp32")
types |= dict.fromkeys(("read", "write", "query", "decay"), "*fp32")
described = {name: f"tensordesc<bf16[{count}, {dim}],{TILE.value!r}>" for name, count in rows.items()}
if name == "reverse":
    inverse = "fp16" if gated else "bf16"
    described |= {"x": f"tensordesc<{inverse}[64, 64],{TILE.value!r}>", "dv": types["dv"]}
    described |= {"p": f"tensordesc<bf16[64, 64],{TILE.value!r}>"}
types |= described
signature, constexprs = {}, {}
for i, name in enumerate(kernel.arg_names):
    if name in constants or name in absent:
        signature[name], constexprs[(i,)] = "constexpr", constants.get(name)
    else:
        signature[name] = types[name]
source = GluonASTSource(kernel, signature, constexprs, {})
compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": module.WARPS})
print(compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"), compiled.asm["ptx"])
"""


def compiled(
    name: str, dim: int, steps: int, packed: int, gated: int, heads: int = 8
) -> tuple[int, int, str]:
    """Bytes of shared memory, matrix instructions and PTX of a kernel compiled in a process of its own."""
    command = [sys.executable, "-c", COMPILE, name, *map(str, (dim, steps, packed, gated, heads))]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shared, products, ptx = done.stdout.split(" ", 2)
    return int(shared), int(products), ptx


@pytest.mark.parametrize(("dim", "steps", "packed", "gated"), [(128, 1, 0, 1), (64, 3, 1, 0)])
def test_gradient_compiles_for_hopper_anywhere(dim: int, steps: int, packed: int, gated: int) -> None:
    shared, products, _ = compiled("gradient", dim, steps, packed, gated)
    assert shared <= 227 * 1024, "more shared memory than a Hopper SM gives a program"
    # E dS', dV S and dO S over V; dV E^T and E dO^T over V; K Q^T and K K^T over K; four over 64 rows; by 16.
    assert products == (5 * dim + 2 * dim + 4 * 64) // 16


@pytest.mark.parametrize(("dim", "steps", "packed", "gated"), [(128, 1, 0, 1), (64, 3, 1, 0)])
def test_prepare_compiles_for_hopper_anywhere(dim: int, steps: int, packed: int, gated: int) -> None:
    shared, products, _ = compiled("prepare", dim, steps, packed, gated)
    assert shared <= 227 * 1024 // 5, "five programs share an SM"
    # K K^T, Q Q^T and Q K^T over K; X L X on five levels, three in the Newton step, over 64 rows; by 16.
    assert products == (3 * dim + (5 * 2 + 3) * 64) // 16


@pytest.mark.parametrize(("dim", "steps", "packed", "gated"), [(128, 1, 0, 1), (64, 3, 1, 0)])
def test_whole_backward_compiles_for_hopper_anywhere(dim: int, steps: int, packed: int, gated: int) -> None:
    shared, products, _ = compiled("reverse", dim, steps, packed, gated)
    assert shared <= 227 * 1024, "more shared memory than a Hopper SM gives a program"
    # dS' K^T, E dS', dV S, dO S, E dO^T, K Q^T, dV E^T, K K^T over K or V; dE X, dV K and four over 64 rows;
    # dO P and dO Q over a chunk's tokens, rounded up; by 16.
    assert products == (8 * dim + 6 * 64 + 2 * (64 if steps == 1 else 32)) // 16


@pytest.mark.parametrize(
    ("programs", "share"), [(132, 1.0), (256, 256 / 264), (128, 128 / 132), (133, 133 / 264), (1, 1 / 132)]
)
def test_share_of_the_processors_that_work(programs: int, share: float) -> None:
    assert busy(programs, 132) == pytest.approx(share)


WHOLE, PARTS = ("prepare", "reverse"), ("prepare", "gradient")


def check_with_gluon(case, bounds, monkeypatch, kernels=PARTS) -> None:
    launched = []
    monkeypatch.setattr(gluon_reverse, "LEAST_BUSY", 0.0 if "reverse" in kernels else 2.0)
    for name in {*WHOLE, *PARTS}:
        module = import_module(f"fla_train.kernels.delta_product.gluon_{name}")

        def launch(*args, name=name, run=module.launch, **kwargs) -> None:
            launched.append(name)
            run(*args, **kwargs)

        monkeypatch.setattr(module, "launch", launch)
    device = torch.device("cuda")
    present = lookup(device, case.dtype, case.key_dim, case.value_dim, case.sub_steps)
    options = {name: getattr(present, name) | {"gluon": 1} for name in IN_GLUON}
    with forced(replace(present, **options)):
        check(case, bounds, "cuda")
    assert set(launched) == set(kernels if case.l2norm else kernels[1:])


hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, WHOLE], ids=["parts", "whole"])
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sub_steps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dim", [64, 128])
def test_gpu(dim, sub_steps, gated, l2norm, kernels, monkeypatch) -> None:
    case = real(key_dim=dim, value_dim=dim, sub_steps=sub_steps, gated=gated, l2norm=l2norm)
    check_with_gluon(case, BF16 if gated else BF16_LOOSE, monkeypatch, kernels)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, WHOLE], ids=["parts", "whole"])
@pytest.mark.parametrize("sub_steps", [1, 3])
@pytest.mark.parametrize("tokens", [1, 63, 65, 1000])
def test_gpu_lengths(tokens, sub_steps, kernels, monkeypatch) -> None:
    check_with_gluon(real(tokens=tokens, sub_steps=sub_steps), BF16, monkeypatch, kernels)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, WHOLE], ids=["parts", "whole"])
@pytest.mark.parametrize("sub_steps", [1, 2, 3])
def test_gpu_packed(sub_steps, kernels, monkeypatch) -> None:
    bounds = (0, 0, 64, 65, 200, 200, 333, 333)
    check_with_gluon(real(batch=1, cu_seqlens=bounds, sub_steps=sub_steps), BF16, monkeypatch, kernels)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, WHOLE], ids=["parts", "whole"])
@pytest.mark.parametrize("inputs", ["correlated", "zero beta", "resets", "fast decay"])
def test_gpu_hard_inputs(inputs, kernels, monkeypatch) -> None:
    check_with_gluon(real(inputs=inputs, sub_steps=2), BF16_HARD, monkeypatch, kernels)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, WHOLE], ids=["parts", "whole"])
def test_gpu_more_chunks_than_processors_and_fp16(kernels, monkeypatch) -> None:
    case = real(tokens=700, heads=16, dtype=torch.float16)
    check_with_gluon(case, uniform(2e-3), monkeypatch, kernels)
