"""`fla-bench fused_ops`: what a case moves, what a row holds, peers by their signatures, and the command."""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.bench import liger
from fla_train.bench.compare import Entry, compare
from fla_train.bench.fused_op_cases import FUNCTIONS, Case, Sizes, make_cases, using
from fla_train.bench.fused_ops import HEADER, bench_case, ours
from fla_train.bench.implementations import Implementation
from fla_train.bench.roofline import Ceilings
from fla_train.cli import bench
from fla_train.kernels.fused_ops.backend import BACKEND_VARIABLE

CPU = torch.device("cpu")
SIZES = Sizes(batch=2, tokens=12, hidden=32, head_dim=8, intermediate=40, vocabulary=50, num_householder=2)
CEILINGS = Ceilings(flops=1e12, bandwidth=1e9, source="given")
ROWS = SIZES.batch * SIZES.tokens
SMALL = ["--batch", "2", "--tokens", "12", "--hidden", "32", "--head-dim", "8", "--vocabulary", "50"]
SMALL += ["--rounds", "1", "--peak-tflops", "1", "--bandwidth", "0.1"]


def cases(*functions: str, dtype: torch.dtype = torch.float32) -> list[Case]:
    return list(make_cases(functions or list(FUNCTIONS), SIZES, dtype, CPU))


def rows_of(case: Case, *implementations: Implementation, dtype: torch.dtype = torch.float32):
    return list(bench_case(case, implementations, dtype, CPU, CEILINGS, rounds=1))


@pytest.mark.parametrize(
    ("function", "index", "elements", "forward", "backward"),
    [  # bytes per element of the table in docs/dev/fused_ops.md
        ("convolution", 1, ROWS * 64, 4, 6),
        ("norm", 0, ROWS * 32, 6, 10),
        ("norm", 1, ROWS * 32, 4, 6),
        ("residual-norm", 0, ROWS * 32, 12, 16),
        ("gated-norm", 0, ROWS * 32, 6, 10),
    ],
)
def test_bytes_are_those_of_the_documented_table(function, index, elements, forward, backward) -> None:
    case = cases(function, dtype=torch.bfloat16)[index]
    weight = case.leaves["weight"].nbytes
    assert case.forward_bytes == forward * elements + weight
    assert case.backward_bytes == backward * elements + 2 * weight  # read, and its gradient written


def test_products_bound_where_they_take_longer_than_bytes() -> None:
    (case,) = cases("cross-entropy")
    product = 2 * ROWS * SIZES.hidden * SIZES.vocabulary
    assert case.bounds(Ceilings(1.0, 1e30, "given")) == pytest.approx((product, 3 * product))
    forward, both = case.bounds(Ceilings(1e30, 1.0, "given"))
    weight, hidden = 4 * SIZES.vocabulary * SIZES.hidden, 4 * ROWS * SIZES.hidden
    assert forward == weight + hidden + 8 * ROWS + 4  # targets, loss
    assert both == forward + weight + hidden + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_definitions_are_within_bounds(dtype: torch.dtype) -> None:
    seen = []
    for case in cases(dtype=dtype):
        (row,) = rows_of(case, *ours(CPU), dtype=dtype)
        assert row.refused is None, row.refused
        assert row.forward_ms > 0 and row.both_ms > 0 and row.memory_bytes > 0
        assert row.both_floor_ms > row.forward_floor_ms > 0
        assert row.output_errors.keys() == case.output_gradients.keys()
        assert row.gradient_errors.keys() == {f"d{name}" for name in case.leaves}
        assert row.markdown().count("|") == HEADER[0].count("|")
        seen.append(row.function)
    assert set(seen) == set(FUNCTIONS)


def test_a_row_holds_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times, memory and errors from known ones; the rest from the case."""
    (case,) = cases("swiglu")
    times = iter([{"off": 2.0}, {"off": 8.0}, {}])
    monkeypatch.setattr("fla_train.bench.compare.median_times", lambda *_: next(times))
    monkeypatch.setattr("fla_train.bench.compare.peak_memory", lambda *_: 3 * 2**20)

    def off(case: Case) -> tuple[Tensor]:
        return (case.run("torch")[0] * (1 + 1e-4),)

    (row,) = rows_of(case, Implementation("off", off))
    assert row.output_errors["y"] == pytest.approx(1e-4, rel=1e-2)
    forward = 4 * (2 * ROWS * 40 + 32 * 40 + ROWS * 32)  # gate, up, weight; y
    backward = 4 * (4 * ROWS * 40 + 2 * 32 * 40 + ROWS * 32)  # gate, up, weight, dy; dgate, dup, dweight
    assert (row.forward_bytes, row.both_bytes) == (forward, forward + backward)
    assert row.forward_floor_ms == pytest.approx(1e3 * forward / 1e9)
    cells = [cell.strip() for cell in row.markdown().split("|")[1:-1]]
    assert cells[:3] == [case.name, "off", "2"] and cells[6] == "8" and cells[10] == "3"
    assert float(cells[5]) == pytest.approx(100 * row.forward_floor_ms / 2, abs=0.05)
    assert float(cells[9]) == pytest.approx(100 * row.both_floor_ms / 8, abs=0.05)
    assert cells[11] == "y 1.0e-04"


@pytest.mark.parametrize("change", ["output", "gradient", "nan"])
def test_a_wrong_kernel_gets_no_speed(change: str) -> None:
    (case,) = cases("gated-norm")

    def wrong(case: Case) -> tuple[Tensor]:
        (y,) = case.run("torch")
        if change == "gradient":
            return (y + 0.01 * (y - y.detach()),)
        return (y * (1.01 if change == "output" else float("nan")),)

    bad, good = rows_of(case, Implementation("bad", wrong), *ours(CPU))
    assert bad.refused.startswith("wrong by")
    assert bad.forward_ms is bad.both_ms is bad.memory_bytes is None
    assert "no speed: wrong by" in bad.markdown()
    assert bad.markdown().count("|") == HEADER[0].count("|")
    assert good.refused is None and good.both_ms > 0


def test_what_is_done_besides_the_kernel_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fla_train.bench.compare.median_times", lambda runs, *_: {name: run() for name, run in runs.items()}
    )
    monkeypatch.setattr("fla_train.bench.compare.peak_memory", lambda *_: 0)
    entries = [
        Entry("alone", lambda: 1.0, lambda: 5.0, dict),
        Entry("restored", lambda: 1.0, lambda: 5.0, dict, aside=lambda: 2.0),
    ]
    found = compare(entries, torch.float32, CPU, rounds=1)
    assert [(x.kernel, x.both_ms) for x in found] == [("alone", 5.0), ("restored", 3.0)]


def test_the_backend_is_asked_for_only_while_a_case_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    with using("torch"):
        assert os.environ[BACKEND_VARIABLE] == "torch"
    assert BACKEND_VARIABLE not in os.environ
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    with pytest.raises(KeyError), using("torch"):
        raise KeyError
    assert os.environ[BACKEND_VARIABLE] == "triton"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger-Kernel's signatures, with PyTorch behind them and its way of overwriting inputs."""

    class SiLUMul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return F.silu(a) * b

        @staticmethod
        def backward(ctx, dc: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            slope = torch.sigmoid(a) * (1 + a * (1 - torch.sigmoid(a)))
            da, db = dc * slope * b, dc * F.silu(a)
            a.data.copy_(da)
            b.data.copy_(db)
            return a.detach(), b.detach()

    def norm(x, weight, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        assert (offset, casting_mode, in_place, row_mode) == (0.0, "llama", False, None)
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_norm(x, residual, weight, eps, offset=0.0, casting_mode="llama", in_place=False):
        return norm(x + residual, weight, eps, offset, casting_mode, in_place), x + residual

    def linear_loss(hidden, weight, target, bias=None, ce_weight=None, ignore_index=-100, *options):
        assert bias is ce_weight is None and options == (0.0, 0.0, "sum", None, False, torch.float32)
        logits = F.linear(hidden, weight).float()
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum"), None, None

    def install(name: str, **functions) -> None:
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        content = {key: SimpleNamespace(apply=function) for key, function in functions.items()}
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)

    install("liger_kernel")
    install("liger_kernel.ops")
    install("liger_kernel.ops.rms_norm", LigerRMSNormFunction=norm)
    install("liger_kernel.ops.fused_add_rms_norm", LigerFusedAddRMSNormFunction=add_norm)
    install("liger_kernel.ops.swiglu", LigerSiLUMulFunction=SiLUMul.apply)
    install("liger_kernel.ops.fused_linear_cross_entropy", LigerFusedLinearCrossEntropyFunction=linear_loss)


def test_peers_are_called_by_their_signatures(stand_in) -> None:
    for case in cases(*liger.IMPLEMENTATIONS, dtype=torch.bfloat16):
        before = {name: x.detach().clone() for name, x in case.leaves.items()}
        found = rows_of(case, *liger.IMPLEMENTATIONS[case.function], *ours(CPU), dtype=torch.bfloat16)
        (peer,) = [row for row in found if row.kernel.startswith("Liger")]
        if "float32 stream" in case.name:
            assert peer.refused == "has one dtype for the stream and the norm"
        else:
            assert peer.refused is None and peer.forward_ms > 0
        assert all(torch.equal(x, before[name]) for name, x in case.leaves.items())


def test_a_missing_peer_is_one_line(capsys, monkeypatch) -> None:
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    bench.run(["fused_ops", *SMALL, "--functions", "norm", "swiglu", "--peers"])
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if "peer" in line] == ["no peer: liger_kernel is not installed"]
    assert "Liger" not in out and out.count("| fla_train torch |") == 2


def test_peers_need_a_gpu(stand_in) -> None:
    assert liger.liger(CPU) == ({}, ["liger_kernel needs a GPU"])
    assert liger.liger(torch.device("cuda")) == (liger.IMPLEMENTATIONS, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has two backends and bf16")
def test_the_command(tmp_path, capsys) -> None:
    file = tmp_path / "fused_ops.json"
    bench.run(["fused_ops", *SMALL, "--num-householder", "2", "--json", str(file)])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    content = json.loads(file.read_text())
    assert content["ceilings"]["bandwidth"] == 1e11 and content["settings"]["hidden"] == 32
    rows = content["rows"]
    assert len(table) == 2 + len(rows) and {row["function"] for row in rows} == set(FUNCTIONS)
    for line, row in zip(table[2:], rows, strict=True):
        assert row["refused"] is None
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert cells[:2] == [row["case"], row["kernel"]]
        assert float(cells[2]) == pytest.approx(row["forward_ms"], rel=1e-3)
        assert float(cells[6]) == pytest.approx(row["both_ms"], rel=1e-3)
    assert "gates, 4 heads, n_h = 2" in table[-2] and "88 to 32" in table[-3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "--tokens: must be at least 1"),
        (["--head-dim", "7"], "no multiple"),
        (["--functions", "attention"], "choose from convolution"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["fla-bench", "fused_ops", *SMALL, *options])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert stop.value.code == 2 and message in capsys.readouterr().err
