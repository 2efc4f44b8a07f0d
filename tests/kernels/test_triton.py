"""The Triton backend against the float64 recurrence: outputs and every gradient, interpreted and on a GPU.

Fresh memory is filled with NaN, so that an element which is read but was never written shows. The interpreter
cuts float32 to bfloat16 instead of rounding, hence its wider bfloat16 bound, and its products are in float32.
"""

import pytest
import torch

from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.select import override, select_for
from fla_train.kernels.delta_product.triton.launch_table import fallback
from tests.kernels.operator_cases import (
    BF16,
    GATED,
    HARD,
    INTERPRETED,
    UNGATED,
    Case,
    bounds_of,
    check,
    make_inputs,
    real,
    uniform,
)

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.usefixtures("poisoned_memory", "by_chunks")


@pytest.mark.skipif(not INTERPRETED, reason="the GPU tests cover these")
@pytest.mark.parametrize(
    "case",
    [
        Case(heads=2),
        Case(num_householder=2, gated=UNGATED, l2norm=False, tokens=33),
        Case(num_householder=3, key_dim=24, value_dim=80, tokens=23),
        Case(num_householder=4, batch=2, tokens=17, states=False),
        Case(num_householder=2, cu_seqlens=(0, 0, 33, 34, 70)),
        Case(gated=UNGATED, cu_seqlens=(0, 3, 68, 68), tokens=68, l2norm=False),
        Case(tokens=1, scale=1.0),
        Case(inputs="correlated", key_dim=32),
        Case(inputs="tiny beta", scale=1e5, states=False),
        Case(inputs="no writes", scale=1e10),
        Case(inputs="resets", num_householder=2, tokens=40),
        Case(num_householder=2, heads=2, group=2, key_dim=24, value_dim=80, tokens=40),
        Case(heads=3, group=3, cu_seqlens=(0, 3, 68, 68), tokens=68, l2norm=False),
        Case(dtype=torch.bfloat16, key_dim=32, value_dim=32),
        Case(dtype=torch.bfloat16, num_householder=2, tokens=40),
        Case(dtype=torch.float16, num_householder=3, tokens=24),
        Case(dtype=torch.float16, key_dim=200, tokens=70),  # two tiles of the state, the second in part
    ],
    ids=str,
)
def test_interpreted(case: Case) -> None:
    check(case, uniform(2e-5 if case.dtype == torch.float32 else 2.5e-2), "cpu")


@pytest.mark.parametrize(
    ("case", "segments"), [(Case(tokens=65), 0), (Case(num_householder=8, tokens=30), 4)], ids=str
)
def test_inference_equals_training(case: Case, segments: int) -> None:
    (q, k, v, beta, g, state), *_ = make_inputs(case, DEVICE)
    kwargs = {"initial_state": state, "output_final_state": True, "qk_l2norm": True, "backend": "triton"}
    with override(segment_chunks=int(segments > 0)):
        assert select_for(q, v, None, True).num_segments == segments
        trained = delta_product(q.requires_grad_(), k, v, beta, g, **kwargs)
        with torch.no_grad():
            inferred = delta_product(q, k, v, beta, g, **kwargs)
    assert all(map(torch.equal, trained, inferred))


@pytest.mark.parametrize("algorithm", ["chunk", "fused_recurrent"])
def test_boundaries_may_lie_apart(algorithm: str) -> None:
    (q, k, v, beta, g, _), *_ = make_inputs(Case(tokens=20), DEVICE)
    bounds = torch.tensor([[0, 99], [3, 99], [20, 99]], device=DEVICE)[:, 0]
    kwargs = {"qk_l2norm": True, "backend": "triton"}
    with override(algorithm=algorithm):
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


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [GATED, UNGATED])
@pytest.mark.parametrize("num_householder", [1, 2])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gpu_options_of_cards_that_no_table_lists(dim: int, num_householder: int, gated: bool) -> None:
    case = real(key_dim=dim, value_dim=dim, num_householder=num_householder, gated=gated, l2norm=gated)
    with override(options=fallback()):
        check(case, bounds_of(case), "cuda")


EACH_GATE = (GATED, UNGATED)
DIMS = [
    *((128, 128), (96, 96), (64, 64), (256, 256), (200, 128), (256, 128), (96, 48), (32, 32), (16, 256)),
    *((64, 128), (64, 192), (96, 192)),  # rows of the launch table with narrow keys; OLMo Hybrid's heads
]
BF16_CASES = [
    # Kernels without states, as in training, are compiled apart.
    *(
        real(key_dim=k, value_dim=v, num_householder=n, gated=g, l2norm=g or not states, states=states)
        for k, v in DIMS
        for n in (1, 2, 3, 7)
        for g, states in ((GATED, True), (UNGATED, False), (UNGATED, True))
    ),
    # Each number of V tiles under each pipeline: three stages over three tiles gave wrong dk on Hopper.
    *(
        real(value_dim=v, num_householder=n, gated=g, l2norm=l2norm)
        for v in (64, 128, 192, 256)
        for n in (1, 2)
        for g, l2norm in ((GATED, False), (UNGATED, True))
    ),
]
LENGTHS = [real(tokens=t, num_householder=n) for t in (1, 63, 65, 1000) for n in (1, 3)]
PACKED = [
    real(batch=1, cu_seqlens=(0, 0, 64, 65, 200, 200, 333, 333), num_householder=n, states=states)
    for n, states in ((1, True), (2, False), (3, True))
]
GROUPED = [
    real(key_dim=k, value_dim=v, num_householder=n, group=2)
    for k, v in ((128, 128), (64, 128), (256, 256), (48, 48))
    for n in (1, 2)
]
FP16_CASES = [
    real(dtype=torch.float16, tokens=150, key_dim=dim, value_dim=dim, num_householder=n, gated=g)
    for dim in (32, 64, 128, 256)
    for n, g in ((1, GATED), (3, UNGATED))
]
FP32 = {"dtype": torch.float32, "tokens": 150}
FP32_CASES = [
    *(real(**FP32, key_dim=dim, value_dim=dim, gated=g) for dim in (32, 64, 96, 128) for g in EACH_GATE),
    *(real(**FP32, num_householder=n, value_dim=v) for n, v in ((3, 64), (4, 128), (1, 256))),
    real(**FP32, batch=1, cu_seqlens=(0, 0, 64, 65, 150), num_householder=2),
]
GPU_CASES = [
    *((case, bounds_of(case)) for case in BF16_CASES + GROUPED),
    *((case, BF16) for case in LENGTHS + PACKED),
    *HARD,
    *((case, uniform(2e-3)) for case in FP16_CASES),
    *((case, uniform(2e-5)) for case in FP32_CASES),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "bounds"), GPU_CASES, ids=lambda x: str(x) if isinstance(x, Case) else "")
def test_gpu(case: Case, bounds: dict[str, float]) -> None:
    check(case, bounds, "cuda")
