"""`fla-bench fused_ops`: time the fused ops, compared with their PyTorch definitions and Liger-Kernel.

Inputs are like those of a training step. Each case knows the bytes that it must move.
Activations have the benchmark's dtype, weights are fp32, and the residual stream is fp32 or has the
activations' dtype.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from unittest.mock import patch

import torch
from torch import Tensor

from fla_train.bench.measure import COLUMNS, Implementation, compare, forward_backward
from fla_train.bench.report import Report
from fla_train.bench.roofline import Ceilings
from fla_train.kernels import fused_ops
from fla_train.kernels.delta_product.selfcheck import relative_rms
from fla_train.kernels.fused_ops.backend import BACKEND_VARIABLE
from fla_train.models.loss import linear_cross_entropy

EPS = 1e-6  # eps of the norms
TAPS = 4  # taps of the convolution
STATE = 16  # size of a channel's state in the selective scan
SCAN_ROWS = 4  # largest batch of the selective scan, whose PyTorch definition keeps the states of all tokens
DOCUMENTS = 4  # packed documents per sequence length
BETA_MAX = 2.0


@dataclass(frozen=True)
class Case:
    """One fused op on one shape: a function of named tensors that returns its outputs.

    Attributes:
        kept: inputs and outputs that a backward pass must read; None: all inputs.
        flops: FLOPs of the forward pass's matrix products; a backward pass has twice as many.
        graph: time a CUDA graph, because the op is short compared with its launches.
    """

    function: str
    name: str
    definition: Callable[..., Tensor | tuple[Tensor, ...]]
    leaves: dict[str, Tensor]
    fixed: dict[str, Tensor] = field(default_factory=dict)
    output_gradients: dict[str, Tensor] = field(default_factory=dict)
    kept: tuple[str, ...] | None = None
    flops: float = 0.0
    graph: bool = True

    def run(self, backend: str = "auto") -> Tensor | tuple[Tensor, ...]:
        """Return the outputs of one of this project's backends."""
        # The loss has no argument for it.
        with patch.dict(os.environ, {BACKEND_VARIABLE: backend}):
            return self.definition(**self.leaves, **self.fixed)

    def exact(self) -> "Case":
        """Return a copy in fp64."""
        leaves = {name: x.detach().double().requires_grad_() for name, x in self.leaves.items()}
        gradients = {name: x.double() for name, x in self.output_gradients.items()}
        return replace(self, leaves=leaves, output_gradients=gradients)

    def errors(self, run: Callable[["Case"], Tensor | tuple[Tensor, ...]]) -> dict[str, float]:
        """Return relative RMS errors of outputs and gradients against the PyTorch definition in fp64."""
        expected = forward_backward(partial(Case.run, backend="torch"), self.exact())
        results = forward_backward(run, self)
        return {name: relative_rms(results[name], x) for name, x in expected.items()}

    @property
    def forward_bytes(self) -> int:
        """Return the least traffic of a forward pass, which reads the inputs and writes the outputs."""
        # The outputs have the sizes of their gradients.
        return sum(x.nbytes for x in (self.leaves | self.fixed | self.output_gradients).values())

    @property
    def backward_bytes(self) -> int:
        """Return the least traffic of a backward pass: its inputs, the outputs' gradients, the results."""
        inputs = self.leaves | self.fixed
        kept = inputs if self.kept is None else {n: (inputs | self.output_gradients)[n] for n in self.kept}
        groups = (kept, self.output_gradients, self.leaves)
        return sum(x.nbytes for group in groups for x in group.values())

    def bounds(self, ceilings: Ceilings) -> tuple[float, float]:
        """Return the least seconds of a forward pass, and of forward and backward."""
        forward = ceilings.seconds(self.flops, self.forward_bytes)
        return forward, forward + ceilings.seconds(2 * self.flops, self.backward_bytes)


def ours(device: torch.device) -> list[Implementation]:
    """Return the Triton kernels where they run, and the definitions in PyTorch."""
    backends = ["triton", "torch"] if device.type == "cuda" else ["torch"]
    return [Implementation(f"fla_train {name}", partial(Case.run, backend=name)) for name in backends]


@dataclass(frozen=True)
class Inputs:
    """Sizes of the layers that the fused ops belong to, and a generator that draws the same tensors each
    time.

    `head_dim` divides `hidden`.
    """

    batch: int
    tokens: int
    hidden: int
    head_dim: int
    intermediate: int
    vocabulary: int
    num_householder: int
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device)
        return (scale * x).to(dtype)

    def activations(self, *channels: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw [batch, tokens, *channels], by default in the activations' dtype."""
        return self.normal(self.batch, self.tokens, *channels, dtype=dtype or self.dtype)

    def projection(self, outputs: int, inputs: int) -> Tensor:
        """Draw an fp32 weight whose product has the variance of its input."""
        return self.normal(outputs, inputs, scale=inputs**-0.5)

    def case(self, outputs: Sequence[str], *fields: object, **options: object) -> Case:
        """Return a case whose leaves require gradients, with random gradients of its outputs."""
        case = Case(*fields, **options)
        with torch.no_grad():
            results = case.run("torch")
        results = results if isinstance(results, tuple) else (results,)
        for leaf in case.leaves.values():
            leaf.requires_grad_()
        named = zip(outputs, results, strict=True)
        gradients = {name: self.normal(*y.shape, dtype=y.dtype) for name, y in named}
        return replace(case, output_gradients=gradients)


def _convolution(inputs: Inputs) -> Iterator[Case]:
    def run(x: Tensor, weight: Tensor, offsets: Tensor | None = None) -> Tensor:
        return fused_ops.short_convolution(x, weight, position_in_document=offsets)[0]

    for channels in (inputs.hidden, 2 * inputs.hidden):
        leaves = {"x": inputs.activations(channels), "weight": inputs.normal(channels, 1, TAPS)}
        name = f"convolution + SiLU, {channels} channels"
        yield inputs.case(["y"], "convolution", name, run, leaves)
    packed = {"x": inputs.activations(channels).reshape(1, -1, channels), "weight": leaves["weight"]}
    # Documents end at random positions. `offsets` [T] is each token's position in its document.
    positions = torch.arange(inputs.batch * inputs.tokens, device=inputs.device)
    drawn = torch.rand(len(positions), generator=inputs.generator, device=inputs.device)
    starts = torch.where(drawn * inputs.tokens < DOCUMENTS, positions, 0)
    fixed = {"offsets": positions - starts.cummax(0).values}
    yield inputs.case(["y"], "convolution", f"{name}, packed documents", run, packed, fixed)


def _norm(inputs: Inputs) -> Iterator[Case]:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return fused_ops.rms_norm(x, weight, EPS, dtype=_output(x, inputs))

    for stream in dict.fromkeys((torch.float32, inputs.dtype)):
        leaves = {"x": inputs.activations(inputs.hidden, dtype=stream)}
        leaves["weight"] = inputs.normal(inputs.hidden)
        yield inputs.case(["y"], "norm", f"RMSNorm, {stream} stream, {inputs.hidden}", run, leaves)


def _residual_norm(inputs: Inputs) -> Iterator[Case]:
    def run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return fused_ops.add_rms_norm(x, residual, weight, EPS, dtype=_output(x, inputs))

    size = inputs.hidden
    for stream in dict.fromkeys((torch.float32, inputs.dtype)):
        leaves = {"x": inputs.activations(size), "residual": inputs.activations(size, dtype=stream)}
        leaves["weight"] = inputs.normal(size)
        name = f"RMSNorm with residual, {stream} stream, {size}"
        yield inputs.case(["y", "sum"], "residual-norm", name, run, leaves, kept=("sum", "weight"))


def _output(x: Tensor, inputs: Inputs) -> torch.dtype:
    """Return the dtype of a norm's output: that of the next matmul's input, or fp64 in the fp64 reference."""
    return x.dtype if x.dtype == torch.float64 else inputs.dtype


def _gated_norm(inputs: Inputs) -> Iterator[Case]:
    def run(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return fused_ops.rms_norm(x, weight, EPS, gate=gate)

    heads, size = inputs.hidden // inputs.head_dim, inputs.head_dim
    leaves = {name: inputs.activations(heads, size) for name in ("x", "gate")}
    leaves["weight"] = inputs.normal(size)
    yield inputs.case(["y"], "gated-norm", f"RMSNorm with gate, {heads} x {size}", run, leaves)


def _swiglu(inputs: Inputs) -> Iterator[Case]:
    size, outputs = inputs.intermediate, inputs.hidden
    leaves = {name: inputs.activations(size) for name in ("gate", "up")}
    leaves["weight"] = inputs.projection(outputs, size)
    flops = 2.0 * inputs.batch * inputs.tokens * size * outputs
    name = f"SwiGLU and its product, {size} to {outputs}"
    yield inputs.case(["y"], "swiglu", name, fused_ops.swiglu_linear, leaves, flops=flops)


def _gates(inputs: Inputs) -> Iterator[Case]:
    heads, steps = inputs.hidden // inputs.head_dim, inputs.num_householder
    leaves = {"b": inputs.activations(steps * heads), "a": inputs.activations(heads)}
    leaves |= {name: inputs.normal(heads) for name in ("A_log", "dt_bias")}
    run = partial(fused_ops.recurrence_gates, beta_max=BETA_MAX)
    yield inputs.case(["beta", "g"], "gates", f"gates, {heads} heads, n_h = {steps}", run, leaves)


def _rotary(inputs: Inputs) -> Iterator[Case]:
    heads, size = inputs.hidden // inputs.head_dim, inputs.head_dim
    leaves = {name: inputs.activations(heads, size) for name in ("q", "k")}
    angles = inputs.normal(inputs.tokens, size // 2)
    fixed, kept = {"cos": angles.cos(), "sin": angles.sin()}, ("cos", "sin")
    name = f"rotary, {heads} x {size}"
    yield inputs.case(["rotated q", "rotated k"], "rotary", name, fused_ops.rotary, leaves, fixed, kept=kept)


def _selective_scan(inputs: Inputs) -> Iterator[Case]:
    rows, channels = min(inputs.batch, SCAN_ROWS), 2 * inputs.hidden
    leaves = {name: inputs.normal(rows, inputs.tokens, STATE) for name in ("b", "c")}
    leaves["u"] = inputs.normal(rows, inputs.tokens, channels)
    leaves["dt"] = inputs.normal(rows, inputs.tokens, channels).sigmoid()
    leaves["rate"] = inputs.normal(channels, STATE).exp()
    for signed in (False, True):
        name = f"selective scan, {rows} rows of {channels} channels" + ", signed" * signed
        run = partial(fused_ops.selective_scan, signed=signed)
        yield inputs.case(["y"], "selective-scan", name, run, leaves)


def _cross_entropy(inputs: Inputs) -> Iterator[Case]:
    rows, size, vocabulary = inputs.batch * inputs.tokens, inputs.hidden, inputs.vocabulary
    leaves = {"hidden": inputs.activations(size).flatten(0, 1), "weight": inputs.projection(vocabulary, size)}
    targets = torch.randint(vocabulary, (rows,), generator=inputs.generator, device=inputs.device)
    name, flops = f"linear + cross-entropy, {size} to {vocabulary}", 2.0 * rows * size * vocabulary
    # The gradients are made in the forward pass. It takes milliseconds, and peers wait for the device in it.
    options = {"fixed": {"targets": targets}, "kept": (), "flops": flops, "graph": False}
    yield inputs.case(["loss"], "cross-entropy", name, linear_cross_entropy, leaves, **options)


_MAKERS = (_convolution, _norm, _residual_norm, _gated_norm, _rotary, _selective_scan, _swiglu, _gates)
FUNCTIONS = {make.__name__[1:].replace("_", "-"): make for make in (*_MAKERS, _cross_entropy)}


def make_cases(
    functions: Iterable[str], sizes: dict[str, int], dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    """Yield the cases of these functions, keys of `FUNCTIONS`, one at a time because they are large."""
    for function in functions:
        generator = torch.Generator(device).manual_seed(0)
        yield from FUNCTIONS[function](Inputs(**sizes, dtype=dtype, device=device, generator=generator))


# Liger-Kernel's versions, called as in its layers. It has no causal convolution, no RMSNorm with a gate and
# no gates of a recurrence. Its norms have one dtype for input and output, so no fp32 residual stream.
NORM = (EPS, 0.0, "llama", False)  # eps, offset of the weight, casting mode, overwrite dy


def _liger_norm(module: str, function: str, case: Case) -> Tensor | tuple[Tensor, Tensor]:
    return getattr(import_module(f"liger_kernel.ops.{module}"), function).apply(*case.leaves.values(), *NORM)


def _one_dtype(case: Case) -> str | None:
    dtypes = {case.leaves.get("residual", case.leaves["x"]).dtype, case.output_gradients["y"].dtype}
    return None if len(dtypes) == 1 else "needs one dtype for the stream and the norm"


def _liger_cross_entropy(case: Case) -> Tensor:
    """Return the sum over rows. The gradient of the weight accumulates in fp32, as in our kernel."""
    module = import_module("liger_kernel.ops.fused_linear_cross_entropy")
    hidden = case.leaves["hidden"]
    weight = case.leaves["weight"].to(hidden.dtype)
    bias, class_weight, lse_square_scale, label_smoothing, softcap = None, None, 0.0, 0.0, None
    options = (bias, class_weight, fused_ops.IGNORE, lse_square_scale, label_smoothing, "sum", softcap)
    function = module.LigerFusedLinearCrossEntropyFunction
    return function.apply(hidden, weight, case.fixed["targets"], *options, False, torch.float32)[0]


_NORM = partial(_liger_norm, "rms_norm", "LigerRMSNormFunction")
_RESIDUAL_NORM = partial(_liger_norm, "fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
PEERS: dict[str, list[Implementation]] = {
    "norm": [Implementation("Liger RMSNorm", _NORM, _one_dtype)],
    "residual-norm": [Implementation("Liger fused add + RMSNorm", _RESIDUAL_NORM, _one_dtype)],
    "cross-entropy": [Implementation("Liger fused linear cross-entropy", _liger_cross_entropy)],
}
SIZES = ("batch", "tokens", "hidden", "vocabulary", "num_householder")


def run(options: Namespace, report: Report) -> None:
    """Measure each case.

    Raises:
        ValueError: the options do not fit together.
    """
    sizes = {name: getattr(options, name) for name in SIZES}
    sizes["head_dim"] = options.head_dim or min(128, options.hidden)
    sizes["intermediate"] = options.intermediate or options.hidden * 11 // 4
    if options.hidden % sizes["head_dim"]:
        raise ValueError(f"--hidden {options.hidden} is not a multiple of --head-dim {sizes['head_dim']}")
    implementations = ours(report.device)
    peers = PEERS if options.peers and report.device.type == "cuda" else {}
    rows = (
        {"function": case.function, "case": case.name} | row
        for case in make_cases(options.functions or FUNCTIONS, sizes, report.dtype, report.device)
        for row in compare(case, implementations + peers.get(case.function, []), report, graphs=case.graph)
    )
    report.table("rows", ("case", *COLUMNS), rows)
