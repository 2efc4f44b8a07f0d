"""Sequences that the Triton backend cuts: against the float64 recurrence, interpreted and on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
import triton.language as tl

from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.triton import segment_kernels, sequence_split
from fla_train.kernels.delta_product.triton.sequence_split import Pieces, cutting, find_cut, piece_chunks
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
def cut_into() -> Iterator[Callable[[int], None]]:
    """Sets how many chunks a piece has, whatever the sizes of the call."""
    with ExitStack() as stack:
        yield lambda chunks: stack.enter_context(cutting(chunks))


def test_only_calls_that_leave_the_device_idle_are_cut() -> None:
    h100 = 132

    def chunks(batch: int, tokens: int, heads: int, sub_steps: int = 1, value_dim: int = 128) -> int:
        return piece_chunks(batch, -(-tokens // (64 // sub_steps)), heads, value_dim, h100)

    assert chunks(1, 32768, 16) == 64  # 8 pieces, 256 programs
    assert chunks(1, 32768, 16, sub_steps=3) == 196  # of 1561 chunks
    assert chunks(1, 16384, 8) == 16  # 16 pieces
    assert chunks(1, 8192, 8) == chunks(1, 16384, 4) == 8  # no shorter than that
    assert chunks(2, 8192, 16) == 32
    assert chunks(1, 8192 - 64, 8) == 0
    for batch, tokens, heads in ((3, 32768, 16), (8, 2048, 16), (32, 2048, 8), (1, 32768, 64)):
        assert chunks(batch, tokens, heads) == 0


def test_packed_rows_are_cut_where_documents_are_longer_than_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_split, "_device", lambda _: (132, True))
    q, k = torch.empty(1, 32768, 16, 1), torch.empty(1, 32768, 1, 16, 1)

    def pieces(documents: int) -> int:
        cut = find_cut(q, k, 128, (torch.empty(documents + 1),))
        return 0 if cut is None else cut.pieces

    assert (pieces(1), pieces(7), pieces(8), pieces(1000)) == (9, 15, 0, 0)


@pytest.mark.parametrize(
    ("hopper", "dim", "cut"), [(False, 128, True), (False, 256, False), (True, 256, True)]
)
def test_wide_keys_are_cut_where_shared_memory_holds_a_transition(
    monkeypatch: pytest.MonkeyPatch, hopper: bool, dim: int, cut: bool
) -> None:
    monkeypatch.setattr(sequence_split, "_device", lambda _: (132, hopper))
    q, k = torch.empty(1, 32768, 4, dim), torch.empty(1, 32768, 1, 4, dim)
    assert (find_cut(q, k, dim, ()) is not None) is cut


@pytest.mark.parametrize("cu_seqlens", [None, (0, 0, 3, 60, 60, 130, 150, 150), (0, 150)])
@pytest.mark.parametrize("chunks", [1, 3])
def test_pieces_lie_end_to_end(
    cut_into: Callable[[int], None], cu_seqlens: tuple[int, ...] | None, chunks: int
) -> None:
    cut_into(chunks)
    batch, length, sub_steps, chunk_tokens = (2 if cu_seqlens is None else 1), 150, 4, 16
    q, k = torch.empty(batch, length, 1, 8), torch.empty(batch, length, sub_steps, 1, 8)
    bounds, offsets, row_chunks = (), None, -(-length // chunk_tokens)
    segments = list(pairwise(cu_seqlens or (0, length, 2 * length)))
    first_chunk = [0]
    for start, end in segments:
        first_chunk.append(first_chunk[-1] + -(-(end - start) // chunk_tokens))
    if cu_seqlens is not None:
        bounds, offsets = (torch.tensor(cu_seqlens, device=DEVICE),), torch.tensor(first_chunk, device=DEVICE)
    sizes = {"cu_seqlens": bounds[0] if bounds else None, "chunk_offsets": offsets}
    sizes |= {"T": length, "NT": row_chunks, "C": chunk_tokens, "PACKED": bool(bounds)}
    sizes |= {"GATED": False, "L2NORM": False}
    pieces = Pieces(q.to(DEVICE), k.to(DEVICE), 8, bounds, sizes)

    expected, owners = [], []
    for number, ((start, end), chunk) in enumerate(zip(segments, first_chunk, strict=False)):
        firsts = list(range(start, end, chunks * chunk_tokens)) or [start]
        expected += [(first, chunk + (first - start) // chunk_tokens) for first in firsts]
        owners += [number] * len(firsts)
    spare = pieces.count - len(expected)
    assert 0 <= spare <= len(segments)
    ends = [first for first, _ in expected] + [segments[-1][1]] * (spare + 1)
    assert pieces.arguments["cu_seqlens"][: pieces.count + 1].tolist() == ends
    assert pieces.arguments["chunk_offsets"][: len(expected)].tolist() == [chunk for _, chunk in expected]
    numbers, out = torch.arange(pieces.count, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    pieces.first(numbers, out)
    assert out.tolist() == [owners.index(s) for s in range(len(segments))]
    pieces.last(numbers, out)
    assert out.tolist() == [len(owners) - 1 - owners[::-1].index(s) for s in range(len(segments))]


@pytest.mark.skipif(not INTERPRETED, reason="the GPU tests cover these")
@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        (Case(sub_steps=16, tokens=13, batch=2, gated=UNGATED), 1),
        (Case(sub_steps=3, tokens=100, key_dim=24, value_dim=80, gated=UNGATED), 2),
        (Case(sub_steps=8, tokens=40, states=False), 1),
        (Case(sub_steps=4, tokens=108, cu_seqlens=(0, 0, 17, 18, 40, 40, 108)), 2),
        (Case(sub_steps=8, tokens=40, cu_seqlens=(0, 32, 33, 40), gated=UNGATED, l2norm=False), 1),
        (Case(sub_steps=8, tokens=60, inputs="resets"), 2),
        (Case(sub_steps=4, tokens=140, inputs="fast decay", states=False), 2),
        (Case(sub_steps=8, tokens=24, inputs="correlated", key_dim=32), 1),
    ],
    ids=str,
)
def test_interpreted_fp32(case: Case, chunks: int, cut_into: Callable[[int], None]) -> None:
    cut_into(chunks)
    check(case, uniform(2e-5), "cpu")


@pytest.mark.skipif(not INTERPRETED, reason="the GPU tests cover these")
@pytest.mark.parametrize("inputs", ["resets", "fast decay", "random"])
def test_decays_are_looked_at_in_a_part_of_a_long_piece(
    inputs: str, cut_into: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_kernels, "WINDOW", tl.constexpr(2))
    cut_into(3)
    check(Case(sub_steps=16, tokens=34, inputs=inputs), uniform(2e-5), "cpu")


def test_keys_of_any_norm(cut_into: Callable[[int], None]) -> None:
    (q, k, v, beta, g, state), do, dstate = make_inputs(Case(sub_steps=8, tokens=40, l2norm=False), DEVICE)
    k = k * torch.linspace(0.5, 1.4, 40, device=DEVICE)[:, None, None, None]
    outputs = []
    for chunks in (0, 1):
        cut_into(chunks)
        leaves = [x.clone().requires_grad_() for x in (q, k, v, beta / 2, g - 4, state)]
        results = delta_product(
            *leaves[:5], initial_state=leaves[5], output_final_state=True, backend="triton"
        )
        torch.autograd.backward(results, (do, dstate))
        outputs.append([x.detach() for x in (*results, *(leaf.grad for leaf in leaves))])
    for whole, cut in zip(*outputs, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("recompute", [False, True])
def test_cut_inference_and_recomputation_equal_training(
    recompute: bool, cut_into: Callable[[int], None]
) -> None:
    cut_into(1)
    (q, k, v, beta, g, state), do, _ = make_inputs(Case(sub_steps=8, tokens=30), DEVICE)
    assert find_cut(q, k, v.shape[-1], ()).pieces == 4
    kwargs = {"initial_state": state, "output_final_state": True, "qk_l2norm": True, "backend": "triton"}
    k.requires_grad_()
    trained = delta_product(q, k, v, beta, g, **kwargs)
    (expected,) = torch.autograd.grad(trained[0], k, do)
    if recompute:
        again = delta_product(q, k, v, beta, g, **kwargs, recompute=True)
        assert torch.equal(torch.autograd.grad(again[0], k, do)[0], expected)
    else:
        with torch.no_grad():
            again = delta_product(q, k, v, beta, g, **kwargs)
    assert torch.equal(trained[0], again[0]) and torch.equal(trained[1], again[1])


def test_a_cut_call_compiles_to_one_graph(cut_into: Callable[[int], None]) -> None:
    cut_into(1)
    torch._dynamo.reset()
    (q, k, v, beta, g, state), do, _ = make_inputs(Case(sub_steps=16, tokens=14), DEVICE)
    k.requires_grad_()

    kwargs = {"initial_state": state, "qk_l2norm": True, "backend": "triton"}
    eager, _ = delta_product(q, k, v, beta, g, **kwargs)
    compiled, _ = torch.compile(delta_product, fullgraph=True, backend="aot_eager")(
        q, k, v, beta, g, **kwargs
    )
    assert torch.equal(compiled, eager)
    expected, actual = (torch.autograd.grad(o, k, do)[0] for o in (eager, compiled))
    assert torch.equal(actual, expected)


GPU_CASES = [
    *((real(key_dim=d, value_dim=d, sub_steps=n), 2) for d in (64, 128, 256) for n in (1, 2, 3)),
    *((real(key_dim=d, value_dim=d, sub_steps=n, gated=UNGATED), 1) for d in (64, 128) for n in (1, 2, 3)),
    (real(key_dim=256, value_dim=256, gated=UNGATED, l2norm=False), 1),
    (real(key_dim=96, value_dim=48, sub_steps=2, gated=UNGATED), 1),
    (real(key_dim=64, value_dim=192), 1),
    (real(key_dim=128, value_dim=256, sub_steps=4, l2norm=False), 2),
    (real(tokens=1000, gated=UNGATED, states=False), 4),
    (real(batch=1, cu_seqlens=(0, 0, 64, 65, 200, 200, 333, 333), sub_steps=2), 1),
    (real(batch=1, cu_seqlens=(0, 1, 333), gated=UNGATED), 2),
    (real(inputs="resets", sub_steps=2), 3),
    (real(inputs="fast decay", tokens=700), 2),
    (real(inputs="zero beta"), 2),
    (real(inputs="no writes", scale=1e10), 1),
    (real(inputs="tiny beta", states=False), 1),
    (real(inputs="resets", sub_steps=7, tokens=1300, heads=1), 70),
]
GPU_CASES += [(real(tokens=1000, inputs="small beta", gated=UNGATED, l2norm=n), 1) for n in (True, False)]
GPU_HARD = [(real(inputs=name), BF16_HARD) for name in ("correlated", "repeated")]
GPU_HARD += [(real(inputs="correlated", gated=UNGATED), BF16_HARD)]
GPU_HARD += [(real(inputs="ones", gated=UNGATED, scale=1.0), BF16_EQUAL)]
GPU_DTYPES = [
    (real(dtype=dtype, key_dim=dim, value_dim=dim, sub_steps=2), bound)
    for dtype, bound in ((torch.float16, 2e-3), (torch.float32, 2e-5))
    for dim in (64, 128)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "chunks"), GPU_CASES, ids=str)
def test_gpu_bf16(case: Case, chunks: int, cut_into: Callable[[int], None]) -> None:
    cut_into(chunks)
    check(case, bounds_of(case), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "bounds"), GPU_HARD, ids=str)
def test_gpu_hard_inputs(case: Case, bounds: dict[str, float], cut_into: Callable[[int], None]) -> None:
    cut_into(1)
    check(case, bounds, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "bound"), GPU_DTYPES, ids=str)
def test_gpu_other_dtypes(case: Case, bound: float, cut_into: Callable[[int], None]) -> None:
    cut_into(1)
    check(case, uniform(bound), "cuda")
