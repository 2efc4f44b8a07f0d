"""Benchmark cases of the fused ops: inputs like those of a training step, and the bytes that they must move.

Activations have the dtype that is asked for, weights are fp32, and the residual stream is fp32 or has the
activations' dtype.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from fla_train.bench.roofline import Ceilings
from fla_train.kernels.fused_ops import (
    add_rms_norm,
    recurrence_gates,
    rms_norm,
    rotary,
    selective_scan,
    short_convolution,
    swiglu_linear,
)
from fla_train.kernels.fused_ops.backend import BACKEND_VARIABLE
from fla_train.models.loss import linear_cross_entropy

EPS = 1e-6  # of the norms
TAPS = 4  # of the convolution
STATE = 16  # numbers of a channel's state in the selective scan
SCAN_ROWS = 4  # of the batch, at most: the definition has the states of all tokens in memory
DOCUMENTS = 4  # in a sequence's length, where documents are packed
BETA_MAX = 2.0


@dataclass(frozen=True)
class Case:
    """One fused op on one shape: a function of named tensors that returns its outputs."""

    function: str
    name: str  # as the table has it
    definition: Callable[..., tuple[Tensor, ...]]  # of the leaves and the fixed tensors, by name
    leaves: dict[str, Tensor]  # get gradients
    fixed: dict[str, Tensor] = field(default_factory=dict)
    output_gradients: dict[str, Tensor] = field(default_factory=dict)  # in the order of the outputs
    kept: tuple[str, ...] | None = None  # inputs and outputs that a backward pass must read; None: all inputs
    flops: float = 0.0  # of the forward pass's matrix products; a backward pass takes twice as many
    graph: bool = True  # short enough for the time of launches to count

    def run(self, backend: str = "auto") -> tuple[Tensor, ...]:
        """The outputs, by one of this project's backends."""
        with using(backend):
            return self.definition(**self.leaves, **self.fixed)

    def detached(self) -> "Case":
        """The same where nothing gets a gradient."""
        return replace(self, leaves={name: x.detach() for name, x in self.leaves.items()})

    def exact(self) -> "Case":
        """The same in fp64, with tensors of its own."""
        leaves = {name: x.detach().double().requires_grad_() for name, x in self.leaves.items()}
        gradients = {name: x.double() for name, x in self.output_gradients.items()}
        return replace(self, leaves=leaves, output_gradients=gradients)

    @property
    def forward_bytes(self) -> int:
        """Least traffic of a forward pass: inputs read, outputs written."""
        return _size(self.leaves | self.fixed | self.output_gradients)

    @property
    def backward_bytes(self) -> int:
        """Least traffic of a backward pass: its inputs and the outputs' gradients read, others written."""
        tensors = self.leaves | self.fixed
        if self.kept is not None:
            tensors |= self.output_gradients  # of the size of the outputs
            tensors = {name: tensors[name] for name in self.kept}
        return _size(tensors) + _size(self.output_gradients) + _size(self.leaves)

    def bounds(self, ceilings: Ceilings) -> tuple[float, float]:
        """Least seconds of a forward pass, and of forward and backward."""
        forward = ceilings.seconds(self.flops, self.forward_bytes)
        return forward, forward + ceilings.seconds(2 * self.flops, self.backward_bytes)


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(x.nbytes for x in tensors.values())


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Let `auto` be this backend: the loss has no argument for it."""
    before = os.environ.get(BACKEND_VARIABLE)
    os.environ[BACKEND_VARIABLE] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ[BACKEND_VARIABLE]
        else:
            os.environ[BACKEND_VARIABLE] = before


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layers that the fused ops belong to."""

    batch: int
    tokens: int
    hidden: int
    head_dim: int  # divides `hidden`
    intermediate: int  # channels of the MLP
    vocabulary: int
    num_householder: int  # n_h

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim


class Source:
    """Draws tensors, the same ones on every run."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device):
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device)
        return (scale * x).to(dtype)

    def activations(self, *channels: int, dtype: torch.dtype | None = None) -> Tensor:
        """[batch, tokens, *channels], in the activations' dtype unless `dtype` is given."""
        return self.normal(self.sizes.batch, self.sizes.tokens, *channels, dtype=dtype or self.dtype)

    def projection(self, outputs: int, inputs: int) -> Tensor:
        """A weight in fp32 whose product has the variance of its input."""
        return self.normal(outputs, inputs, scale=inputs**-0.5)

    def streams(self) -> dict[str, torch.dtype]:
        """The dtypes of a residual stream by name."""
        return {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, self.dtype)}

    def case(self, case: Case, outputs: Sequence[str]) -> Case:
        """`case` with leaves that ask for gradients and random gradients of its outputs."""
        with torch.no_grad():
            found = case.run("torch")
        for leaf in case.leaves.values():
            leaf.requires_grad_()
        gradients = {
            name: self.normal(*y.shape, dtype=y.dtype) for name, y in zip(outputs, found, strict=True)
        }
        return replace(case, output_gradients=gradients)


def make_cases(
    functions: Sequence[str], sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    """The cases of these functions, names in `FUNCTIONS`; one at a time, since they are large."""
    for function in functions:
        yield from FUNCTIONS[function](Source(sizes, dtype, device))


def _convolution(source: Source) -> Iterator[Case]:
    def run(x: Tensor, weight: Tensor, offsets: Tensor | None = None) -> tuple[Tensor]:
        return (short_convolution(x, weight, position_in_document=offsets)[0],)

    for channels in (source.sizes.hidden, 2 * source.sizes.hidden):
        leaves = {"x": source.activations(channels), "weight": source.normal(channels, 1, TAPS)}
        name = f"convolution + SiLU, {channels} channels"
        yield source.case(Case("convolution", name, run, leaves), ["y"])
    packed = {"x": source.activations(channels).reshape(1, -1, channels), "weight": leaves["weight"]}
    fixed = {"offsets": _offsets(source)}
    yield source.case(Case("convolution", f"{name}, packed documents", run, packed, fixed), ["y"])


def _offsets(source: Source) -> Tensor:
    """Of each token from the start of its document, [T]; documents end anywhere."""
    length = source.sizes.batch * source.sizes.tokens
    drawn = torch.rand(length, generator=source.generator, device=source.device)
    positions = torch.arange(length, device=source.device)
    starts = torch.where(drawn * source.sizes.tokens < DOCUMENTS, positions, 0)
    return positions - starts.cummax(0).values


def _norm(source: Source) -> Iterator[Case]:
    def run(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (rms_norm(x, weight, EPS, dtype=_output(x, source)),)

    size = source.sizes.hidden
    for name, stream in source.streams().items():
        leaves = {"x": source.activations(size, dtype=stream), "weight": source.normal(size)}
        yield source.case(Case("norm", f"RMSNorm, {name} stream, {size}", run, leaves), ["y"])


def _residual_norm(source: Source) -> Iterator[Case]:
    def run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, EPS, dtype=_output(x, source))

    size = source.sizes.hidden
    for name, stream in source.streams().items():
        leaves = {"x": source.activations(size), "residual": source.activations(size, dtype=stream)}
        leaves["weight"] = source.normal(size)
        name = f"RMSNorm with residual, {name} stream, {size}"
        case = Case("residual-norm", name, run, leaves, kept=("sum", "weight"))
        yield source.case(case, ["y", "sum"])


def _output(x: Tensor, source: Source) -> torch.dtype:
    """Of a norm: what the matmul after it takes; of the definition in fp64 that."""
    return x.dtype if x.dtype == torch.float64 else source.dtype


def _gated_norm(source: Source) -> Iterator[Case]:
    def run(x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (rms_norm(x, weight, EPS, gate=gate),)

    heads, size = source.sizes.heads, source.sizes.head_dim
    leaves = {name: source.activations(heads, size) for name in ("x", "gate")}
    leaves["weight"] = source.normal(size)
    yield source.case(Case("gated-norm", f"RMSNorm with gate, {heads} x {size}", run, leaves), ["y"])


def _swiglu(source: Source) -> Iterator[Case]:
    def run(gate: Tensor, up: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (swiglu_linear(gate, up, weight),)

    size, outputs = source.sizes.intermediate, source.sizes.hidden
    leaves = {name: source.activations(size) for name in ("gate", "up")}
    leaves["weight"] = source.projection(outputs, size)
    flops = 2.0 * source.sizes.batch * source.sizes.tokens * size * outputs
    name = f"SwiGLU and its product, {size} to {outputs}"
    yield source.case(Case("swiglu", name, run, leaves, flops=flops), ["y"])


def _gates(source: Source) -> Iterator[Case]:
    def run(b: Tensor, a: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence_gates(b, a, A_log, dt_bias, beta_max=BETA_MAX)

    heads, steps = source.sizes.heads, source.sizes.num_householder
    leaves = {"b": source.activations(steps * heads), "a": source.activations(heads)}
    leaves |= {name: source.normal(heads) for name in ("A_log", "dt_bias")}
    yield source.case(Case("gates", f"gates, {heads} heads, n_h = {steps}", run, leaves), ["beta", "g"])


def _rotary(source: Source) -> Iterator[Case]:
    heads, size = source.sizes.heads, source.sizes.head_dim
    leaves = {name: source.activations(heads, size) for name in ("q", "k")}
    angles = source.normal(source.sizes.tokens, size // 2)
    fixed = {"cos": angles.cos(), "sin": angles.sin()}
    case = Case("rotary", f"rotary, {heads} x {size}", rotary, leaves, fixed, kept=("cos", "sin"))
    yield source.case(case, ["rotated q", "rotated k"])


def _selective_scan(source: Source) -> Iterator[Case]:
    def run(u: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, signed: bool) -> tuple[Tensor]:
        return (selective_scan(u, dt, rate, b, c, signed=signed),)

    rows, tokens = min(source.sizes.batch, SCAN_ROWS), source.sizes.tokens
    channels = 2 * source.sizes.hidden
    leaves = {
        name: source.normal(rows, tokens, size)
        for name, size in zip("ubc", (channels, STATE, STATE), strict=True)
    }
    leaves |= {
        "dt": source.normal(rows, tokens, channels).sigmoid(),
        "rate": source.normal(channels, STATE).exp(),
    }
    for signed in (False, True):
        name = f"selective scan, {rows} rows of {channels} channels" + ", signed" * signed
        yield source.case(Case("selective-scan", name, partial(run, signed=signed), leaves), ["y"])


def _cross_entropy(source: Source) -> Iterator[Case]:
    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor]:
        return (linear_cross_entropy(hidden, weight, targets),)

    rows, size = source.sizes.batch * source.sizes.tokens, source.sizes.hidden
    vocabulary = source.sizes.vocabulary
    leaves = {"hidden": source.activations(size).flatten(0, 1), "weight": source.projection(vocabulary, size)}
    targets = torch.randint(vocabulary, (rows,), generator=source.generator, device=source.device)
    case = Case(
        *("cross-entropy", f"linear + cross-entropy, {size} to {vocabulary}", run, leaves),
        fixed={"targets": targets},
        kept=(),  # gradients are made in the forward pass
        flops=2.0 * rows * size * vocabulary,
        graph=False,  # of milliseconds; and peers wait for the device
    )
    yield source.case(case, ["loss"])


FUNCTIONS: dict[str, Callable[[Source], Iterator[Case]]] = {
    "convolution": _convolution,
    "norm": _norm,
    "residual-norm": _residual_norm,
    "gated-norm": _gated_norm,
    "rotary": _rotary,
    "selective-scan": _selective_scan,
    "swiglu": _swiglu,
    "gates": _gates,
    "cross-entropy": _cross_entropy,
}
