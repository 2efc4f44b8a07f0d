"""Check that a backend is right on this machine: `check_backend` compares it with the recurrence in float64.

It compares the output, the final state and every gradient on a few small cases that reach each branch of a
kernel, in seconds. `fla-doctor` prints the report, and training does not start if it failed.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fla_train.kernels.delta_product.interface import delta_product, resolve_backend
from fla_train.kernels.delta_product.recurrent import compute_dtype
from fla_train.kernels.delta_product.select import override
from fla_train.kernels.sizes import ceil_div, processors
from fla_train.utils.processes import cores_of_rank

DIFFERENTIABLE = ("q", "k", "v", "beta", "g", "initial_state")
BATCH, HEADS = 2, 2  # sequences of a case, unless they are packed, and heads
# Programs per multiprocessor of a busy device, one for each sequence and head. Rounded up, three keep more
# than three quarters of any number of multiprocessors at work: `select.MIN_BUSY`.
BUSY_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """One comparison. `beta` and `alpha` (the forget gate, exp(g)) are drawn uniformly from their ranges."""

    name: str
    tokens: int
    num_householder: int
    beta: tuple[float, float] = (0.0, 2.0)
    alpha: tuple[float, float] | None = None  # None: no gate
    closed_every: int = 0  # tokens between gates of zero, g = -inf; 0: none
    initial_state: bool = False
    final_state: bool = True  # asked for and differentiated; kernels without one are compiled apart
    documents: tuple[int, ...] | None = None  # cu_seqlens
    qk_l2norm: bool = True
    # Chunks of a segment that Triton splits sequences into; None: decided by size.
    segment_chunks: int | None = None
    head_dims: tuple[int, int] | None = None  # K and V; None: those that `check_backend` is asked for
    busy: bool = False  # enough copies of the batch to fill a GPU: `chunk_bwd_fused` runs on Hopper


# Few different combinations of (head dims, num_householder, gated, packed): Triton compiles for each.
CASES = (
    Case("beta near 0", tokens=97, num_householder=1, beta=(0.0, 0.01), qk_l2norm=False, final_state=False),
    Case("open gates", tokens=131, num_householder=1, alpha=(0.98, 1.0), initial_state=True),
    Case("beta near 2", tokens=67, num_householder=2, beta=(1.9, 2.0), initial_state=True),
    Case("mixed gates", tokens=131, num_householder=3, alpha=(0.7, 1.0), head_dims=(128, 128)),
    Case("closing gates", tokens=67, num_householder=3, alpha=(0.0, 0.2), closed_every=5),
    Case("packed documents", 131, 2, alpha=(0.7, 1.0), initial_state=True, documents=(0, 0, 1, 66, 66, 131)),
    Case("split sequences", 200, 2, alpha=(0.9, 1.0), initial_state=True, segment_chunks=2),
    Case("busy device", 131, 1, alpha=(0.7, 1.0), final_state=False, head_dims=(128, 128), busy=True),
    Case("busy device, no gate", tokens=67, num_householder=2, initial_state=True, busy=True),
    Case("busy device, split", 131, 1, alpha=(0.9, 1.0), head_dims=(128, 128), segment_chunks=1, busy=True),
)


def model_cases(num_householder: int, gated: bool) -> tuple[Case, ...]:
    """Return the cases that a model with n_h = `num_householder` runs in training, without states."""
    cases = (case for case in CASES if not (case.documents or case.segment_chunks))
    cases = (case for case in cases if (case.alpha is not None) == gated)
    without = {"initial_state": False, "final_state": False, "head_dims": None}
    return tuple(replace(case, num_householder=num_householder, qk_l2norm=True, **without) for case in cases)


@dataclass(frozen=True)
class Difference:
    """One tensor of one case: its relative RMS error |x - reference| / |reference|, and its tolerance."""

    case: str
    tensor: str  # "o", "final_state", or "d" + the name of an input
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class CheckReport:
    backend: str
    device: str
    dtype: torch.dtype
    rows: tuple[Difference, ...]
    failure: str | None = None  # the backend's error, if any

    @property
    def ok(self) -> bool:
        return self.failure is None and all(row.ok for row in self.rows)

    def summary(self) -> str:
        """Return one line: the verdict, and the comparison nearest to its tolerance or farthest beyond."""
        head = f"{self.backend} on {self.device} in {str(self.dtype).removeprefix('torch.')}"
        if self.failure is not None:
            return f"{head}: FAILED, {self.failure}"
        worst = max(self.rows, key=lambda row: (math.isnan(row.error), row.error / row.tolerance))
        failed = sum(not row.ok for row in self.rows)
        verdict = f"FAILED {failed} of {len(self.rows)}" if failed else f"ok, {len(self.rows)}"
        return (
            f"{head}: {verdict} comparisons, worst {worst.tensor} {worst.error:.1e} of {worst.tolerance:.1e} "
            f"allowed ({worst.case})"
        )


def check_backend(
    backend: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    cases: Sequence[Case] = CASES,
    head_dims: tuple[int, int] = (64, 64),
) -> CheckReport:
    """Compare a backend with the float64 recurrence.

    Args:
        backend: as in `delta_product`.
        device: where the backend runs; the reference always runs on the CPU.
        dtype: of q, k and v. It sets the tolerances.
        cases: what to compare.
        head_dims: K and V of cases that leave them open; compiled backends differ by them, so pass those of
            the model.

    Raises:
        ValueError: for a backend that is unknown or cannot run on `device`. What the backend itself raises is
            caught and becomes the report's `failure`.
    """
    device = torch.device(device)
    backend = resolve_backend(backend, device)
    rows: list[Difference] = []
    failure = None
    prepared = [
        (case, make_inputs(case, dtype, case.head_dims or head_dims, seed)) for seed, case in enumerate(cases)
    ]

    def run(case: Case, inputs: dict[str, object]) -> dict[str, Tensor]:
        copies = num_copies(case, backend, device)
        with override(segment_chunks=case.segment_chunks):
            many = {name: _to(x, device, copies=copies) for name, x in inputs.items()}
            return evaluate(many, backend, copies=copies, final_state=case.final_state)

    if backend == "triton" and device.type == "cuda":
        from fla_train.kernels.precompile import precompile  # loads Triton

        # Where sequences are split, a kernel writes indices by which torch selects states.
        whole = [(case, inputs) for case, inputs in prepared if case.segment_chunks is None]
        with suppress(Exception):  # the same failure is handled below
            precompile(lambda: [run(case, inputs) for case, inputs in whole], cores_of_rank())
    for case, inputs in prepared:
        exact = {name: _to(x, "cpu", torch.float64) for name, x in inputs.items()}
        reference = evaluate(exact, "recurrent", final_state=case.final_state)
        try:
            results = {name: x.cpu() for name, x in run(case, inputs).items()}  # raises the GPU's errors
        except Exception as error:  # a compiler's or a launch's, of any type
            message = str(error).strip().splitlines() or [""]
            failure = f"{case.name}: {type(error).__name__}: {message[0]}"
            break
        for name, expected in reference.items():
            errors = [
                relative_rms(x, expected) for x in results[name].chunk(num_copies(case, backend, device))
            ]
            error = torch.tensor(errors).max().item()  # error of the worst copy, NaN if one has a NaN
            rows.append(Difference(case.name, name, error, _tolerance(name, backend, dtype, case)))
    return CheckReport(backend, str(device), dtype, tuple(rows), failure)


def make_inputs(
    case: Case, dtype: torch.dtype, head_dims: tuple[int, int], seed: int, heads: int = HEADS
) -> dict[str, object]:
    """Return arguments of `delta_product` for a case, on the CPU; q, k, v in `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    key_dim, value_dim = head_dims
    batch = BATCH if case.documents is None else 1
    q = normal(batch, case.tokens, heads, key_dim)
    k = normal(batch, case.tokens, case.num_householder, heads, key_dim)
    if not case.qk_l2norm:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v = normal(batch, case.tokens, case.num_householder, heads, value_dim)
    beta = uniform(*case.beta, batch, case.tokens, case.num_householder, heads)
    g = state = None
    if case.alpha is not None:
        g = uniform(*case.alpha, batch, case.tokens, heads).log()
        if case.closed_every:
            g[:, case.closed_every :: case.closed_every] = -torch.inf
    if case.initial_state:
        sequences = batch if case.documents is None else len(case.documents) - 1
        state = normal(sequences, heads, key_dim, value_dim)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    beta, g, state = (x if x is None else x.to(compute_dtype(q)) for x in (beta, g, state))
    cu_seqlens = None if case.documents is None else torch.tensor(case.documents, dtype=torch.int32)
    return dict(
        q=q, k=k, v=v, beta=beta, g=g, initial_state=state, cu_seqlens=cu_seqlens, qk_l2norm=case.qk_l2norm
    )  # fmt: skip


def evaluate(
    inputs: dict[str, object], backend: str, copies: int = 1, final_state: bool = True
) -> dict[str, Tensor]:
    """Return o, final_state and, as dq, dk, ..., gradients of <o, a> + <final_state, b>, a and b random.

    If the batch consists of copies of a smaller one, all copies have the same a and b. Without `final_state`
    only o is differentiated, as in training.
    """
    leaves = {
        name: inputs[name].detach().clone().requires_grad_()
        for name in DIFFERENTIABLE
        if inputs.get(name) is not None
    }
    outputs = delta_product(**{**inputs, **leaves}, output_final_state=final_state, backend=backend)
    results = {name: x for name, x in zip(("o", "final_state"), outputs, strict=True) if x is not None}
    generator = torch.Generator().manual_seed(0)
    loss = 0.0
    for x in results.values():
        x = x.unflatten(0, (copies, -1))
        weights = torch.randn(x.shape[1:], generator=generator).bfloat16()  # the same numbers in every dtype
        loss = loss + (x * weights.to(x)).sum(dtype=compute_dtype(results["o"]))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {name: x.detach() for name, x in results.items()} | {
        f"d{name}": grad for name, grad in zip(leaves, gradients, strict=True)
    }


def relative_rms(x: Tensor, reference: Tensor, least: float = 1e-30) -> float:
    """Return |x - reference| / max(|reference|, least) in float64; NaN if `x` holds one."""
    x, reference = x.detach().double().cpu(), reference.detach().double().cpu()
    return ((x - reference).norm() / reference.norm().clamp(min=least)).item()


def num_copies(case: Case, backend: str, device: torch.device) -> int:
    """Return how many copies of its batch a case has; more than one where Triton's choice depends on it."""
    if not case.busy or backend != "triton" or device.type != "cuda":
        return 1
    return ceil_div(BUSY_ROUNDS * processors(device), BATCH * HEADS)


def _to(
    value: object, device: torch.device | str, dtype: torch.dtype | None = None, copies: int = 1
) -> object:
    if not isinstance(value, Tensor):
        return value
    return torch.cat([value.to(device, dtype if value.is_floating_point() else None)] * copies)


def _tolerance(tensor: str, backend: str, dtype: torch.dtype, case: Case) -> float:
    """Return two to three times the rounding error of a right backend on these cases; tests are stricter."""
    if dtype == torch.float64:
        return 1e-9
    if dtype == torch.float32:
        return 1e-3 if backend == "triton" else 1e-4  # its products may run in TF32x3
    if tensor in ("o", "final_state"):
        return 1e-2
    if tensor in ("dbeta", "dg"):
        # Differences of large sums where gates close: the operands' rounding shows.
        return 5e-2 if case.closed_every else 3e-2
    return 1.5e-2
