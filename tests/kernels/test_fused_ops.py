"""The fused ops against PyTorch's own layers in fp64: outputs and gradients of both backends.

The Triton kernels are interpreted here and compiled where there is a GPU. The interpreter cuts float32 to
bfloat16 instead of rounding, hence the wider bounds of half precision.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.kernels import fused_ops
from fla_train.kernels.fused_ops import (
    IGNORE,
    add_rms_norm,
    consume_logits,
    recurrence_gates,
    rms_norm,
    rotary,
    short_convolution,
    swiglu_linear,
)
from fla_train.kernels.fused_ops.sum_rows import sum_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")
INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
EPS = 1e-6
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {FP32: 1e-6, FP16: 1e-3, BF16: 8e-3 if INTERPRETED else 4e-3}

Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One call: `shape` [..., D] of x, dtypes of x, of the weight and of the residual."""

    shape: tuple[int, ...]
    dtype: torch.dtype = FP32
    weight: torch.dtype = FP32
    residual: torch.dtype = FP32
    width: int = 4
    documents: tuple[int, ...] | None = None  # lengths
    state: bool = False


def random(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def results(function: Function, leaves: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of all leaves for the `gradients` of the outputs."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    outputs = tuple_of(function(*leaves))
    gradients = [g.to(y.dtype) for g, y in zip(gradients, outputs, strict=True)]
    found = torch.autograd.grad(outputs, leaves, gradients)
    assert all(g.dtype == x.dtype and g.shape == x.shape for g, x in zip(found, leaves, strict=True))
    return [*(y.detach() for y in outputs), *found]


def tuple_of(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def check(ours: Function, reference: Function, leaves: list[Tensor], bound: float) -> None:
    """`ours` within a relative RMS error of `reference` in fp64, and the same to the bit on a second run."""
    exact = [x.double() for x in leaves]
    gradients = [torch.randn_like(y).to(leaves[0].dtype) for y in tuple_of(reference(*exact))]
    expected = results(reference, exact, gradients)
    actual = results(ours, leaves, gradients)
    # Interpreted programs run one after the other, so a second pass can't differ.
    again = actual if INTERPRETED else results(ours, leaves, gradients)
    assert len(actual) == len(expected)
    for i, (a, b, e) in enumerate(zip(actual, again, expected, strict=True)):
        assert torch.equal(a, b), f"result {i} differs from run to run"
        error = (a.double() - e).norm() / e.norm().clamp_min(1e-9)
        # A few numbers may all be small differences of larger terms: 1.01e-6 was seen, of four.
        limit = bound if e.numel() >= 16 else max(bound, 1e-5)
        assert error <= limit, f"result {i}: relative error {error:.1e} > {limit:.1e}"


def bound_of(case: Case) -> float:
    return max(BOUNDS[case.dtype], BOUNDS[case.weight])


def check_convolution(case: Case, backend: str) -> None:
    *_, channels = case.shape
    positions = None
    if case.documents is not None:
        positions = torch.cat([torch.arange(n, device=DEVICE) for n in case.documents])
    leaves = [random(*case.shape, dtype=case.dtype), random(channels, 1, case.width, dtype=case.weight)]
    if case.state:
        leaves.append(random(case.shape[0], channels, case.width - 1, dtype=case.dtype))

    def ours(x: Tensor, weight: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return short_convolution(x, weight, state=state, position_in_document=positions, backend=backend)

    def reference(x: Tensor, weight: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if state is None:
            state = x.new_zeros(x.shape[0], channels, case.width - 1)
        pieces = x.transpose(1, 2).split([n for n in case.documents or (x.shape[1],) if n], dim=2)
        padded = [torch.cat([state, piece], dim=2) for piece in pieces]
        y = torch.cat([F.silu(F.conv1d(piece, weight, groups=channels)) for piece in padded], dim=2)
        whole = torch.cat([state, x.transpose(1, 2)], dim=2)
        return y.transpose(1, 2), whole[:, :, x.shape[1] :]

    check(ours, reference, leaves, bound_of(case))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_packed_rows_continue_from_states(backend: str, width: int):
    """Rows of documents against the documents one by one, each with its own inputs before it in one line.

    One row begins with a document shorter than the taps, one ends with such a document, one is a document.
    """
    rows, channels = [(1, 8), (6, 3), (7, 1, 1), (9,)], 5
    documents = [[random(channels, length) for length in lengths] for lengths in rows]
    state, weight = random(len(rows), channels, width - 1), random(channels, 1, width)
    x = torch.cat([document for row in documents for document in row], dim=1).t()[None]
    before = [(place == 0) * (width - 1) for lengths in rows for place in range(len(lengths))]
    sizes = [n for lengths in rows for n in lengths]
    positions = torch.cat([torch.arange(n, device=DEVICE) + b for n, b in zip(sizes, before, strict=True)])
    y, last = short_convolution(x, weight, state=state, position_in_document=positions, backend=backend)
    expected, ends = [], []
    for row, before in zip(documents, state, strict=True):
        for document in row:
            whole = torch.cat([before, document], dim=1)
            expected.append(F.silu(F.conv1d(whole[None], weight, groups=channels))[0])
            before = torch.zeros_like(before)
            end = whole if document is row[0] else torch.cat([before, document], dim=1)
        ends.append(end[:, end.shape[1] - (width - 1) :])
    torch.testing.assert_close(y[0].t(), torch.cat(expected, dim=1), rtol=1e-5, atol=1e-6)
    assert torch.equal(last, torch.stack(ends))


def check_norm(case: Case, backend: str, gated: bool) -> None:
    leaves = [random(*case.shape, dtype=case.dtype), random(case.shape[-1], dtype=case.weight)]
    if gated:
        leaves.append(random(*case.shape, dtype=case.dtype))

    def ours(x: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
        return rms_norm(x, weight, EPS, gate=gate, backend=backend)

    def reference(x: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
        y = F.rms_norm(x, weight.shape, weight, EPS)
        return y if gate is None else y * F.silu(gate)

    check(ours, reference, leaves, bound_of(case))


def check_add_norm(case: Case, backend: str) -> None:
    x, residual = random(*case.shape, dtype=case.dtype), random(*case.shape, dtype=case.residual)
    stream = torch.promote_types(case.dtype, case.residual)

    def reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, EPS), total

    ours = partial(add_rms_norm, eps=EPS, dtype=case.dtype, backend=backend)
    leaves = [x, residual, random(case.shape[-1], dtype=case.weight)]
    assert [y.dtype for y in ours(*leaves)] == [case.dtype, stream]
    check(ours, reference, leaves, max(bound_of(case), 1.5 * BOUNDS[stream]))


def check_swiglu(case: Case, backend: str) -> None:
    leaves = [random(*case.shape, dtype=case.dtype) for _ in range(2)]
    leaves.append(random(24, case.shape[-1], dtype=case.weight))
    ours = partial(swiglu_linear, backend=backend)
    check(ours, lambda gate, up, weight: F.linear(F.silu(gate) * up, weight), leaves, bound_of(case))


def check_gates(case: Case, backend: str, gated: bool) -> None:
    heads = 3
    leaves = [3 * random(*case.shape, heads * 2, dtype=case.dtype)]
    if gated:
        parameters = [random(heads, dtype=case.weight) for _ in range(2)]
        leaves += [(8 * random(*case.shape, heads) - 8).to(case.dtype), *parameters]

    def ours(b: Tensor, *forget: Tensor) -> tuple[Tensor, ...]:
        outputs = recurrence_gates(b, *(forget or (None,) * 3), beta_max=2.0, backend=backend)
        return outputs if gated else outputs[:1]

    def reference(b: Tensor, *forget: Tensor) -> tuple[Tensor, ...]:
        beta = 2 / (1 + torch.exp(-b))
        if not gated:
            return (beta,)
        a, A_log, dt_bias = forget
        return beta, -A_log.exp() * torch.log1p(torch.exp(a + dt_bias))

    check(ours, reference, leaves, bound_of(case))


def check_rotary(case: Case, backend: str) -> None:
    """`shape` is that of q; k has one head. Rotation is multiplication of complex numbers."""
    batch, length, _, size = case.shape
    leaves = [random(*case.shape, dtype=case.dtype), random(batch, length, 1, size, dtype=case.dtype)]
    angles = 10 * torch.randn(length, size // 2, device=DEVICE, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    ours = partial(rotary, cos=angles.cos().float(), sin=angles.sin().float(), backend=backend)

    def reference(*given: Tensor) -> tuple[Tensor, ...]:
        rotated = [torch.complex(*x.chunk(2, dim=-1)) * turn for x in given]
        return tuple(torch.cat([z.real, z.imag], dim=-1) for z in rotated)

    check(ours, reference, leaves, bound_of(case))


def check_cross_entropy(case: Case, backend: str) -> None:
    rows, vocabulary = case.shape
    logits = (3 * random(*case.shape)).to(case.dtype)
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    targets[1::3] = IGNORE
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, targets, ignore_index=IGNORE, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    for with_gradient in (False, True):
        found, slope = consume_logits(logits.clone(), targets, with_gradient=with_gradient, backend=backend)
        assert found.dtype == FP32
        torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-5, atol=1e-5)
    assert slope.dtype == case.dtype and not slope[targets == IGNORE].any()
    # At its target a row has p - 1: fp32's rounding of p remains however small the difference.
    rounding = 1e-6 * rows**0.5
    assert (slope.double() - gradient).norm() <= BOUNDS[case.dtype] * gradient.norm() + rounding


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks of time per call in one or two programs, which is faster in the interpreter."""
    from fla_train.kernels.fused_ops import short_conv

    monkeypatch.setattr(short_conv, "FORWARD", (8, 64, 128, 4))
    monkeypatch.setattr(short_conv, "BACKWARD", (8, 64, 128, 4))


CONVOLUTIONS = [
    *(Case((2, length, 20)) for length in (1, 2, 3, 63, 65)),
    *(Case((2, 17, 130), width=width, state=width > 1) for width in (1, 2, 3)),
    Case((2, 17, 20), width=2),
    Case((1, 1000, 9), documents=(1, 2, 3, 0, 63, 65, 0, 8, 858)),
    Case((3, 2, 5), state=True),
    Case((2, 65, 20), BF16, state=True),
    Case((1, 33, 20), FP16, weight=FP16, documents=(9, 24)),
]
NORMS = [Case((1, 1, 8)), Case((3, 7, 20)), Case((2, 65, 128)), Case((5, 2500)), Case((3, 33), BF16, BF16)]
SUMS = [Case((3, 7, 20)), Case((65, 100), BF16), Case((9, 3000), BF16, BF16, BF16), Case((63, 20), FP16)]
PRODUCTS = [Case((1, 1)), Case((3, 7, 333)), Case((65, 65), BF16), Case((2, 1000), FP16)]
LOGITS = [Case((1, 3)), Case((5, 31)), Case((4, 9001)), Case((3, 500), BF16), Case((2, 4096), FP16)]
SCALARS = [Case((1, 1)), Case((2, 65)), Case((1, 1000)), Case((3, 7), BF16), Case((3, 7), FP16, FP16)]
HEADS = [Case((1, 1, 1, 2)), Case((2, 65, 3, 20)), Case((2, 33, 4, 64), BF16), Case((1, 9, 8, 128), FP16)]
Check = Callable[[Case, str], None]
# By op: its check, cases for both, and those of a training step's sizes, for a GPU.
OPS: dict[str, tuple[Check, list[Case], list[Case]]] = {
    "convolution": (
        check_convolution,
        CONVOLUTIONS,
        [
            *(Case((8, 2048, channels), BF16) for channels in (1024, 2048)),
            Case((1, 1000, 1024), BF16, BF16, documents=(1, 2, 3, 0, 63, 65, 866)),
            *(Case((2, length, 96), BF16, width=w) for length in (31, 32, 33, 64, 127) for w in (2, 3)),
        ],
    ),
    "add_norm": (
        check_add_norm,
        SUMS,
        [*(Case((8, 2048, size), BF16) for size in (1024, 2048)), Case((65, 16384), BF16)],
    ),
    "rotary": (check_rotary, HEADS, [Case((8, 2048, 8, 128), BF16)]),
    "swiglu": (check_swiglu, PRODUCTS, [Case((8, 2048, 2816), BF16)]),
    "cross_entropy": (
        check_cross_entropy,
        LOGITS,
        [Case((100, vocabulary), BF16) for vocabulary in (32000, 50257, 151936)],
    ),
}
for gated in (False, True):
    norms = [Case((8, 2048, 8, 128), BF16), Case((2, 1000, 8, 96), BF16)]
    OPS[f"norm, gated={gated}"] = partial(check_norm, gated=gated), NORMS, norms
    OPS[f"gates, gated={gated}"] = partial(check_gates, gated=gated), SCALARS, [Case((8, 2048), BF16)]


@pytest.mark.skipif(not INTERPRETED, reason="the GPU tests cover these")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("op", "case"), [(op, case) for op, (_, cases, _) in OPS.items() for case in cases], ids=str
)
def test_interpreted(op: str, case: Case, backend: str, small_blocks: None) -> None:
    OPS[op][0](case, backend)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "case"), [(op, case) for op, (_, cases, more) in OPS.items() for case in cases + more], ids=str
)
def test_gpu(op: str, case: Case) -> None:
    assert fused_ops.resolve_backend("auto", torch.empty(1, device="cuda", dtype=case.dtype)) == "triton"
    OPS[op][0](case, "triton")


@pytest.mark.parametrize("rows", [0, 1, 600])
@pytest.mark.parametrize("shape", [(3,), (2, 8), (20, 1, 4)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sum_of_rows(rows: int, shape: tuple[int, ...], device: str) -> None:
    parts, total = torch.randn(rows, *shape, device=device), torch.empty(shape, device=device)
    sum_rows(parts, total)
    assert torch.allclose(total.double(), parts.double().sum(0), rtol=0, atol=1e-4)
