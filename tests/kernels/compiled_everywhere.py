"""Every Triton kernel, compiled for a GPU that is not there: registers, spills and shared memory as a table.

    python -m tests.kernels.compiled_everywhere 8.0                          # or 9.0, 10.0; minutes
    python -m tests.kernels.compiled_everywhere 8.0 --cases "K 128|decoding" # a regular expression

The operator and the fused ops run as on that GPU, with the launch options that it would get, on the CPU's
memory; a launch only compiles. In another process: what is asked of the device is replaced.
"""

import argparse
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from tests.kernels.other_process import PretendedDriver, pretend_driver, resources, run_module

PROCESSORS = {"8.0": 108, "9.0": 132, "10.0": 148}  # of an A100, H100 and B200
SHARED = {"8.0": 163 << 10, "9.0": 227 << 10, "10.0": 227 << 10}  # bytes that a program may have
TENSOR = 512  # columns of tensor memory of a B200; the others have none
TOKENS = 128


@dataclass(frozen=True)
class Kernel:
    """One compiled variant."""

    case: str
    module: str  # in fla_train.kernels
    name: str
    warps: int
    stages: int
    registers: int  # of a thread
    stack: int  # bytes a thread, of registers that were spilled
    shared: int  # bytes a program
    tensor: int  # columns of tensor memory a program


def compile_everywhere(architecture: str) -> list[Kernel]:
    """All variants for a compute capability, from another process; raises what a kernel's compiler says."""
    return [Kernel(**row) for row in run_module("compiled_everywhere", architecture, "--json")]


def pretend(architecture: str) -> None:
    """From here on this process's CPU is a GPU of that compute capability, on which nothing is launched."""
    from fla_train.kernels import sizes

    major, minor = map(int, architecture.split("."))
    pretend_driver(PretendedDriver(10 * major + minor))
    # Before the modules are imported that take the name from there.
    sizes.processors = lambda device: PROCESSORS[architecture]
    from fla_train.kernels.delta_product import interface, select
    from fla_train.kernels.fused_ops import token_step

    ops = ("cross_entropy", "float8", "gates", "rms_norm", "rotary", "selective_scan", "short_conv", "swiglu")
    for name in (*(f"kernels.fused_ops.{op}" for op in ops), "models.loss"):
        module = import_module(f"fla_train.{name}")
        module.resolve_backend = lambda name, x, limit=None: os.environ.get("FLA_TRAIN_FUSED_OPS", "triton")
    select.architecture = lambda device: architecture
    select._device = lambda device: (PROCESSORS[architecture], major == 9)
    interface.resolve_backend = lambda name, device: "triton"
    # What no kernel has written is the largest integer: it must not be used as an index (`precompile`).
    torch.use_deterministic_algorithms(True, warn_only=True)
    token_step.overlaps = lambda x: major >= 9


def operator_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """The operator forward and backward by head dimensions, n_h and gate; packed, split and in float32."""
    for size, steps in ((128, 1), (128, 2), (64, 1), (64, 2), (256, 1), (256, 2)):
        yield f"K {size}, n_h {steps}", partial(operator, size, steps)
    yield "K 128, n_h 1, two heads of v a key", partial(operator, 128, 1, group=2)
    yield "K 128, n_h 1, no gate", partial(operator, 128, 1, gated=False)
    yield "K 128, n_h 1, packed", partial(operator, 128, 1, documents=[0, 40, TOKENS])
    yield "K 128, n_h 1, split", partial(operator, 128, 1, segment_chunks=1)
    yield "K 128, n_h 1, split with states", partial(operator, 128, 1, segment_chunks=1, states=True)
    yield "K 128, n_h 1, states", partial(operator, 128, 1, states=True)
    for key, value in ((64, 128), (96, 192), (128, 256)):
        yield f"K {key}, V {value}, n_h 1", partial(operator, key, 1, value_size=value)
    yield "K 256, n_h 1, split", partial(operator, 256, 1, segment_chunks=1)
    for size in (64, 128):
        yield f"K {size}, n_h 1, fp32", partial(operator, size, 1, dtype=torch.float32)
    yield "K 128, n_h 1, fp32, split", partial(operator, 128, 1, dtype=torch.float32, segment_chunks=1)
    yield "K 16, n_h 1, fp32", partial(operator, 16, 1, dtype=torch.float32)


def operator(
    size: int,
    steps: int,
    *,
    gated: bool = True,
    group: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    documents: list[int] | None = None,
    segment_chunks: int | None = None,
    value_size: int | None = None,
    states: bool = False,
) -> None:
    from fla_train.kernels.delta_product import delta_product
    from fla_train.kernels.delta_product.select import override

    heads = 3 * max(PROCESSORS.values()) if segment_chunks is None else 1  # a busy device, or an idle one
    keys = heads // group
    q, k, v = (
        torch.zeros(1, TOKENS, *shape, dtype=dtype, requires_grad=True)
        for shape in ((keys, size), (steps, keys, size), (steps, heads, value_size or size))
    )
    beta = torch.zeros(1, TOKENS, steps, heads, requires_grad=True)
    g = torch.zeros(1, TOKENS, heads, requires_grad=True) if gated else None
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    state = torch.zeros(1, heads, size, value_size or size, requires_grad=True) if states else None
    leaves = [x for x in (q, k, v, beta, g, state) if x is not None]
    with override(segment_chunks=segment_chunks):
        found = delta_product(
            *(q, k, v, beta, g),
            initial_state=state,
            output_final_state=states,
            qk_l2norm=True,
            cu_seqlens=cu_seqlens,
        )
        outputs = [y for y in found if y is not None]
        torch.autograd.grad(outputs, leaves, outputs)


def fused_cases(architecture: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """The fused ops of a training step forward and backward, and those of a decoding step."""
    from fla_train.bench.fused_op_cases import FUNCTIONS, Sizes, make_cases

    sizes = Sizes(1, TOKENS, 1024, 128, 2816, 32000, 2)
    for case in make_cases(list(FUNCTIONS), sizes, torch.bfloat16, torch.device("cpu")):

        def both(case=case) -> None:
            gradients = list(case.output_gradients.values())
            torch.autograd.grad(case.run("triton"), list(case.leaves.values()), gradients)

        yield case.name, both
    yield "columns of projections", columns
    yield "decoding", decoding
    if architecture != "8.0":  # whose matrix units take no float8
        yield "float8", float8


def columns() -> None:
    """What a training step calls on columns of a product's output."""
    from fla_train.kernels.fused_ops import recurrence_gates, rms_norm, short_convolution, swiglu_linear

    def parts(*sizes: int) -> list[torch.Tensor]:
        wide = torch.zeros(1, TOKENS, sum(sizes), dtype=torch.bfloat16, requires_grad=True)
        return list(wide.split(sizes, -1))

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, requires_grad=True)

    q, b, a, gate = parts(256, 4, 2, 58 + 256)
    y, _ = short_convolution(q, ones(256, 1, 4))
    beta, g = recurrence_gates(b, a, ones(2), ones(2), beta_max=2.0)
    o = rms_norm(y.unflatten(-1, (2, 128)), ones(128), 1e-6, gate=gate[..., 58:])
    z = swiglu_linear(*parts(256, 256), ones(256, 256))
    sum(x.sum() for x in (beta, g, o, z)).backward()


def float8() -> None:
    from fla_train.kernels.fused_ops.float8 import (
        E4M3,
        E5M2,
        cast_float8,
        cast_swiglu,
        cast_swiglu_backward,
        norm_scale,
        transpose_float8,
    )
    from fla_train.kernels.fused_ops.rms_norm import cast_rms_norm

    x = torch.zeros(TOKENS, 256, dtype=torch.bfloat16)
    for dtype in (E4M3, E5M2):
        cast_float8([x], dtype)
    transpose_float8(cast_float8([x.float()], E4M3).data)
    cast_swiglu_backward(x, x[:, :128].contiguous(), cast_swiglu(x).inverse)
    weight = torch.ones(256, requires_grad=True)
    scaled, _ = norm_scale(weight.detach())
    for residual in (None, x.float()):
        y, *_ = cast_rms_norm(x, residual, weight, scaled, 1e-6, dtype=torch.bfloat16, narrow=E4M3)
        y.sum().backward()


def decoding() -> None:
    from fla_train.kernels.delta_product.triton.fused_recurrent import triton_step
    from fla_train.kernels.fused_ops import flash_decoding, token_step

    bf16 = partial(torch.zeros, dtype=torch.bfloat16)
    x, weight, norm = bf16(1, 1, 1024), bf16(512, 1024), torch.zeros(1024)
    token_step.linear_step(x, weight, residual=x, norm=norm, eps=1e-6)
    token_step.linear_step(x.expand(2, -1, -1).contiguous(), weight, weight, norm=norm, eps=1e-6)
    token_step.linear_step(x, weight, weight, swiglu=True)
    state = torch.zeros(1, 2, 128, 128)
    columns = {"q": 0, "k": 256, "v": 512, "b": 768, "a": 770, "g": 772}
    token_step.mixer_step(
        *(bf16(1, 1, 1028), columns, [bf16(256, 1, 4)] * 3, [bf16(1, 256, 3)] * 3),
        *(torch.zeros(2), torch.zeros(2), torch.zeros(128), state),
        num_householder=1,
        beta_max=2.0,
        eps=1e-6,
    )
    flash_decoding.attention_step(
        bf16(1, 2, 1, 64), bf16(1, 2, 64, 64), bf16(1, 2, 64, 64), torch.ones(1, 1, 1, 64, dtype=torch.bool)
    )
    step = (bf16(1, 2, 128), bf16(1, 1, 2, 128), bf16(1, 1, 2, 128), torch.zeros(1, 1, 2), torch.zeros(1, 2))
    triton_step(*step, state=state, scale=1.0, qk_l2norm=True)


def compile_all(architecture: str, pattern: str) -> Iterator[Kernel]:
    import triton

    pretend(architecture)
    from fla_train.kernels.precompile import _without_launches

    found: list[tuple[str, dict, Path]] = []

    def listener(*, src: object, metadata: dict, metadata_group: dict, **_: object) -> None:
        (cubin,) = (Path(path) for name, path in metadata_group.items() if name.endswith(".cubin"))
        found.append((src.fn.__module__.removeprefix("fla_train.kernels."), metadata, cubin))

    triton.knobs.compilation.listener = listener
    seen: set[Path] = set()
    for case, run in itertools.chain(operator_cases(), fused_cases(architecture)):
        if not re.search(pattern, case):
            continue
        found.clear()
        with _without_launches():
            run()
        for module, metadata, cubin in found:
            if cubin not in seen:
                seen.add(cubin)
                yield Kernel(
                    case,
                    module,
                    metadata["name"],
                    metadata["num_warps"],
                    metadata["num_stages"],
                    *resources(cubin),
                    metadata["shared"],
                    metadata["tmem_size"] or 0,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("architecture", choices=sorted(PROCESSORS))
    parser.add_argument("--cases", default="", help="a regular expression")
    parser.add_argument("--json", action="store_true")
    request = parser.parse_args()
    kernels = compile_all(request.architecture, request.cases)
    if request.json:
        print(json.dumps([asdict(kernel) for kernel in kernels]))
        return
    print("| case | module | kernel | warps | stages | registers | stack | shared KB |")
    print("|---|---|---|---|---|---|---|---|")
    for k in kernels:
        row = (k.case, k.module, k.name, k.warps, k.stages, k.registers, k.stack, f"{k.shared / 1024:.1f}")
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
