"""Valid and invalid arguments of the operator, its choice of the backend, and recomputation."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fla_train.kernels.delta_product import delta_product, delta_product_step, resolve_backend
from tests.kernels.helpers import differentiable, random_inputs

B, T, N, H, K, V = 2, 6, 3, 2, 8, 5
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def valid() -> dict:
    return random_inputs(T, N, alpha=(0.5, 1.0), initial_state=True, dtype=torch.float32)


@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_shapes_and_dtypes_of_the_results(backend, dtype):
    inputs = random_inputs(T, N, alpha=(0.5, 1.0), dtype=dtype)
    o, state = delta_product(**inputs, output_final_state=True, backend=backend)
    assert o.shape == (B, T, H, V) and o.dtype == dtype
    assert state.shape == (B, H, K, V)
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert delta_product(**inputs, backend=backend)[1] is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(B, T, K), r"q has shape \[2, 6, 8\], expected 4 axes \[B, T, H, K\]"),
        ("v", torch.zeros(B, T, N + 1, H, V), r"v has shape .*: axis N of .* is 4, expected 3"),
        ("v", torch.zeros(B, T, N, H, V).half(), r"v is torch.float16, expected torch.float32"),
        ("beta", torch.full((B, T, N, H), 2.5), r"beta lies in \[2.5, 2.5\], expected \[0, 2\]"),
        ("g", torch.full((B, T, H), 0.1), r"g reaches 0.1, expected a log decay <= 0"),
        ("initial_state", torch.zeros(B, H, V, K), r"initial_state has shape .* = \[2, 2, 8, 5\]"),
        ("scale", torch.tensor(0.5, requires_grad=True), "gradient"),
    ],
)
def test_a_wrong_argument_is_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        delta_product(**{**valid(), name: value})


@pytest.mark.parametrize("bounds", [[0, T - 1], [0, 4, 3, T]])
def test_wrong_document_boundaries_are_named(bounds):
    inputs = random_inputs(T, N, documents=(0, T), dtype=torch.float32)
    with pytest.raises(ValueError, match="T = 6"):
        delta_product(**inputs | {"cu_seqlens": torch.tensor(bounds)})


def test_the_step_checks_its_arguments_too():
    inputs = valid()
    step, state = {name: inputs[name][:, 0] for name in ("q", "v", "beta", "g")}, inputs["initial_state"]
    with pytest.raises(ValueError, match=r"k has shape .*, expected 4 axes \[B, N, H, K\]"):
        delta_product_step(**step, k=inputs["k"], state=state)
    with pytest.raises(ValueError, match=r"state has shape \[1, 2, 8, 5\], expected .* = \[2, 2, 8, 5\]"):
        delta_product_step(**step, k=inputs["k"][:, 0], state=state[:1])


def test_backend_is_the_argument_then_the_variable_then_the_device(monkeypatch):
    monkeypatch.delenv("FLA_TRAIN_BACKEND", raising=False)
    assert resolve_backend("auto", CPU) == "chunk"
    assert resolve_backend("auto", torch.device("cuda")) == "triton"
    monkeypatch.setenv("FLA_TRAIN_BACKEND", "recurrent")
    assert resolve_backend("auto", CPU) == "recurrent"
    assert resolve_backend("chunk", CPU) == "chunk"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for backend, message in (("triton", "needs a CUDA device, got cpu"), ("fast", "is unknown")):
        with pytest.raises(ValueError, match=message):
            resolve_backend(backend, CPU)


@pytest.mark.parametrize("backend", ["chunk", "triton"])
def test_recompute_keeps_the_inputs_only_and_changes_no_gradient(backend):
    def run(recompute):
        kept = 0

        def count(tensor):
            nonlocal kept
            kept += tensor.numel()
            return tensor

        leaves, call = differentiable_call(backend, recompute=recompute)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            o, _ = call()
        return kept, torch.autograd.grad(o.square().sum(), leaves)

    kept, gradients = run(recompute=False)
    kept_by_recompute, again = run(recompute=True)
    assert kept_by_recompute == 0 < kept  # `checkpoint` holds the arguments outside the graph
    assert all(map(torch.equal, gradients, again))


@pytest.mark.usefixtures("by_chunks")
@pytest.mark.parametrize(("backend", "checkpointed"), [("chunk", False), ("triton", True)])
def test_autocast_and_activation_checkpointing_change_nothing(backend, checkpointed):
    leaves, call = differentiable_call(backend)
    do = torch.randn_like(call()[0])
    expected = torch.autograd.grad(call()[0], leaves, do)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        o, _ = checkpoint(call, use_reentrant=False) if checkpointed else call()
        found = torch.autograd.grad(o, leaves, do)
    assert o.dtype == torch.float32 and all(map(torch.equal, found, expected))


def test_a_state_may_be_carried_in_place(backend):
    """The backward pass reads no values of the initial state, so that it may be overwritten before."""
    inputs = random_inputs(9, 2, alpha=(0.5, 1.0), initial_state=True, dtype=torch.float32)
    inputs = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    leaves, state = differentiable(inputs)[:-1], inputs["initial_state"].detach()
    found = []
    for carried in (False, True):
        o, final = delta_product(
            **inputs | {"initial_state": state}, output_final_state=True, backend=backend
        )
        if carried:
            state.copy_(final.detach())
        found.append(torch.autograd.grad(o.square().sum(), leaves))
    assert all(map(torch.equal, *found))


def differentiable_call(backend, **options):
    inputs = random_inputs(9, 2, key_dim=16, value_dim=16, alpha=(0.5, 1.0), dtype=torch.float32)
    inputs = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    leaves = differentiable(inputs)
    return leaves, lambda: delta_product(**inputs, backend=backend, **options)
