"""Under torch.compile: one graph without a break, the numbers of the eager call, and sound registrations."""

from collections.abc import Callable

import pytest
import torch
from helpers import differentiable, random_inputs
from torch import Tensor

from fla_train.kernels.delta_product import delta_product, delta_product_step
from fla_train.kernels.fused_ops import (
    add_rms_norm,
    consume_logits,
    recurrence_gates,
    rms_norm,
    rotary,
    selective_scan,
    short_convolution,
    swiglu_linear,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(function: Callable, dynamic: bool = False) -> Callable:
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)


def outputs_and_gradients(function: Callable, leaves: list[Tensor]) -> list[Tensor]:
    outputs = [x for x in function() if x is not None]
    loss = sum(
        (x.double() * torch.arange(x.numel(), device=x.device).view(x.shape).sin()).sum() for x in outputs
    )
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def assert_same(function: Callable, leaves: list[Tensor], dynamic: bool = False) -> None:
    found = outputs_and_gradients(compiled(function, dynamic), leaves)
    for actual, expected in zip(found, outputs_and_gradients(function, leaves), strict=True):
        assert torch.equal(actual, expected)


def operator_inputs(
    tokens: int, dtype: torch.dtype = torch.float32, **case: object
) -> tuple[dict, list[Tensor]]:
    inputs = random_inputs(tokens, 2, heads=1, dtype=dtype, **case)
    inputs = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    return inputs, differentiable(inputs)


GATED, PACKED = {"alpha": (0.5, 1.0), "initial_state": True}, {"documents": (0, 0, 3, 9)}


@pytest.mark.parametrize(
    ("backend", "case"),
    [("chunk", PACKED), ("triton by chunks", GATED), ("triton step by step", PACKED)],
    indirect=["backend"],
)
def test_the_operator(backend, case):
    inputs, leaves = operator_inputs(9, **case)
    assert_same(lambda: delta_product(**inputs, output_final_state=True, backend=backend), leaves)


@pytest.mark.parametrize("backend", ["triton by chunks"], indirect=True)
def test_the_number_of_tokens_may_vary_in_one_graph(backend):
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(delta_product, fullgraph=True, backend=count, dynamic=True)
    for tokens in (6, 11, 7):  # no other axis has these sizes
        inputs, _ = operator_inputs(tokens, alpha=(0.5, 1.0))
        expected = delta_product(**inputs, backend=backend)[0]
        torch.testing.assert_close(run(**inputs, backend=backend)[0], expected, rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1


FUSED_OPS = {
    "rms_norm with gate": lambda x, y, w: [rms_norm(x, w[0], 1e-6, gate=y, backend="triton")],
    "add_rms_norm": lambda x, y, w: add_rms_norm(x, y, w[0], 1e-6, dtype=torch.float16, backend="triton"),
    "swiglu": lambda x, y, w: [swiglu_linear(x * w[0], y, w, backend="triton")],
    "convolution": lambda x, y, w: short_convolution((x + y)[None], w.mT[:, None], backend="triton"),
    "rotary": lambda x, y, w: rotary(
        *((z * w[0]).view(1, -1, 1, 8) for z in (x, y)),
        *(z[:, :4].detach() for z in (x, y)),
        backend="triton",
    ),
    "gates": lambda x, y, w: recurrence_gates(x, y, w[0], w[1], beta_max=2.0, backend="triton"),
    "selective scan": lambda x, y, w: [
        selective_scan(
            x[None], y[None].sigmoid(), w.mT.exp(), x[None, :, :4], y[None, :, 4:], backend="triton"
        )
    ],
}


@pytest.mark.parametrize("name", FUSED_OPS)
def test_a_fused_op(name):
    """Sizes may vary here; tests/models/test_model_compile.py compiles a model with fixed sizes."""
    x, y, w = (torch.randn(rows, 8, device=DEVICE, requires_grad=True) for rows in (5, 5, 4))
    assert_same(lambda: FUSED_OPS[name](x, y, w), [x, y, w], dynamic=True)


@torch.no_grad()
def test_functions_without_gradients():
    logits, targets = torch.randn(4, 9, device=DEVICE), torch.tensor([3, -100, 0, 8], device=DEVICE)
    inputs, _ = operator_inputs(1, alpha=(0.5, 1.0), initial_state=True)
    token = {name: inputs[name][:, 0] for name in ("q", "k", "v", "beta", "g")}
    options = {"state": inputs["initial_state"], "qk_l2norm": True, "backend": "triton"}
    for function in (
        lambda: delta_product_step(**token, **options),
        lambda: consume_logits(logits * 2, targets, with_gradient=True, backend="triton"),
    ):
        for actual, expected in zip(compiled(function)(), function(), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(("documents", "transposed"), [(None, True), ((0, 2, 5), False)])
def test_the_registration_of_the_chunk_backend_is_sound(documents, transposed):
    inputs, _ = operator_inputs(5, alpha=(0.5, 1.0), initial_state=True, documents=documents)
    if transposed:  # in memory
        for name in ("q", "k", "v", "beta", "g"):
            inputs[name] = inputs[name].transpose(1, -1).contiguous().transpose(1, -1)
    outputs = delta_product(**inputs, output_final_state=True, backend="chunk")
    names = ("q", "k", "v", "beta", "g", "initial_state", "cu_seqlens")
    tensors = [inputs[name] for name in names]
    torch.library.opcheck(torch.ops.fla_train.chunk.default, (*tensors, 1.0, True))
    kept = [None if x is None else x.detach() for x in tensors]
    gradients = [x.detach() for x in outputs]
    torch.library.opcheck(torch.ops.fla_train.chunk_backward.default, (*gradients, kept, 1.0, True))
