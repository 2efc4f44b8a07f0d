"""Gluon kernels, and `chunk_prepare_wy_kernel` in Triton, compiled for Hopper on any machine.

One other process compiles all of them: Triton decides at its import whether it interprets kernels.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
# Coverage would double its time.
LEFT_OUT = ("TRITON_INTERPRET", "COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")


@dataclass(frozen=True)
class Variant:
    """One kernel and its constants; with states given where it is packed, normalised where it is gated."""

    name: str  # prepare_wy, bwd_qkg, bwd_qkg_wide or bwd_fused
    dim: int  # of keys, and of values
    num_householder: int
    packed: bool
    gated: bool
    heads: int = 1
    value_dim: int | None = None  # where it is another
    group: int = 1  # of heads that share q and k
    launch: int | None = None  # of `bwd_fused`, where there are two
    gluon: bool = True  # False, of `prepare_wy` alone: the one in Triton

    @property
    def module(self) -> ModuleType:
        name = f"hopper.{self.name}" if self.gluon else "triton.chunk_fwd"
        return import_module(f"fla_train.kernels.delta_product.{name}")


@dataclass(frozen=True)
class Compiled:
    shared: int  # bytes of shared memory
    stack: int  # bytes a thread, of registers that were spilled
    ptx: str


def compile_for_hopper(variants: Iterable[Variant]) -> dict[Variant, Compiled]:
    variants = list(dict.fromkeys(variants))
    environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    command = [sys.executable, "-m", "tests.kernels.compiled_gluon"]
    given = json.dumps([asdict(variant) for variant in variants])
    done = subprocess.run(command, input=given, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    return {variant: Compiled(**row) for variant, row in zip(variants, found, strict=True)}


def _compile(variant: Variant) -> Compiled:
    """Compile a variant in the other process."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(variant.module, f"chunk_{variant.name}_kernel")
    warps = variant.module.WARPS if variant.gluon else 4
    constants, types = _constants(variant) | {"num_warps": warps}, _types(variant)
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    values = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    # Loads, stores and reductions are as wide as pointers are aligned.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    if variant.gluon:
        source = GluonASTSource(kernel, signature, values, aligned)
    else:
        source = ASTSource(kernel, signature, values, aligned)
    found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Compiled(found.metadata.shared, int(re.search(r"STACK:(\d+)", usage)[1]), found.asm["ptx"])


def _constants(variant: Variant) -> dict[str, object]:
    """Return constants of any kernel; None for an absent tensor."""
    packed, gated, values = variant.packed, variant.gated, variant.value_dim or variant.dim
    absent = (
        () if packed else ("dfinal_state", "dinitial_state", "cu_seqlens", "chunk_offsets", "chunk_sequence")
    )
    absent += () if gated else ("g", "g_cum", "dg")
    absent += () if gated or variant.name == "prepare_wy" else ("q_rnorm", "k_rnorm")
    constants = dict.fromkeys(absent) | {
        **{"H": variant.heads, "G": variant.group, "K": variant.dim, "V": values},
        **{name: value for name, value in _given(variant).items() if name.isupper()},
        **{"N": variant.num_householder, "C": 64 // variant.num_householder},
        **{"GATED": gated, "L2NORM": gated, "PACKED": packed},
    }
    return constants if variant.gluon else constants | _triton_constants(variant)


def _given(variant: Variant) -> dict[str, object]:
    """Tensors of one row of 64 tokens; of `bwd_fused` as one launch gets them, with its constants."""
    import torch

    heads, keys, values = variant.heads, variant.dim, variant.value_dim or variant.dim
    shapes = {
        **dict.fromkeys(("q", "k"), (64, heads // variant.group, keys)),
        **dict.fromkeys(("do", "u", "dv"), (64, heads, values)),
        **dict.fromkeys(("wy", "p"), (64, heads, 64)),
        **dict.fromkeys(("states", "dstates"), (heads, values, keys)),
    }
    tensors = {name: torch.empty(1, *shape, device="meta") for name, shape in shapes.items()}
    if variant.name != "bwd_fused":
        return tensors
    from fla_train.kernels.delta_product.hopper import bwd_fused

    absent = dict.fromkeys(("dfinal_state", "dinitial_state"))
    launches = 1 if variant.launch is None else 2
    return list(bwd_fused.parts(tensors | absent, launches))[variant.launch or 0]


def _triton_constants(variant: Variant) -> dict[str, object]:
    """Return the constants that `Call.of` derives from the sizes, for normalised keys in bf16."""
    import triton.language as tl

    tokens = max(32, 1 << (64 // variant.num_householder - 1).bit_length())
    return {
        **{"M": 64, "BC": tokens, "BK": max(64, 1 << (variant.dim - 1).bit_length())},
        **{"OPERAND": tl.bfloat16, "PRECISION": "tf32x3", "INVERSE": tl.float16},
    }


def _types(variant: Variant) -> dict[str, str]:
    """Return the types of any kernel's other arguments."""
    from fla_train.kernels.delta_product.hopper.common import with_tma_descriptors

    given = _given(variant)
    rows = [name for name in given if name in ("q", "k", "do", "u", "dv", "wy", "p")]
    slices = getattr(variant.module, "SLICES", {})
    matrices = with_tma_descriptors(given, rows, ("states", "dstates"), slices)
    half = "fp16" if variant.gated else "bf16"

    def described(*names: str, dtype: str = "bf16") -> dict[str, str]:
        tiles = {name: (matrices[name].block_shape, matrices[name].layout) for name in names}
        return {name: f"tensordesc<{dtype}{block},{layout!r}>" for name, (block, layout) in tiles.items()}

    types = {
        **dict.fromkeys(("dv", "dq", "dk"), "*bf16"),
        **dict.fromkeys(("scale", "eps"), "fp32"),
        **dict.fromkeys(("beta", "g", "g_cum", "q_rnorm", "k_rnorm", "dbeta", "dg"), "*fp32"),
        **dict.fromkeys(("read", "write", "query", "decay", "peak"), "*fp32"),
        **dict.fromkeys(("dfinal_state", "dinitial_state"), "*fp32"),
        **dict.fromkeys(("n_total", "T", "NT", "n_work"), "i32"),
        **dict.fromkeys(("cu_seqlens", "chunk_offsets", "chunk_sequence"), "*i64"),
        **described("q", "k", "do", "u", "states", "dstates"),
        **dict.fromkeys(("wy", "p"), "*fp16"),
    }
    if not variant.gluon:
        types |= {"q": "*bf16", "k": "*bf16"}
    if variant.name in ("bwd_qkg", "bwd_qkg_wide"):
        types |= described("dv")
    if variant.name == "bwd_fused":
        types |= described("wy", "p", dtype=half)
    return types


if __name__ == "__main__":
    print(json.dumps([asdict(_compile(Variant(**given))) for given in json.load(sys.stdin)]))
