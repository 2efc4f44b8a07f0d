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
from fla_train.kernels.delta_product import check_backend, select
from fla_train.kernels.delta_product.hopper import bwd_fused, bwd_qkg, bwd_qkg_wide, prepare_wy
from fla_train.kernels.delta_product.hopper.common import with_tma_descriptors
from fla_train.kernels.delta_product.select import override, select_kernel
from fla_train.kernels.delta_product.selfcheck import CASES
from fla_train.kernels.delta_product.triton.chunk_fwd import MIN_LOG2_DECAY
from fla_train.kernels.delta_product.triton.launch_table import IN_GLUON, Key, lookup
from tests.kernels.compiled_gluon import Compiled, Variant, compile_for_hopper
from tests.kernels.operator_cases import BF16, BF16_HARD, HARD, Case, bounds_of, check, real, uniform

pytestmark = pytest.mark.usefixtures("poisoned_memory")
MODULES = {"prepare_wy": prepare_wy, "bwd_qkg": bwd_qkg, "bwd_qkg_wide": bwd_qkg_wide, "bwd_fused": bwd_fused}
AVOIDS_PTXAS_FAULT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
SM_MEMORY = 227 * 1024  # bytes of shared memory that a Hopper SM gives a program
VARIANTS = [
    Variant("bwd_qkg", 128, 1, packed=False, gated=True, heads=8),
    Variant("prepare_wy", 128, 1, packed=False, gated=True, heads=8),
    Variant("bwd_fused", 96, 1, packed=False, gated=True, heads=8, value_dim=192, launch=1),
    Variant("bwd_qkg_wide", 256, 1, packed=False, gated=True, heads=8),
]
MORE_VARIANTS = [
    *(
        Variant(name, 64, 3, packed=True, gated=False, heads=8)
        for name in ("bwd_qkg", "prepare_wy", "bwd_fused")
    ),
    Variant("bwd_fused", 128, 1, packed=False, gated=True, heads=8, group=2),
]
# Triton's `chunk_prepare_wy_kernel`, for keys that are too wide for Hopper's
WIDE = Variant("prepare_wy", 256, 1, packed=False, gated=True, gluon=False)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[Variant, Compiled]:
    """Compile the variants whose tests are selected: each takes seconds."""
    names = " ".join(item.name for item in request.session.items)
    return compile_for_hopper([*VARIANTS, *(v for v in MORE_VARIANTS if str(v) in names), WIDE])


@pytest.mark.parametrize(
    "variant", [*VARIANTS, *(pytest.param(v, marks=pytest.mark.long) for v in MORE_VARIANTS)], ids=str
)
def test_compiles_for_hopper_anywhere(variant: Variant, compiled: dict[Variant, Compiled]) -> None:
    found = compiled[variant]
    programs = 5 if variant.name == "prepare_wy" else 1  # on one SM
    assert found.shared <= SM_MEMORY // programs
    assert "wgmma.mma_async" in found.ptx
    # Spilled addresses have cost a quarter of the backward pass (docs/dev/kernels.md, "Hopper kernels").
    # Triton 3.9 has ptxas allocate registers in another way (--regAllocOptLevel=2), which spills more.
    spilled = 192 if variant.name == "bwd_qkg_wide" else 80 if variant.num_householder == 1 else 128
    assert found.stack <= spilled + 240 * AVOIDS_PTXAS_FAULT


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
    assert len(gated) == 2
    least = f"0f{struct.pack('>f', MIN_LOG2_DECAY.value).hex().upper()}"
    for ptx in gated:
        assert least in ptx and not re.search(rf"max\.f32[^;]*{least}", ptx)


def test_decisions_on_an_h100(monkeypatch) -> None:
    """The fused backward needs a busy device, a split an idle one; two launches are for uneven tiles of V."""
    monkeypatch.setattr(select, "architecture", lambda _: "9.0")
    monkeypatch.setattr(select, "interpreted", lambda: False)
    monkeypatch.setattr(select, "gpu_of", lambda _: (132, True))
    monkeypatch.setattr(select, "processors", lambda _: 132)
    select.clear_caches()

    def decide(batch: int, key_dim: int = 128, value_dim: int = 128, **changes: int) -> select.Selection:
        sizes = {"tokens": 64, "heads": 1, "key_dim": key_dim, "value_dim": value_dim} | changes
        return select_kernel("cpu", torch.bfloat16, batch=batch, **sizes)

    fused = [decide(batch).fused_backward for batch in (128, 116, 90, 256, 140)]
    assert fused == [True, True, False, True, False]
    other_dims = ((128, 64), (128, 256), (96, 192), (256, 256), (128, 48), (128, 152), (100, 128))
    assert [decide(128, *dims).fused_backward for dims in other_dims] == 3 * [True] + 4 * [False]
    # 512 programs of half the width need four waves, and so do twice 256; 320 need three, and twice 160 four.
    assert [decide(batch, 96, 192).fused_launches for batch in (256, 160)] == [2, 1]
    assert decide(256, 96, 256).fused_launches == decide(256, 96, 192, group=2).fused_launches == 1
    long_row = {"tokens": 32768, "heads": 16}
    assert [decide(1, **long_row, documents=n).num_segments for n in (1, 7, 8, 1000)] == [9, 15, 0, 0]
    select.clear_caches()


FUSED, PARTS = ("prepare_wy", "bwd_fused"), ("prepare_wy", "bwd_qkg")
DOCUMENTS = {"batch": 1, "cu_seqlens": (0, 0, 64, 65, 200, 200, 333, 333)}


def wide(**changes: object) -> Case:
    return real(**{"key_dim": 256, "value_dim": 256, **changes})


hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
MODES = ((True, True), (True, False), (False, True))  # l2norm, states; training normalises, without states
# Each case has the chunks of a segment, or None.
EQUAL_DIMS = [
    *(
        (real(key_dim=d, value_dim=d, num_householder=n, gated=g, l2norm=l2norm, states=states), None)
        for d in (64, 128)
        for n in (1, 2, 3, 7)
        for g in (True, False)
        for l2norm, states in MODES
    ),
    *((real(key_dim=d, value_dim=d, num_householder=n), 2) for d in (64, 128) for n in (1, 2, 3)),
    *((real(num_householder=n, gated=False, states=n > 1), 1) for n in (1, 2, 3)),
    *((real(**DOCUMENTS, num_householder=n, states=n > 1), None) for n in (1, 2, 3)),
    (real(**DOCUMENTS, num_householder=2), 1),
    *((real(tokens=t, num_householder=n), None) for t in (1, 63, 65, 1000) for n in (1, 3)),
    (real(inputs="resets"), 2),
    (real(inputs="fast decay", tokens=700), 2),
    (real(tokens=1000, gated=False, l2norm=False), 3),
    (real(tokens=700, heads=16, dtype=torch.float16), None),
    *((real(num_householder=n, gated=g, group=2), None) for n in (1, 3) for g in (True, False)),
    (real(key_dim=64, value_dim=64, group=4), None),
    (real(**DOCUMENTS, num_householder=2, group=2), 1),
]
OTHER_DIMS = [  # `bwd_fused` supports them and `bwd_qkg` does not
    *(
        (real(key_dim=k, value_dim=v, num_householder=n, gated=g, l2norm=g, states=g, group=group), None)
        for (k, v), group in (((64, 128), 1), ((128, 64), 2), ((128, 256), 1), ((96, 192), 1), ((80, 72), 4))
        for n in (1, 3)
        for g in (True, False)
    ),
    (real(**DOCUMENTS, num_householder=2, key_dim=96, value_dim=192, group=2), None),
    (real(**DOCUMENTS, key_dim=96, value_dim=192), None),
    (real(**DOCUMENTS, value_dim=256, group=2), 1),
    (real(tokens=1000, key_dim=96, value_dim=192), 2),
    (real(tokens=150, dtype=torch.float16, key_dim=64, value_dim=256), None),
    (real(inputs="correlated", key_dim=96, value_dim=192), None),
    (real(inputs="repeated", value_dim=256, group=2), None),
]
WIDE_KEYS = [
    *(
        (wide(num_householder=n, gated=g, l2norm=g, states=not g), None)
        for n in (1, 3)
        for g in (True, False)
    ),
    (wide(**DOCUMENTS, num_householder=2), None),
    (wide(num_householder=3), 2),
    (wide(num_householder=2, gated=False, group=2), None),
    *((wide(tokens=t), None) for t in (1, 63, 65, 1000)),
    *((wide(inputs=x, num_householder=2), None) for x in ("correlated", "repeated", "resets", "zero beta")),
    (wide(tokens=700, heads=16, dtype=torch.float16), None),
]


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "chunks", "kernels"),
    [
        *((*case, kernels) for case in EQUAL_DIMS for kernels in (PARTS, FUSED)),
        *((*case, FUSED) for case in OTHER_DIMS),
        *((*case, ("bwd_qkg_wide",)) for case in WIDE_KEYS),
    ],
    ids=str,
)
def test_gpu(case, chunks, kernels, monkeypatch) -> None:
    run_on_gpu(case, bounds_of_any(case), chunks, kernels, monkeypatch)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [PARTS, FUSED], ids=["parts", "fused"])
@pytest.mark.parametrize(("case", "bounds"), HARD, ids=lambda x: "" if isinstance(x, dict) else str(x))
def test_gpu_hard_inputs(case, bounds, kernels, monkeypatch) -> None:
    run_on_gpu(case, bounds, None, kernels, monkeypatch)


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
    return bounds_of(case) if case.inputs in ("random", "resets", "fast decay") else BF16_HARD


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
    """The number of programs of each launch of the fused backward."""
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
        (32, 2048, 4, (128, 256), 1),
        (16, 2048, 10, (96, 192), 1),
        (16, 2048, 8, (256, 256), 1),
    ],
)
def test_gpu_the_shapes_that_are_timed(launched, batch, tokens, heads, dims, group) -> None:
    """With the kernels that `select_kernel` chooses, twice to the same bit. The second shape is split."""
    shape = Shape(batch, tokens, heads, *dims, num_householder=1, gated=True, group=group)
    device = torch.device("cuda")
    problem = make_problem(shape, torch.bfloat16, device, norm=True, seed=torch.initial_seed())
    found, again = (forward_backward(operator, problem) for _ in range(2))
    sizes = {"batch": batch, "tokens": tokens, "heads": heads, "key_dim": dims[0], "value_dim": dims[1]}
    selection = select_kernel(device, torch.bfloat16, **sizes)
    assert bool(launched) == selection.fused_backward and bool(selection.num_segments) == (batch == 1)
    assert [name for name, x in found.items() if not torch.equal(x, again[name])] == []
    assert {name: e for name, e in problem.errors(operator).items() if not e <= BF16[name]} == {}
