"""What the operator accepts, what it says when it does not, and which backend it picks."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fla_train.kernels.delta_product import delta_product, delta_product_step, resolve_backend
from tests.kernels.helpers import differentiable, random_inputs

B, T, N, H, K, V = 2, 6, 3, 2, 8, 5
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def valid() -> dict:
    return random_inputs(T, N, alpha=(0.5, 1.0), initial_state=True, dtype=torch.float32)


def packed(*bounds: int, dtype: torch.dtype = torch.int32) -> dict:
    inputs = random_inputs(T, N, documents=(0, T), dtype=torch.float32)
    inputs["cu_seqlens"] = torch.tensor(bounds, dtype=dtype)
    return inputs


@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_shapes_and_dtypes_of_the_results(backend, dtype):
    inputs = random_inputs(T, N, alpha=(0.5, 1.0), dtype=dtype)
    o, state = delta_product(**inputs, output_final_state=True, backend=backend)
    assert o.shape == (B, T, H, V) and o.dtype == dtype
    assert state.shape == (B, H, K, V)
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert delta_product(**inputs, backend=backend)[1] is None


def test_scale_defaults_to_the_inverse_root_of_the_key_dimension():
    inputs = valid()
    torch.testing.assert_close(delta_product(**inputs)[0], delta_product(**inputs, scale=K**-0.5)[0])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(B, T, K), r"q has shape \[2, 6, 8\], expected 4 axes \[B, T, H, K\]"),
        ("k", torch.zeros(B, T, H, K), r"k has shape .*, expected 5 axes \[B, T, N, H, K\]"),
        ("k", torch.zeros(B, T, N, H, K + 1), r"k has shape .*: axis K of .* is 9, expected 8"),
        ("k", torch.zeros(B, T, 0, H, K), r"k has shape .*: axis N of .* is 0, expected at least 1"),
        ("v", torch.zeros(B, T, N + 1, H, V), r"v has shape .*: axis N of .* is 4, expected 3"),
        ("v", torch.zeros(B, T, N, H, V).half(), r"v is torch.float16, expected torch.float32"),
        ("beta", torch.zeros(B, T, N, H, 1), r"beta has shape .*, expected 4 axes \[B, T, N, HV\]"),
        ("beta", torch.zeros(B, T, N, 2 * H), r"axis HV of .* is 4, expected 2"),
        ("q", torch.zeros(B, T, 4, K), r"axis H of .* is 2, expected 4"),
        ("beta", torch.zeros(B, T, N, H).bfloat16(), r"beta is torch.bfloat16, expected torch.float32"),
        ("beta", torch.full((B, T, N, H), 2.5), r"beta lies in \[2.5, 2.5\], expected \[0, 2\]"),
        ("beta", torch.full((B, T, N, H), -0.1), r"beta lies in .*, expected \[0, 2\]"),
        ("g", torch.zeros(B, T, N, H), r"g has shape .*, expected 3 axes \[B, T, HV\]"),
        ("g", torch.zeros(B, T, H).double(), r"g is torch.float64, expected torch.float32"),
        ("g", torch.full((B, T, H), 0.1), r"g reaches 0.1, expected a log decay <= 0"),
        ("g", torch.zeros(B, T, H, device="meta"), r"g is on meta, expected cpu"),
        (
            "initial_state",
            torch.zeros(B, H, V, K),
            r"initial_state has shape .*, expected .* = \[2, 2, 8, 5\]",
        ),
        (
            "initial_state",
            torch.zeros(B, H, K, V).half(),
            r"initial_state is torch.float16, expected torch.float32",
        ),
        ("initial_state", torch.zeros(B, H, K, V, device="meta"), r"initial_state is on meta, expected cpu"),
        ("scale", float("nan"), r"scale is nan, expected a finite number"),
        ("scale", torch.tensor(0.5, requires_grad=True), "gradient"),
    ],
)
def test_a_wrong_argument_is_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        delta_product(**{**valid(), name: value})


def test_value_heads_are_a_multiple_of_key_heads():
    inputs = random_inputs(T, N, heads=3)
    inputs |= {name: inputs[name][..., :2, :] for name in "qk"}
    with pytest.raises(ValueError, match=r"v has 3 heads .* multiple of H = 2"):
        delta_product(**inputs)


def test_an_integer_query_is_refused():
    inputs = valid() | {"q": torch.zeros(B, T, H, K, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"q is torch.int64, expected one of"):
        delta_product(**inputs)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, T], "cu_seqlens is a list"),
        (torch.tensor([0]), r"cu_seqlens has shape \[1\], expected \[S \+ 1\]"),
        (torch.tensor([[0, T]]), r"cu_seqlens has shape \[1, 2\], expected \[S \+ 1\]"),
        (torch.tensor([0.0, T]), r"cu_seqlens is torch.float32, expected torch.int32 or torch.int64"),
        (torch.tensor([0, T - 1]), r"cu_seqlens runs from 0 to 5, expected non-decreasing from 0 to T = 6"),
        (torch.tensor([1, T]), r"cu_seqlens runs from 1 to 6"),
        (torch.tensor([0, 4, 3, T]), r"expected non-decreasing"),
        (torch.tensor([0, T], device="meta"), r"cu_seqlens is on meta, expected cpu"),
    ],
)
def test_wrong_document_boundaries_are_named(cu_seqlens, message):
    with pytest.raises(ValueError, match=message):
        delta_product(**{**packed(0, T), "cu_seqlens": cu_seqlens})


def test_packed_documents_lie_in_one_row():
    inputs = valid() | {"cu_seqlens": torch.tensor([0, T])}
    with pytest.raises(ValueError, match=r"cu_seqlens .* batch 1, not 2"):
        delta_product(**inputs)


def test_initial_states_are_counted_by_document():
    inputs = packed(0, 2, T) | {"initial_state": torch.zeros(1, H, K, V)}
    with pytest.raises(ValueError, match=r"initial_state has shape .* = \[2, 2, 8, 5\]"):
        delta_product(**inputs)


def test_boundaries_may_be_int64():
    o32, _ = delta_product(**packed(0, 2, T))
    o64, _ = delta_product(**packed(0, 2, T, dtype=torch.int64))
    assert torch.equal(o32, o64)


def test_a_nan_is_the_callers_to_find():
    inputs = valid()
    inputs["beta"][0, 0, 0, 0] = torch.nan
    assert delta_product(**inputs)[0].isnan().any()


def test_the_step_checks_its_arguments_too():
    inputs = valid()
    step = {name: inputs[name][:, 0] for name in ("q", "k", "v", "beta", "g")}
    state = inputs["initial_state"]
    o, new = delta_product_step(**step, state=state)
    assert o.shape == (B, H, V) and new.shape == state.shape
    with pytest.raises(ValueError, match=r"k has shape .*, expected 4 axes \[B, N, H, K\]"):
        delta_product_step(**{**step, "k": inputs["k"]}, state=state)
    with pytest.raises(ValueError, match=r"state has shape \[1, 2, 8, 5\], expected .* = \[2, 2, 8, 5\]"):
        delta_product_step(**step, state=state[:1])
    with pytest.raises(ValueError, match="backend='fast' is unknown"):
        delta_product_step(**step, state=state, backend="fast")


def test_backend_is_the_argument_then_the_variable_then_the_device(monkeypatch):
    monkeypatch.delenv("FLA_TRAIN_BACKEND", raising=False)
    assert resolve_backend("auto", CPU) == "chunk"
    assert resolve_backend("auto", torch.device("cuda")) == "triton"
    monkeypatch.setenv("FLA_TRAIN_BACKEND", "recurrent")
    assert resolve_backend("auto", CPU) == "recurrent"
    assert resolve_backend("chunk", CPU) == "chunk"
    for unset in ("auto", ""):
        monkeypatch.setenv("FLA_TRAIN_BACKEND", unset)
        assert resolve_backend("auto", CPU) == "chunk"


def test_an_unknown_backend_is_named_with_its_source(monkeypatch):
    with pytest.raises(ValueError, match="backend='fast' is unknown: choose auto, recurrent, chunk, triton"):
        delta_product(**valid(), backend="fast")
    monkeypatch.setenv("FLA_TRAIN_BACKEND", "quick")
    with pytest.raises(ValueError, match="FLA_TRAIN_BACKEND='quick' is unknown"):
        delta_product(**valid())


def test_triton_without_a_gpu_raises_and_never_falls_back(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="'triton' needs a CUDA device, got cpu"):
        delta_product(**valid(), backend="triton")


def test_importing_the_operator_does_not_import_triton():
    program = "import sys, fla_train.kernels.delta_product; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


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
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("backend", ["chunk", "triton"])
def test_autocast_and_activation_checkpointing_change_nothing(backend, checkpointed):
    leaves, call = differentiable_call(backend)
    do = torch.randn_like(call()[0])
    expected = torch.autograd.grad(call()[0], leaves, do)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        o, _ = checkpoint(call, use_reentrant=False) if checkpointed else call()
        found = torch.autograd.grad(o, leaves, do)
    assert o.dtype == torch.float32 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("used", [0, 1], ids=["outputs", "final state"])
def test_gradients_when_only_one_output_is_used(backend, used):
    found = []
    for name in (backend, "recurrent"):
        leaves, call = differentiable_call(name, output_final_state=True)
        loss = call()[used].square().sum()
        found.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_state_may_be_carried_in_place(backend):
    """The backward pass reads no values of the initial state, so that it may be overwritten before."""
    inputs = random_inputs(30, 2, alpha=(0.5, 1.0), initial_state=True, dtype=torch.float32)
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


class Shapes(TorchDispatchMode):
    """Records the shapes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Size] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        self.seen += [x.shape for x in tensors if isinstance(x, torch.Tensor)]
        return result


@pytest.mark.usefixtures("by_chunks")
@pytest.mark.parametrize("backend", ["chunk", "triton"])
def test_a_state_without_gradient_costs_none(backend):
    """Its gradient is made where it is asked for only; the others are the same to the bit."""
    made, found = {}, {}
    for asked in (True, False):
        inputs = random_inputs(
            30, 2, key_dim=16, value_dim=24, alpha=(0.5, 1.0), initial_state=True, dtype=torch.float32
        )
        inputs = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        leaves = differentiable(inputs)
        state = inputs["initial_state"].requires_grad_(asked)
        o, final = delta_product(**inputs, backend=backend, output_final_state=True)
        with Shapes() as shapes:
            o.square().sum().backward()
        made[asked] = shapes.seen.count(state.shape)
        found[asked] = [x.grad for x in leaves if x is not state]
        assert (state.grad is not None) == asked and final.shape == state.shape
    assert made[True] > made[False] == 0
    assert all(map(torch.equal, found[True], found[False]))


def differentiable_call(backend, **options):
    inputs = random_inputs(30, 2, key_dim=16, value_dim=16, alpha=(0.5, 1.0), dtype=torch.float32)
    inputs = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    leaves = differentiable(inputs)
    return leaves, lambda: delta_product(**inputs, backend=backend, **options)
