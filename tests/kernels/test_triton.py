"""The Triton backend against the float64 recurrence: outputs and every gradient, interpreted and on a GPU.

Fresh memory is filled with NaN, so that an element which is read but was never written shows. The interpreter
cuts float32 to bfloat16 instead of rounding, hence its wider bfloat16 bound, and its products are in float32:
`test_triton_products` covers what kernels do for products of 16 bits.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fla_train.kernels.delta_product import delta_product, triton_walk
from fla_train.kernels.delta_product.launches import fallback, forced

pytestmark = pytest.mark.usefixtures("poisoned_memory", "by_chunks")
NAMES = ("o", "final_state", "dq", "dk", "dv", "dbeta", "dg", "dinitial_state")
INTERPRETED = not torch.cuda.is_available()
GATED, UNGATED = True, False


@dataclass(frozen=True)
class Case:
    tokens: int = 70
    sub_steps: int = 1
    gated: bool = GATED
    batch: int = 1
    heads: int = 1
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    l2norm: bool = True
    states: bool = True  # initial state given, final state returned and differentiated
    cu_seqlens: tuple[int, ...] | None = None
    inputs: str = "random"
    scale: float | None = None


def make_inputs(case: Case, device: str) -> tuple[list[Tensor | None], Tensor, Tensor | None]:
    """Tensors of the operator in order, then the gradients of o and of the final state."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    per_token = (case.batch, case.tokens)
    per_step = (*per_token, case.sub_steps, case.heads)
    segments = case.batch if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    q, k, v = (
        normal(*per_token, case.heads, case.key_dim),
        normal(*per_step, case.key_dim),
        normal(*per_step, case.value_dim),
    )
    beta = 2 * torch.rand(per_step, device=device)
    g = -torch.exp(normal(*per_token, case.heads) - 3) if case.gated else None
    match case.inputs:
        case "correlated":  # keys of cosine 0.9, beta near 2
            k = 0.9**0.5 * k[:, :1, :1] + 0.1**0.5 * k
            beta = 1.6 + 0.2 * beta
        case "repeated":  # four distinct keys, beta 2
            k = k[:, torch.arange(case.tokens) % 4][:, :, :1].expand_as(k).clone()
            beta = torch.full_like(beta, 2.0)
        case "ones":
            q, k, v, beta = (torch.ones_like(x) for x in (q, k, v, beta))
        case "small beta":
            beta = beta / 100
        case "tiny beta":
            beta = beta / 1e4
        case "zero beta":
            beta[:, ::3] = 0.0
        case "no writes":  # of the first tokens
            beta[:, :64] = 0.0
        case "padding":  # before them, with states that go on through it
            k[:, :64], v[:, :64], beta[:, :64] = 0.0, 0.0, 0.0
        case "resets":
            g[:, 5::9] = -torch.inf
        case "fast decay":
            g = torch.full_like(g, -2.3)
    if not case.l2norm:
        k = torch.nn.functional.normalize(k, dim=-1)
    state_shape = (segments, case.heads, case.key_dim, case.value_dim)
    initial_state = normal(*state_shape) if case.states else None
    q, k, v = (x.to(case.dtype) for x in (q, k, v))
    do = normal(*per_token, case.heads, case.value_dim).to(case.dtype)
    return [q, k, v, beta, g, initial_state], do, normal(*state_shape) if case.states else None


def forward(
    case: Case, tensors: list[Tensor | None], backend: str, dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """Outputs by name, and the leaves they come from; `dtype` converts every tensor first."""
    leaves = [x if x is None else x.to(dtype or x.dtype).detach().requires_grad_() for x in tensors]
    device = leaves[0].device
    *operands, initial_state = leaves
    outputs = delta_product(
        *operands,
        scale=case.scale,
        initial_state=initial_state,
        output_final_state=case.states,
        cu_seqlens=case.cu_seqlens and torch.tensor(case.cu_seqlens, device=device),
        qk_l2norm=case.l2norm,
        # All states in float64 are 37 GB at 256 channels and seven sub-steps, and tests share a GPU.
        recompute=32 if backend == "recurrent" else False,
        backend=backend,
    )
    return {name: x for name, x in zip(NAMES, outputs, strict=False) if x is not None}, leaves


def backward(
    outputs: dict[str, Tensor],
    leaves: list[Tensor | None],
    do: Tensor,
    dfinal_state: Tensor | None,
    retain_graph: bool = True,
) -> dict[str, Tensor]:
    """Gradients by name."""
    given = [dx.to(x.dtype) for x, dx in zip(outputs.values(), (do, dfinal_state), strict=False)]
    named = {name: x for name, x in zip(NAMES[2:], leaves, strict=True) if x is not None}
    found = torch.autograd.grad(tuple(outputs.values()), tuple(named.values()), given, retain_graph)
    return dict(zip(named, found, strict=True))


def results(
    case: Case,
    tensors: list[Tensor | None],
    do: Tensor,
    dfinal_state: Tensor | None,
    backend: str,
    dtype: torch.dtype | None = None,
    retain_graph: bool = False,
) -> dict[str, Tensor]:
    """Outputs and gradients by name; `dtype` converts every tensor first."""
    outputs, leaves = forward(case, tensors, backend, dtype)
    gradients = backward(outputs, leaves, do, dfinal_state, retain_graph)
    return {name: x.detach() for name, x in outputs.items()} | gradients


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], bounds: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        error = (found[name].double() - reference).norm() / reference.norm().clamp_min(1e-6)
        assert error <= bounds[name], f"{name}: relative error {error:.1e} > {bounds[name]:.1e}"


def check(case: Case, bounds: dict[str, float], device: str) -> None:
    inputs = make_inputs(case, device)
    expected = results(case, *inputs, backend="recurrent", dtype=torch.float64)
    actual = results(case, *inputs, backend="triton")
    again = results(case, *inputs, backend="triton", retain_graph=True)  # dV has a place of its own then
    assert_close(actual, expected, bounds)
    for name in actual:
        assert torch.equal(actual[name], again[name]), f"{name} differs from run to run"


def uniform(bound: float) -> dict[str, float]:
    return dict.fromkeys(NAMES, bound)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU tests cover these")
@pytest.mark.parametrize(
    "case",
    [
        Case(heads=2, batch=2),
        Case(sub_steps=2, gated=UNGATED, l2norm=False, tokens=33),
        Case(sub_steps=3, key_dim=24, value_dim=80, tokens=23),
        Case(sub_steps=4, batch=2, tokens=17, states=False),
        Case(sub_steps=2, cu_seqlens=(0, 0, 33, 34, 70)),
        Case(gated=UNGATED, cu_seqlens=(0, 3, 68, 68), tokens=68, l2norm=False),
        Case(tokens=1, scale=1.0),
        Case(inputs="correlated", key_dim=32),
        Case(inputs="zero beta"),
        Case(inputs="tiny beta", scale=1e5, states=False),
        Case(inputs="no writes", scale=1e10),
        Case(scale=-3.0, tokens=20),
        Case(inputs="resets", sub_steps=2, tokens=40),
    ],
    ids=str,
)
def test_interpreted_fp32(case: Case) -> None:
    check(case, uniform(2e-5), "cpu")


@pytest.mark.skipif(not INTERPRETED, reason="the GPU tests cover these")
@pytest.mark.parametrize(
    "case",
    [
        Case(dtype=torch.bfloat16, key_dim=32, value_dim=32),
        Case(dtype=torch.bfloat16, sub_steps=2, tokens=40),
        Case(dtype=torch.float16, sub_steps=3, tokens=24),
    ],
    ids=str,
)
def test_interpreted_half_precision(case: Case) -> None:
    check(case, uniform(2.5e-2), "cpu")


def test_inference_equals_training() -> None:
    device = "cpu" if INTERPRETED else "cuda"
    (q, k, v, beta, g, state), *_ = make_inputs(Case(tokens=65), device)
    kwargs = {"initial_state": state, "output_final_state": True, "qk_l2norm": True, "backend": "triton"}
    trained = delta_product(q.requires_grad_(), k, v, beta, g, **kwargs)
    with torch.no_grad():
        inferred = delta_product(q, k, v, beta, g, **kwargs)
    assert torch.equal(trained[0], inferred[0]) and torch.equal(trained[1], inferred[1])


def test_only_the_final_state_is_used() -> None:
    device = "cpu" if INTERPRETED else "cuda"
    (q, k, v, beta, g, state), _, dstate = make_inputs(Case(tokens=20), device)
    kwargs = {"initial_state": state, "output_final_state": True, "qk_l2norm": True}
    grads = []
    for backend in ("recurrent", "triton"):
        leaves = [x.clone().requires_grad_() for x in (k, v, beta, g)]
        (delta_product(q, *leaves, **kwargs, backend=backend)[1] * dstate).sum().backward()
        grads.append([x.grad for x in leaves])
    for expected, actual in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("longest", [0, 4096])  # by chunks, and step by step
def test_boundaries_may_lie_apart(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    monkeypatch.setattr(triton_walk, "LONGEST", longest)
    device = "cpu" if INTERPRETED else "cuda"
    (q, k, v, beta, g, _), *_ = make_inputs(Case(tokens=20), device)
    bounds = torch.tensor([[0, 99], [3, 99], [20, 99]], device=device)[:, 0]
    kwargs = {"qk_l2norm": True, "backend": "triton"}
    expected, _ = delta_product(q, k, v, beta, g, cu_seqlens=bounds.contiguous(), **kwargs)
    assert torch.equal(delta_product(q, k, v, beta, g, cu_seqlens=bounds, **kwargs)[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 128, 256])
def test_gpu_gates_that_are_nan_show(dim: int) -> None:
    case = real(tokens=70, batch=1, heads=1, key_dim=dim, value_dim=dim)
    (q, k, v, beta, g, _), *_ = make_inputs(case, "cuda")
    g[0, 65] = torch.nan
    o, _ = delta_product(q, k, v, beta, g, qk_l2norm=True, backend="triton")
    assert o[0, 65].isnan().all() and not o[0, :64].isnan().any()


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        (Case(tokens=2), torch.float64, "float64"),
        (Case(tokens=1, sub_steps=65), torch.float32, "at most 64 sub-steps"),
        (
            Case(tokens=1, key_dim=129),
            torch.float32,
            "key dimension of at most 128 .* choose bfloat16 or backend=chunked",
        ),
        (
            Case(tokens=1, key_dim=257),
            torch.bfloat16,
            "key dimension of at most 256 .* choose backend=chunked",
        ),
    ],
)
def test_unsupported_requests_name_the_fault(case: Case, dtype: torch.dtype, message: str) -> None:
    (q, k, v, *rest), *gradients = make_inputs(case, "cpu" if INTERPRETED else "cuda")
    if dtype is torch.float64:
        rest = [x.to(dtype) for x in rest]
    tensors = [*(x.to(dtype) for x in (q, k, v)), *rest]
    with pytest.raises(ValueError, match=message):
        results(case, tensors, *gradients, backend="triton")


# Random inputs reach up to 0.9 of these bounds (docs/kernels.md, "Errors"). Without forgetting the errors
# stay in the state, and more so in smaller heads; keys that repeat at beta near 2 amplify them, most in dq,
# which reads states, E and dP in bf16.
BF16 = uniform(8e-3) | {"o": 5e-3, "final_state": 5e-3, "dbeta": 1.5e-2, "dg": 1.5e-2}
BF16_LOOSE = uniform(1.2e-2) | {"dbeta": 1.5e-2, "dg": 1.5e-2}
BF16_NARROW = uniform(1.5e-2)
BF16_HARD = BF16 | {"final_state": 2.5e-3, "dq": 1e-2, "dbeta": 2e-2, "dg": 2e-2}


def real(**changes: object) -> Case:
    sizes = {"tokens": 333, "batch": 2, "heads": 4, "key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16}
    return Case(**{**sizes, **changes})


def bounds_of(case: Case) -> dict[str, float]:
    """Of random inputs; without a gate normalised keys keep the targets, up to four sub-steps."""
    if case.key_dim < 32:
        return BF16_NARROW
    normal = case.l2norm and case.sub_steps <= 4
    return BF16 if normal or (case.gated and case.key_dim >= 64) else BF16_LOOSE


@pytest.mark.gpu
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("gated", [GATED, UNGATED])
@pytest.mark.parametrize("sub_steps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "dims", [(128, 128), (96, 96), (64, 64), (256, 256), (256, 128), (96, 48), (32, 32), (16, 256)]
)
def test_gpu_bf16(dims: tuple[int, int], sub_steps: int, gated: bool, states: bool) -> None:
    """Training has no states, and kernels of its own for that; without them q and k are normalised, too."""
    sizes = {"key_dim": dims[0], "value_dim": dims[1], "sub_steps": sub_steps}
    case = real(**sizes, gated=gated, l2norm=gated or not states, states=states)
    check(case, bounds_of(case), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("gated", [GATED, UNGATED])
@pytest.mark.parametrize("sub_steps", [1, 2])
@pytest.mark.parametrize("value_dim", [64, 128, 192, 256])
def test_gpu_tiles_of_v(value_dim: int, sub_steps: int, gated: bool, l2norm: bool) -> None:
    """Each number of V tiles under each pipeline: three stages over three tiles gave wrong dk on Hopper."""
    case = real(value_dim=value_dim, sub_steps=sub_steps, gated=gated, l2norm=l2norm)
    check(case, bounds_of(case), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [GATED, UNGATED])
@pytest.mark.parametrize("sub_steps", [1, 2])
@pytest.mark.parametrize("value_dim", [128, 192])
def test_gpu_rows_of_the_table_with_narrow_keys(value_dim: int, sub_steps: int, gated: bool) -> None:
    case = real(key_dim=64, value_dim=value_dim, sub_steps=sub_steps, gated=gated, l2norm=gated)
    check(case, bounds_of(case), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("sub_steps", [1, 3])
@pytest.mark.parametrize("dims", [(256, 256), (32, 32), (16, 256)])
def test_gpu_norm_without_gate(dims: tuple[int, int], sub_steps: int) -> None:
    case = real(key_dim=dims[0], value_dim=dims[1], sub_steps=sub_steps, gated=UNGATED)
    check(case, bounds_of(case), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [GATED, UNGATED])
@pytest.mark.parametrize("sub_steps", [1, 2])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gpu_options_of_cards_that_no_table_lists(dim: int, sub_steps: int, gated: bool) -> None:
    case = real(key_dim=dim, value_dim=dim, sub_steps=sub_steps, gated=gated, l2norm=gated)
    with forced(fallback(dim)):
        check(case, bounds_of(case), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 63, 65, 1000])
@pytest.mark.parametrize("sub_steps", [1, 3])
def test_gpu_lengths(tokens: int, sub_steps: int) -> None:
    check(real(tokens=tokens, sub_steps=sub_steps), BF16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("sub_steps", [1, 2, 3])
def test_gpu_packed(sub_steps: int, states: bool) -> None:
    cu_seqlens = (0, 0, 64, 65, 200, 200, 333, 333)
    check(real(batch=1, cu_seqlens=cu_seqlens, sub_steps=sub_steps, states=states), BF16, "cuda")


# Without a gate nothing is forgotten: keys that repeat at beta 2 are reflected for ever, and roundings stay
# (docs/kernels.md, "Errors").
HARD = [
    *[(real(inputs=x, sub_steps=n), BF16_HARD) for x in ("correlated", "repeated") for n in (1, 2, 3)],
    *[(real(inputs=x, sub_steps=n), BF16) for x in ("zero beta", "resets", "fast decay") for n in (1, 2)],
    *[(real(inputs="tiny beta", states=False, scale=scale), BF16) for scale in (None, 1e-2, 1e5)],
    # Without a final state, whose gradient is nothing beside that of such outputs.
    *[(real(scale=scale, states=False), BF16) for scale in (-1e6, 1e5)],
    *[(real(inputs="no writes", scale=1e10, sub_steps=n), BF16) for n in (1, 2)],
    (real(inputs="padding", scale=1e10), BF16),
    *[(real(inputs="correlated", gated=UNGATED, sub_steps=n), BF16_HARD) for n in (1, 2)],
    (real(inputs="repeated", gated=UNGATED), uniform(0.08)),
    (real(inputs="repeated", gated=UNGATED, sub_steps=2), uniform(2e-2)),
    *[(real(inputs="ones", gated=UNGATED, scale=x), BF16_HARD | {"dbeta": 3e-2}) for x in (None, 1.0)],
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "bounds"), HARD, ids=lambda x: x.inputs if isinstance(x, Case) else "")
def test_gpu_hard_inputs(case: Case, bounds: dict[str, float]) -> None:
    check(case, bounds, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [GATED, UNGATED])
@pytest.mark.parametrize("sub_steps", [1, 3])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_gpu_fp16(dim: int, sub_steps: int, gated: bool) -> None:
    sizes = {"key_dim": dim, "value_dim": dim, "sub_steps": sub_steps, "tokens": 150}
    case = real(dtype=torch.float16, gated=gated, states=sub_steps == 1, **sizes)
    check(case, uniform(2e-3), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [GATED, UNGATED])
@pytest.mark.parametrize(
    ("dims", "sub_steps"),
    [
        ((32, 32), 1),
        ((64, 64), 1),
        ((96, 96), 1),
        ((128, 128), 1),
        ((64, 64), 3),
        ((128, 128), 4),
        ((128, 256), 1),
    ],
)
def test_gpu_fp32(dims: tuple[int, int], sub_steps: int, gated: bool) -> None:
    sizes = {"key_dim": dims[0], "value_dim": dims[1], "sub_steps": sub_steps, "tokens": 150}
    check(real(dtype=torch.float32, gated=gated, **sizes), uniform(2e-5), "cuda")


@pytest.mark.gpu
def test_gpu_fp32_packed() -> None:
    case = real(dtype=torch.float32, batch=1, tokens=150, cu_seqlens=(0, 0, 64, 65, 150), sub_steps=2)
    check(case, uniform(2e-5), "cuda")
