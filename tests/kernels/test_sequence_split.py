"""Sequences split into segments, against the float64 recurrence: interpreted and on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.select import override, segment_chunks
from tests.kernels.operator_cases import (
    BF16_EQUAL,
    BF16_HARD,
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


@pytest.fixture
def split_into() -> Iterator[Callable[[int], None]]:
    """Sets how many chunks a segment has, whatever the sizes of the call."""
    with ExitStack() as stack:
        yield lambda chunks: stack.enter_context(override(segment_chunks=chunks))


def test_only_calls_that_leave_an_h100_idle_are_split() -> None:
    def chunks(batch: int, tokens: int, heads: int, num_householder: int = 1) -> int:
        return segment_chunks(batch, -(-tokens // (64 // num_householder)), heads, 128, 132)[0]

    assert chunks(1, 32768, 16) == 64  # 8 segments, 256 programs
    assert chunks(1, 32768, 16, num_householder=3) == 196  # of 1561 chunks
    assert chunks(1, 8192, 8) == chunks(1, 16384, 4) == 8  # the least
    assert chunks(1, 8192 - 64, 8) == chunks(3, 32768, 16) == chunks(32, 2048, 8) == 0


@pytest.mark.skipif(not INTERPRETED, reason="the GPU tests cover these")
@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        (Case(num_householder=16, tokens=13, batch=2, gated=UNGATED), 1),
        (Case(num_householder=3, tokens=100, key_dim=24, value_dim=80, gated=UNGATED), 2),
        (Case(num_householder=4, tokens=108, cu_seqlens=(0, 0, 17, 18, 40, 40, 108)), 2),
        (Case(num_householder=8, tokens=40, cu_seqlens=(0, 32, 33, 40), gated=UNGATED, l2norm=False), 1),
        (Case(num_householder=8, tokens=40, inputs="resets"), 2),
        (Case(num_householder=8, tokens=24, heads=2, group=2), 1),
        (Case(num_householder=4, tokens=108, inputs="fast decay", states=False), 2),
        (Case(num_householder=8, tokens=24, inputs="correlated", key_dim=32), 1),
    ],
    ids=str,
)
def test_interpreted_fp32(case: Case, chunks: int, split_into: Callable[[int], None]) -> None:
    split_into(chunks)
    check(case, uniform(2e-5), "cpu")


def test_keys_of_any_norm(split_into: Callable[[int], None]) -> None:
    (q, k, v, beta, g, state), do, dstate = make_inputs(
        Case(num_householder=8, tokens=40, l2norm=False), DEVICE
    )
    k = k * torch.linspace(0.5, 1.4, 40, device=DEVICE)[:, None, None, None]
    outputs = []
    for chunks in (0, 1):
        split_into(chunks)
        leaves = [x.clone().requires_grad_() for x in (q, k, v, beta / 2, g - 4, state)]
        results = delta_product(
            *leaves[:5], initial_state=leaves[5], output_final_state=True, backend="triton"
        )
        torch.autograd.backward(results, (do, dstate))
        outputs.append([x.detach() for x in (*results, *(leaf.grad for leaf in leaves))])
    for whole, split in zip(*outputs, strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


GPU_CASES = [
    *((real(key_dim=d, value_dim=d, num_householder=n), 2) for d in (64, 128, 256) for n in (1, 2, 3)),
    *((real(key_dim=d, value_dim=d, num_householder=n, gated=UNGATED), 1) for d in (64, 128) for n in (1, 3)),
    (real(key_dim=256, value_dim=256, gated=UNGATED, l2norm=False), 1),
    (real(key_dim=96, value_dim=48, num_householder=2, gated=UNGATED), 1),
    (real(key_dim=64, value_dim=192), 1),
    (real(key_dim=128, value_dim=256, num_householder=4, l2norm=False), 2),
    (real(tokens=1000, gated=UNGATED, states=False), 4),
    (real(batch=1, cu_seqlens=(0, 0, 64, 65, 200, 200, 333, 333), num_householder=2), 1),
    (real(batch=1, cu_seqlens=(0, 1, 333), gated=UNGATED), 2),
    (real(inputs="resets", num_householder=2), 3),
    (real(inputs="fast decay", tokens=700), 2),
    (real(inputs="no writes", scale=1e10), 1),
    (real(inputs="tiny beta", states=False), 1),
    (real(inputs="resets", num_householder=7, tokens=1300, heads=1), 70),
    (real(tokens=1000, inputs="small beta", gated=UNGATED, l2norm=False), 1),
]
GPU_CASES = [(case, bounds_of(case), chunks) for case, chunks in GPU_CASES] + [
    *((real(inputs=name), BF16_HARD, 1) for name in ("correlated", "repeated")),
    (real(inputs="ones", gated=UNGATED, scale=1.0), BF16_EQUAL, 1),
    *(
        (real(dtype=torch.float16, key_dim=d, value_dim=d, num_householder=2), uniform(2e-3), 1)
        for d in (64, 128)
    ),
    *(
        (real(dtype=torch.float32, key_dim=d, value_dim=d, num_householder=2), uniform(2e-5), 1)
        for d in (64, 128)
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "bounds", "chunks"), GPU_CASES, ids=lambda x: "" if isinstance(x, dict) else str(x)
)
def test_gpu(case: Case, bounds: dict[str, float], chunks: int, split_into: Callable[[int], None]) -> None:
    split_into(chunks)
    check(case, bounds, "cuda")
