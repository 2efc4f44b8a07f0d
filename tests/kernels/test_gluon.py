"""The Gluon kernels: they compile for Hopper anywhere, and are right on a Hopper GPU."""

import re
import struct
from dataclasses import replace

import pytest
import torch
import triton

from fla_train.bench.kernels import make_problem, operator
from fla_train.bench.measure import forward_backward
from fla_train.bench.roofline import Shape
from fla_train.kernels.delta_product import check_backend
from fla_train.kernels.delta_product.hopper import bwd_fused, bwd_qkg, bwd_qkg_wide, prepare_wy
from fla_train.kernels.delta_product.hopper.common import with_tma_descriptors
from fla_train.kernels.delta_product.select import override, select_kernel
from fla_train.kernels.delta_product.selfcheck import CASES
from fla_train.kernels.delta_product.triton.chunk_fwd import MIN_LOG2_DECAY
from fla_train.kernels.delta_product.triton.launch_table import IN_GLUON, Key, lookup
from tests.kernels.compiled_gluon import Compiled, Variant, compile_for_hopper
from tests.kernels.operator_cases import BF16, BF16_HARD, HARD, Case, bounds_of, check, real, uniform

pytestmark = pytest.mark.usefixtures("poisoned_memory")
MODULES = {
    "prepare_wy": prepare_wy,
    "bwd_qkg": bwd_qkg,
    "bwd_qkg_wide": bwd_qkg_wide,
    "bwd_fused": bwd_fused,
}
AVOIDS_PTXAS_FAULT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
SM_MEMORY = 227 * 1024  # bytes of shared memory that a Hopper SM gives a program
VARIANTS = [
    Variant(name, dim, steps, packed, gated, heads=8)
    for name in ("bwd_qkg", "prepare_wy", "bwd_fused")
    for dim, steps, packed, gated in ((128, 1, False, True), (64, 3, True, False))
]
VARIANTS += [Variant("bwd_fused", 128, 3, False, True, heads=8), Variant("prepare_wy", 96, 1, False, True, 8)]
VARIANTS += [
    Variant("bwd_fused", dim, 1, False, True, heads=8, value_dim=value_dim, group=group)
    for dim, value_dim, group in ((128, 128, 2), (64, 128, 1), (128, 64, 1), (128, 256, 1), (96, 192, 1))
]
VARIANTS += [
    Variant("bwd_fused", 96, 1, False, True, heads=8, value_dim=192, launch=launch) for launch in (0, 1)
]
VARIANTS += [
    Variant("bwd_qkg_wide", 256, steps, packed, gated, heads=8)
    for steps, packed, gated in ((1, False, True), (3, True, False))
]
# Triton's `chunk_prepare_wy_kernel`, which wide keys take.
WIDE = [Variant("prepare_wy", 256, steps, packed=False, gated=True, gluon=False) for steps in (1, 2)]


@pytest.fixture(scope="module")
def compiled() -> dict[Variant, Compiled]:
    return compile_for_hopper(VARIANTS + WIDE)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_compiles_for_hopper_anywhere(variant: Variant, compiled: dict[Variant, Compiled]) -> None:
    found = compiled[variant]
    padded = (64, 96, 128) if variant.name == "bwd_fused" else (64, 128)
    value = variant.value_dim or variant.dim
    width = value // -(-value // 128)  # of equal tiles of at most 128
    if variant.launch is not None:
        width = min(128, value - 128 * variant.launch)
    widths = (variant.dim, width)
    dim, tile = (next((size for size in padded if width <= size), 128) for width in widths)
    programs = 5 if variant.name == "prepare_wy" else 1  # that share an SM
    assert found.shared <= SM_MEMORY // programs
    columns = {
        # u dS', dV S and dO S over V; dV u^T and u dO^T over V; K Q^T and K K^T over K; four over 64 rows.
        "bwd_qkg": 5 * dim + 2 * dim + 4 * 64,
        # Of both halves of K: u dS', dV S and dO S over a tile of V (in a loop), and four over 64 rows;
        # dV u^T and u dO^T over V; K Q^T and K K^T over K.
        "bwd_qkg_wide": 2 * (3 + 4) * 64 + 2 * 256 + 2 * 256,
        # K K^T, Q Q^T and Q K^T over K; X L X on five levels, three in the Newton step, over 64 rows.
        "prepare_wy": 3 * dim + (5 * 2 + 3) * 64,
        # dS' K^T (for the last chunk, and for those before), K Q^T and K K^T over K; u dS', dV S, dO S,
        # u dO^T and u dV^T over a tile of V; du T, dV K and four over 64 rows; dO P and dO Q over a chunk's
        # tokens, rounded up.
        "bwd_fused": 4 * dim + 5 * tile + 6 * 64 + 2 * (64 if variant.num_householder == 1 else 32),
    }
    assert found.products == columns[variant.name] // 16
    # Spilled addresses have cost a quarter of the backward pass (docs/dev/kernels.md, "Hopper kernels").
    # Triton 3.9 has ptxas allocate registers in another way (--regAllocOptLevel=2), which spills more.
    spilled = 80 if variant.num_householder == 1 else 128
    spilled = 192 if variant.name == "bwd_qkg_wide" else spilled
    assert found.stack <= spilled + 160 * AVOIDS_PTXAS_FAULT


def test_two_shares_are_added_sixteen_bytes_at_a_time(compiled: dict[Variant, Compiled]) -> None:
    """dq and dk of 64 rows by 256 threads, where two value heads or two tiles of V share them."""
    paired = 0
    for variant, found in compiled.items():
        tiles = -(-(variant.value_dim or variant.dim) // 128)
        pair = variant.name == "bwd_fused" and variant.group * tiles == 2
        pair &= variant.launch in (None, 1)  # the first of two launches stores
        assert found.ptx.count("add.noftz.v8.bf16") == pair * 2 * 64 * 128 // (8 * 256), variant
        paired += pair
    assert paired == 4


def test_matrices_that_begin_anywhere_are_described() -> None:
    apart = torch.randn(2 * 64 * 64 + 1).bfloat16()[1:].view(64, 2, 64)
    assert apart.is_contiguous() and apart.data_ptr() % 16
    tiles = with_tma_descriptors({"q": apart}, rows=("q",))["q"]
    assert tiles.base.data_ptr() % 16 == 0
    assert torch.equal(tiles.base, apart) and tiles.block_shape == [64, 64]
    assert (tiles.shape, tiles.strides) == ([64, 128], [128, 1])


def test_no_literal_is_stored_with_stmatrix(compiled: dict[Variant, Compiled]) -> None:
    # ptxas 13.3 to 13.5 store such registers before they set them.
    for variant, found in compiled.items():
        literals = set(re.findall(r"mov\.b32\s+(%r\d+), (?:-?\d+|0f\w+);", found.ptx))
        stored = re.findall(r"stmatrix[^{]*\{([^}]*)\}", found.ptx)
        assert stored or variant.name != "prepare_wy"
        assert not literals & {register for four in stored for register in four.split(", ")}, variant


def test_gates_that_are_nan_stay_so(compiled: dict[Variant, Compiled]) -> None:
    # A maximum of NaN and a number is the number: of a NaN it would make the least gate there is.
    gated = [
        found.ptx for variant, found in compiled.items() if variant.name == "prepare_wy" and variant.gated
    ]
    assert len(gated) > len(WIDE)
    least = f"0f{struct.pack('>f', MIN_LOG2_DECAY.value).hex().upper()}"
    for ptx in gated:
        assert least in ptx and not re.search(rf"max\.f32[^;]*{least}", ptx)


@pytest.mark.parametrize(
    ("programs", "taken"), [(128, True), (116, True), (90, False), (256, True), (140, False)]
)
def test_fused_backward_is_for_a_busy_device(pretend_hopper, programs: int, taken: bool) -> None:
    pretend_hopper(132)

    def is_fused(key_dim: int, value_dim: int, batch: int = programs) -> bool:
        sizes = {"tokens": 64, "heads": 1, "key_dim": key_dim, "value_dim": value_dim}
        return select_kernel("cpu", torch.bfloat16, batch=batch, **sizes).fused_backward

    assert is_fused(128, 128) is is_fused(128, 64) is is_fused(64, 128) is taken
    assert is_fused(128, 256, programs // 2) is is_fused(96, 192, programs // 2) is taken  # V in two tiles
    assert not any(is_fused(*dims) for dims in ((256, 256), (128, 48), (128, 100), (128, 152), (100, 128)))


@pytest.mark.parametrize(
    ("rows", "value_dim", "documents", "group", "launches"),
    [
        (256, 192, 0, 1, 2),  # 512 programs are four waves on 132 multiprocessors, and so are twice 256
        (160, 192, 0, 1, 1),  # three and four
        (128, 144, 0, 1, 2),
        (64, 192, 0, 1, 1),
        (256, 256, 0, 1, 1),  # equal tiles
        (256, 128, 0, 1, 1),
        (256, 192, 256, 1, 1),  # documents may differ in length
        (256, 192, 0, 2, 1),
    ],
)
def test_two_launches_where_values_are_uneven(
    pretend_hopper, rows: int, value_dim: int, documents: int, group: int, launches: int
) -> None:
    pretend_hopper(132)
    sizes = {"tokens": 64, "heads": 1, "key_dim": 96, "value_dim": value_dim}
    batch = 1 if documents else rows
    found = select_kernel("cpu", torch.bfloat16, batch=batch, documents=documents, group=group, **sizes)
    assert found.fused_backward and found.fused_launches == launches


FUSED, PARTS = ("prepare_wy", "bwd_fused"), ("prepare_wy", "bwd_qkg")
DOCUMENTS = {"batch": 1, "cu_seqlens": (0, 0, 64, 65, 200, 200, 333, 333)}


def wide(**changes: object) -> Case:
    return real(**{"key_dim": 256, "value_dim": 256, **changes})


hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
WHOLE = [  # Training normalises, and has no states.
    real(key_dim=d, value_dim=d, num_householder=n, gated=g, l2norm=l2norm, states=states)
    for d in (64, 128)
    for n in (1, 2, 3, 4, 7)
    for g in (True, False)
    for l2norm, states in ((True, True), (True, False), (False, True))
]
BY_SEGMENTS = [  # with the chunks of a segment
    *((real(key_dim=d, value_dim=d, num_householder=n), 2) for d in (64, 128) for n in (1, 2, 3)),
    *((real(num_householder=n, gated=False, states=n > 1), 1) for n in (1, 2, 3)),
    (real(**DOCUMENTS, num_householder=2), 1),
    (real(inputs="resets"), 2),
    (real(inputs="fast decay", tokens=700), 2),
    (real(tokens=1000, gated=False, l2norm=False), 3),
]
OTHER_DIMS = [  # which `bwd_fused` takes, and `bwd_qkg` does not
    *(
        (
            real(
                key_dim=k, value_dim=v, num_householder=n, gated=g, l2norm=g or not s, states=s, group=group
            ),
            None,
        )
        for (k, v), group in (((64, 128), 1), ((128, 64), 2), ((128, 256), 1), ((96, 192), 1), ((80, 72), 4))
        for n in (1, 2, 3)
        for g in (True, False)
        for s in (True, False)
    ),
    (real(**DOCUMENTS, num_householder=2, key_dim=96, value_dim=192, group=2), None),
    (real(**DOCUMENTS, key_dim=96, value_dim=192), None),
    (real(**DOCUMENTS, value_dim=256, group=2), 1),
    (real(tokens=1000, key_dim=96, value_dim=192), 2),
    (real(tokens=150, dtype=torch.float16, key_dim=64, value_dim=256), None),
    (real(inputs="correlated", key_dim=96, value_dim=192), None),
    (real(inputs="repeated", value_dim=256, group=2), None),
]
GROUPED = [
    *((real(num_householder=n, gated=g, group=2, states=g), None) for n in (1, 2, 3) for g in (True, False)),
    (real(key_dim=64, value_dim=64, group=4), None),
    (real(**DOCUMENTS, num_householder=2, group=2), 1),
]
WIDE_KEYS = [
    *(
        (wide(num_householder=n, gated=g, l2norm=l2norm, states=states), None)
        for n in (1, 2, 3, 7)
        for g in (True, False)
        for l2norm, states in ((True, False), (False, True))
    ),
    *((wide(**DOCUMENTS, num_householder=n), None) for n in (1, 2)),
    *((wide(num_householder=n), 2) for n in (1, 3)),
    *((wide(num_householder=n, gated=g, group=2), None) for n, g in ((1, True), (2, False))),
    *((wide(tokens=t), None) for t in (1, 63, 65, 1000)),
    *((wide(inputs=x, num_householder=2), None) for x in ("correlated", "repeated", "resets", "zero beta")),
    (wide(tokens=700, heads=16, dtype=torch.float16), None),
]
GPU_CASES = [
    *((case, bounds_of(case), None) for case in WHOLE),
    *((case, bounds_of(case), chunks) for case, chunks in BY_SEGMENTS),
    *((real(tokens=t, num_householder=n), BF16, None) for t in (1, 63, 65, 1000) for n in (1, 3)),
    *((real(**DOCUMENTS, num_householder=n, states=s), BF16, None) for n in (1, 2, 3) for s in (True, False)),
    *((*hard, None) for hard in HARD),
    (real(tokens=700, heads=16, dtype=torch.float16), uniform(2e-3), None),
]


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, FUSED], ids=["parts", "fused"])
@pytest.mark.parametrize(
    ("case", "bounds", "chunks"), GPU_CASES, ids=lambda x: "" if isinstance(x, dict) else str(x)
)
def test_gpu(case, bounds, chunks, kernels, monkeypatch) -> None:
    run_on_gpu(case, bounds, chunks, kernels, monkeypatch)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, FUSED], ids=["parts", "fused"])
@pytest.mark.parametrize(("case", "chunks"), GROUPED, ids=str)
def test_gpu_grouped_heads(case, chunks, kernels, monkeypatch) -> None:
    run_on_gpu(case, bounds_of(case), chunks, kernels, monkeypatch)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "chunks", "kernels"),
    [(*case, FUSED) for case in OTHER_DIMS] + [(*case, ("bwd_qkg_wide",)) for case in WIDE_KEYS],
    ids=str,
)
def test_gpu_keys_and_values_of_other_widths(case, chunks, kernels, monkeypatch) -> None:
    run_on_gpu(case, bounds_of_any(case), chunks, kernels, monkeypatch)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "chunks"),
    [(case, chunks) for case, chunks in OTHER_DIMS if case.value_dim > 128 and case.group == 1],
    ids=str,
)
def test_gpu_two_launches(case, chunks, launched, monkeypatch) -> None:
    with override(fused_launches=2):
        run_on_gpu(case, bounds_of_any(case), chunks, FUSED, monkeypatch)
    assert len(launched) == 4  # of two backward passes


def bounds_of_any(case: Case) -> dict[str, float]:
    if case.dtype is torch.float16:
        return uniform(2e-3)
    return bounds_of(case) if case.inputs == "random" else BF16_HARD


def run_on_gpu(case, bounds, chunks, kernels, monkeypatch) -> None:
    """Check a case with these Hopper kernels, which must have run."""
    launched = []
    for name, module in MODULES.items():

        def launch(*args, name=name, run=module.launch, **kwargs) -> None:
            launched.append(name)
            run(*args, **kwargs)

        monkeypatch.setattr(module, "launch", launch)
        if hasattr(module, "persistent_programs"):  # few, so that each has several chunks
            monkeypatch.setattr(module, "persistent_programs", lambda work, device: min(work, 3))
    key = Key.of("9.0", case.key_dim, case.value_dim, case.num_householder)
    present, _ = lookup(case.dtype, key)
    options = replace(present, **{name: getattr(present, name) | {"gluon": 1} for name in IN_GLUON})
    with override(options=options, fused_backward="bwd_fused" in kernels, segment_chunks=chunks):
        check(case, bounds, "cuda")
    assert set(launched) == {name for name in kernels if case.l2norm or name != "prepare_wy"}


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """Programs of each launch of the fused backward, which go on to be run."""
    found, launch = [], bwd_fused.launch

    def spy(programs: int, **arguments: object) -> None:
        found.append(programs)
        launch(programs, **arguments)

    monkeypatch.setattr(bwd_fused, "launch", spy)
    return found


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_busy_cases_of_the_check_run_the_fused_backward(dtype, launched) -> None:
    for case in (case for case in CASES if case.busy):
        launched.clear()
        report = check_backend("triton", "cuda", dtype, cases=[case])
        assert report.ok, report.summary()
        assert launched


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dims", "group"),
    [
        (32, 2048, 8, (128, 128), 1),
        (1, 32768, 16, (128, 128), 1),
        (32, 2048, 8, (128, 128), 2),
        (32, 2048, 8, (64, 128), 1),
        (32, 2048, 4, (128, 256), 1),
        (16, 2048, 10, (96, 192), 1),
        (32, 2048, 8, (96, 192), 1),
        (16, 2048, 8, (256, 256), 1),
    ],
)
def test_gpu_the_shapes_that_are_timed(
    launched, batch: int, tokens: int, heads: int, dims: tuple[int, int], group: int
) -> None:
    """By the rules as they stand, every SM at work; the same bits twice. The second is split."""
    shape = Shape(batch, tokens, heads, *dims, num_householder=1, gated=True, group=group)
    device = torch.device("cuda")
    problem = make_problem(shape, torch.bfloat16, device, norm=True, seed=torch.initial_seed())
    found, again = (forward_backward(operator, problem) for _ in range(2))
    sizes = {"batch": batch, "tokens": tokens, "heads": heads, "key_dim": dims[0], "value_dim": dims[1]}
    selection = select_kernel(device, torch.bfloat16, **sizes)
    assert bool(launched) == selection.fused_backward
    assert bool(selection.num_segments) == (batch == 1)
    for name, x in found.items():
        assert torch.equal(x, again[name]), f"{name} differs from run to run"
    for name, error in problem.errors(operator).items():
        assert error <= BF16[name], f"{name}: relative error {error:.1e} > {BF16[name]:.1e}"
