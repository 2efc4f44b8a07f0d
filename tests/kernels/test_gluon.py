"""The Gluon kernels: they compile for Hopper anywhere, and are right on a Hopper GPU."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from fla_train.bench.implementations import make_problem, operator
from fla_train.bench.measure import errors, forward_backward
from fla_train.bench.roofline import Shape
from fla_train.kernels.delta_product import check_backend
from fla_train.kernels.delta_product.hopper import bwd_fused
from fla_train.kernels.delta_product.hopper.bwd_fused import LEAST_BUSY, busy, fits
from fla_train.kernels.delta_product.hopper.common import described
from fla_train.kernels.delta_product.selfcheck import CASES
from fla_train.kernels.delta_product.triton.launch_table import IN_GLUON, forced, lookup
from fla_train.kernels.delta_product.triton.sequence_split import cutting, piece_chunks
from fla_train.kernels.sizes import ceil_div
from tests.kernels.compiled_gluon import HOPPER, Compiled, Variant, compile_for_hopper
from tests.kernels.helpers import pretend_hopper
from tests.kernels.operator_cases import BF16, HARD, Case, bounds_of, check, real, uniform

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SM_MEMORY = 227 * 1024  # bytes of shared memory that a Hopper SM gives a program
VARIANTS = [
    Variant(name, dim, steps, packed, gated, heads=8)
    for name in ("gradient", "prepare", "reverse")
    for dim, steps, packed, gated in ((128, 1, False, True), (64, 3, True, False))
] + [Variant("reverse", 128, 3, False, True, heads=8)]


@pytest.fixture(scope="module")
def compiled() -> dict[Variant, Compiled]:
    return compile_for_hopper(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_compiles_for_hopper_anywhere(variant: Variant, compiled: dict[Variant, Compiled]) -> None:
    dim, found = variant.dim, compiled[variant]
    programs = 5 if variant.name == "prepare" else 1  # that share an SM
    assert found.shared <= SM_MEMORY // programs
    columns = {
        # E dS', dV S and dO S over V; dV E^T and E dO^T over V; K Q^T and K K^T over K; four over 64 rows.
        "gradient": 5 * dim + 2 * dim + 4 * 64,
        # K K^T, Q Q^T and Q K^T over K; X L X on five levels, three in the Newton step, over 64 rows.
        "prepare": 3 * dim + (5 * 2 + 3) * 64,
        # dS' K^T (for the last chunk, and for those before), E dS', dV S, dO S, E dO^T, K Q^T, E dV^T, K K^T
        # over K or V; dE X, dV K and four over 64 rows; dO P and dO Q over a chunk's tokens, rounded up.
        "reverse": 9 * dim + 6 * 64 + 2 * (64 if variant.steps == 1 else 32),
    }
    assert found.products == columns[variant.name] // 16
    # Spilled addresses have cost a quarter of the backward pass (docs/kernels.md, "Speed").
    assert found.stack <= (80 if variant.steps == 1 else 128)


def test_matrices_that_begin_anywhere_are_described() -> None:
    apart = torch.randn(2 * 64 * 64 + 1).bfloat16()[1:].view(64, 2, 64)
    assert apart.is_contiguous() and apart.data_ptr() % 16
    named = described({"q": apart, "scale": 1.0}, rows=("q",))
    assert named["q"].base.data_ptr() % 16 == 0 and named["scale"] == 1.0
    assert torch.equal(named["q"].base, apart) and named["q"].block_shape == [64, 64]
    assert (named["q"].shape, named["q"].strides) == ([64, 128], [128, 1])


@pytest.mark.parametrize(
    ("programs", "share"), [(132, 1.0), (256, 256 / 264), (128, 128 / 132), (133, 133 / 264), (1, 1 / 132)]
)
def test_share_of_the_processors_that_work(programs: int, share: float) -> None:
    assert busy(programs, 132) == pytest.approx(share)


@pytest.mark.parametrize(
    ("programs", "taken"), [(128, True), (116, True), (90, False), (256, True), (140, False)]
)
def test_whole_backward_is_for_a_busy_device(monkeypatch, programs: int, taken: bool) -> None:
    pretend_hopper(monkeypatch, processors=132)
    assert fits({"q": torch.empty(0), "K": 128, "V": 128}, programs) is taken
    assert not fits({"q": torch.empty(0), "K": 128, "V": 64}, programs)


WHOLE, PARTS = ("prepare", "reverse"), ("prepare", "gradient")


def check_with_gluon(case, bounds, monkeypatch, kernels=PARTS) -> None:
    launched = []
    monkeypatch.setattr(bwd_fused, "LEAST_BUSY", 0.0 if "reverse" in kernels else 2.0)
    for name in {*WHOLE, *PARTS}:
        module = import_module(f"fla_train.kernels.delta_product.{HOPPER[name]}")

        def launch(*args, name=name, run=module.launch, **kwargs) -> None:
            launched.append(name)
            run(*args, **kwargs)

        monkeypatch.setattr(module, "launch", launch)
    device = torch.device("cuda")
    present = lookup(device, case.dtype, case.key_dim, case.value_dim, case.sub_steps)
    options = {name: getattr(present, name) | {"gluon": 1} for name in IN_GLUON}
    with forced(replace(present, **options)):
        check(case, bounds, "cuda")
    assert set(launched) == set(kernels if case.l2norm else kernels[1:])


hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, WHOLE], ids=["parts", "whole"])
@pytest.mark.parametrize(("l2norm", "states"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sub_steps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dim", [64, 128])
def test_gpu(dim, sub_steps, gated, l2norm, states, kernels, monkeypatch) -> None:
    """Training normalises, and has no states: the second."""
    sizes = {"key_dim": dim, "value_dim": dim, "sub_steps": sub_steps}
    case = real(**sizes, gated=gated, l2norm=l2norm, states=states)
    check_with_gluon(case, bounds_of(case), monkeypatch, kernels)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, WHOLE], ids=["parts", "whole"])
@pytest.mark.parametrize("sub_steps", [1, 3])
@pytest.mark.parametrize("tokens", [1, 63, 65, 1000])
def test_gpu_lengths(tokens, sub_steps, kernels, monkeypatch) -> None:
    check_with_gluon(real(tokens=tokens, sub_steps=sub_steps), BF16, monkeypatch, kernels)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, WHOLE], ids=["parts", "whole"])
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("sub_steps", [1, 2, 3])
def test_gpu_packed(sub_steps, states, kernels, monkeypatch) -> None:
    bounds = (0, 0, 64, 65, 200, 200, 333, 333)
    case = real(batch=1, cu_seqlens=bounds, sub_steps=sub_steps, states=states)
    check_with_gluon(case, BF16, monkeypatch, kernels)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, WHOLE], ids=["parts", "whole"])
@pytest.mark.parametrize(
    ("case", "piece"),
    [
        *((real(key_dim=d, value_dim=d, sub_steps=n), 2) for d in (64, 128) for n in (1, 2, 3)),
        *((real(sub_steps=n, gated=False, states=n > 1), 1) for n in (1, 2, 3)),
        (real(batch=1, cu_seqlens=(0, 0, 64, 65, 200, 200, 333, 333), sub_steps=2), 1),
        (real(inputs="resets"), 2),
        (real(inputs="fast decay", tokens=700), 2),
        (real(tokens=1000, gated=False, l2norm=False), 3),
    ],
    ids=str,
)
def test_gpu_pieces(case, piece, kernels, monkeypatch) -> None:
    with cutting(piece):
        check_with_gluon(case, bounds_of(case), monkeypatch, kernels)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, WHOLE], ids=["parts", "whole"])
@pytest.mark.parametrize(("case", "bounds"), HARD, ids=lambda x: x.inputs if isinstance(x, Case) else "")
def test_gpu_hard_inputs(case, bounds, kernels, monkeypatch) -> None:
    check_with_gluon(case, bounds, monkeypatch, kernels)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, WHOLE], ids=["parts", "whole"])
def test_gpu_more_chunks_than_processors_and_fp16(kernels, monkeypatch) -> None:
    case = real(tokens=700, heads=16, dtype=torch.float16)
    check_with_gluon(case, uniform(2e-3), monkeypatch, kernels)


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """Programs of each launch of the whole backward, which go on to be run."""
    found, launch = [], bwd_fused.launch

    def spy(arguments, programs: int) -> None:
        found.append(programs)
        launch(arguments, programs)

    monkeypatch.setattr(bwd_fused, "launch", spy)
    return found


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_busy_cases_of_the_check_run_the_whole_backward(dtype, launched) -> None:
    cases = [case for case in CASES if case.busy]
    report = check_backend("triton", "cuda", dtype, cases=cases)
    assert report.ok, report.summary()
    assert len(launched) == len(cases)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "tokens", "heads"), [(32, 2048, 8), (1, 32768, 16)])
def test_gpu_the_shapes_that_are_timed(launched, batch: int, tokens: int, heads: int) -> None:
    """By the rules as they stand, every SM at work; the same bits twice. The second is cut into pieces."""
    shape = Shape(batch=batch, tokens=tokens, heads=heads, key_dim=128, value_dim=128, substeps=1, gated=True)
    device = torch.device("cuda")
    problem = make_problem(shape, torch.bfloat16, device, norm=True, seed=torch.initial_seed())
    found, again = (forward_backward(operator, problem) for _ in range(2))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    pieces = 1 if batch > 1 else ceil_div(tokens, 64 * piece_chunks(1, tokens // 64, heads, 128, processors))
    assert bool(launched) == (busy(batch * pieces * heads, processors) >= LEAST_BUSY)
    for name, x in found.items():
        assert torch.equal(x, again[name]), f"{name} differs from run to run"
    for name, error in errors(operator, problem).items():
        assert error <= BF16[name], f"{name}: relative error {error:.1e} > {BF16[name]:.1e}"
