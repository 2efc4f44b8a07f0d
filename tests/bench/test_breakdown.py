"""The parts of a training step: traces with known contents, and the names of the kernels there are."""

import ast
import re
from pathlib import Path

import pytest
import torch

from fla_train.bench.breakdown import breakdown, cpu_kind, gpu_kind, gpu_time_by_kind
from fla_train.kernels.delta_product import delta_product
from fla_train.models.loss import linear_cross_entropy

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def launched_kernels(folder: str) -> set[str]:
    """Names of the Triton functions that a folder launches: `name[grid](...)`, `run_kernel(name, ...)`."""
    launched = set()
    for file in (KERNELS / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Subscript(value=kernel)):
                    launched |= names(kernel)
                case ast.Call(func=ast.Name(id="run_kernel"), args=[kernel, *_]):
                    launched |= names(kernel)
    return {name for name in launched if name.endswith("_kernel")}


def names(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def test_every_kernel_of_ours_has_its_kind() -> None:
    operator, fused_ops = launched_kernels("delta_product"), launched_kernels("fused_ops")
    assert len(operator) >= 4 and len(fused_ops) >= 3
    assert {name: gpu_kind(name) for name in operator} == dict.fromkeys(operator, "operator")
    others = {
        "consume": "loss",
        "linear_step": "matmuls",
        "mixer_step": "operator",
        "attention_step": "operator",
    }
    expected = {name: others.get(name.removesuffix("_kernel"), "elementwise") for name in fused_ops}
    assert {name: gpu_kind(name) for name in fused_ops} == expected


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN", "matmuls"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16>", "matmuls"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "operator"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<Meta<2>, CopyFunctor<c10::BFloat16, float>>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "elementwise"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "operator"),
        ("something new", "other"),
    ],
)
def test_kernels_of_others(kernel: str, kind: str) -> None:
    assert gpu_kind(kernel) == kind


def test_gpu_time_is_that_of_kernels_and_copies() -> None:
    def event(category: str, name: str, microseconds: float) -> dict:
        return {"ph": "X", "cat": category, "name": name, "ts": 0, "dur": microseconds, "tid": 7}

    events = [
        event("kernel", "chunk_fwd_kernel", 1500),
        event("kernel", "chunk_fwd_kernel", 500),
        event("kernel", "sm90_xmma_gemm_bf16", 3000),
        event("gpu_memcpy", "Memcpy DtoD", 250),
        event(
            "gpu_user_annotation", "Optimizer.step#AdamW.step", 9000
        ),  # spans kernels that count themselves
        event("cpu_op", "aten::mm", 9000),
        {"ph": "i", "name": "[memory]"},
    ]
    assert gpu_time_by_kind(events) == {"operator": 2.0, "matmuls": 3.0, "copies": 0.25}


def test_cpu_time_counts_each_moment_once() -> None:
    x = torch.randn(300, 300)
    assert breakdown(lambda: [x @ x for _ in range(50)], torch.device("cpu")).keys() <= {"matmuls", "other"}


def test_cpu_kinds() -> None:
    assert cpu_kind(["Optimizer.step#AdamW.step", "aten::_fused_adamw_"]) == "optimizer"
    assert cpu_kind(["_LinearCrossEntropy", "aten::mm"]) == "matmuls"
    assert cpu_kind(["_LinearCrossEntropy", "aten::log_softmax"]) == "loss"
    assert cpu_kind(["MulBackward0"]) == "other"


def test_a_step_of_ours_falls_into_its_parts() -> None:
    """Operator, a product, loss and optimizer: each kind is there."""
    q, k, v = (torch.randn(1, 64, *sizes, 8, requires_grad=True) for sizes in ((2,), (1, 2), (1, 2)))
    beta, head = torch.rand(1, 64, 1, 2), torch.randn(50, 16, requires_grad=True)
    mix = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW([q, k, v, head, *mix.parameters()], fused=True)

    def step() -> None:
        o, _ = delta_product(q, k, v, beta, qk_l2norm=True, backend="chunk")
        linear_cross_entropy(mix(o.flatten(-2)).flatten(0, 1), head, torch.arange(64) % 50).backward()
        optimizer.step()

    times = breakdown(step, torch.device("cpu"))
    assert {"operator", "matmuls", "elementwise", "loss", "optimizer"} <= times.keys()
    assert all(milliseconds > 0 for milliseconds in times.values())
    assert not re.search("communication|copies", " ".join(times))
