"""The operator in stretches, against the float64 recurrence over whole sequences, and what it keeps."""

import pytest
import torch
from helpers import assert_agrees, differentiable, random_inputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.select import override
from fla_train.kernels.delta_product.selfcheck import evaluate

TOKENS = 70
GATED = {"alpha": (0.5, 1.0)}
STATES = GATED | {"initial_state": True}
DOCUMENTS = {"documents": (0, 0, 3, 50, 50, 52, 56, 70, 70)}
CASES = {
    "no gate": {},
    "gate and states": STATES,
    "gates that close": {"alpha": (0.0, 0.2), "closed_every": 5, "initial_state": True},
    "documents": DOCUMENTS,
    "documents with gate and states": DOCUMENTS | STATES,
    "one document": {"documents": (0, 70), **GATED},
    "unit vectors": {"beta": (0.0, 1.0), "qk_l2norm": False},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(inputs: dict) -> dict:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in inputs.items()}


@pytest.mark.parametrize(
    ("substeps", "final_state"), [(1, False), (1, True), (2, True), (3, False), (4, True)]
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_definition_in_float64(case: dict, substeps: int, final_state: bool) -> None:
    inputs = random_inputs(TOKENS, substeps, **case)
    expected = evaluate(inputs, "recurrent", final_state=final_state)
    for tokens in (7, 32, 69):
        found = evaluate(inputs | {"recompute": tokens}, "chunked", final_state=final_state)
        assert_agrees(found, expected, 1e-11)


@pytest.mark.parametrize("documents", [None, (0, 0, 3, 12, 20, 20)], ids=["rows", "documents"])
def test_the_recurrent_backend(documents: tuple[int, ...] | None) -> None:
    inputs = random_inputs(20, 2, documents=documents, **STATES)
    assert_agrees(evaluate(inputs | {"recompute": 8}, "recurrent"), evaluate(inputs, "recurrent"), 1e-13)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("way", ["by chunks", "step by step", "cut into pieces"])
@pytest.mark.parametrize("case", [STATES, DOCUMENTS | GATED], ids=["rows", "documents"])
def test_the_triton_backend(case: dict, way: str, request: pytest.FixtureRequest) -> None:
    if way != "step by step":
        request.getfixturevalue("by_chunks")
    sizes = {"tokens": TOKENS, "substeps": 4, "key_dim": 16, "value_dim": 16, "heads": 1, **case}
    if way == "step by step":  # which the interpreter takes long for
        sizes |= {"tokens": 56, "substeps": 1}
        sizes |= {"documents": DOCUMENTS["documents"][:-2]} if "documents" in case else {}
    inputs = on_device(random_inputs(**sizes, dtype=torch.float32)) | {"recompute": 33}
    expected = evaluate(random_inputs(**sizes), "recurrent")
    with override(segment_chunks=1 if way == "cut into pieces" else 0):
        assert_agrees(evaluate(inputs, "triton"), expected, 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("substeps", [1, 2, 3])
@pytest.mark.parametrize(
    "case", [STATES, {"documents": (0, 0, 64, 65, 300, 333), **GATED}], ids=["rows", "documents"]
)
def test_gpu_bf16(case: dict, substeps: int) -> None:
    inputs = random_inputs(333, substeps, key_dim=128, value_dim=128, dtype=torch.bfloat16, **case)
    exact = {
        name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in inputs.items()
    }
    expected = evaluate(exact, "recurrent")
    for tokens in (128, 200):
        assert_agrees(evaluate(on_device(inputs) | {"recompute": tokens}, "triton"), expected, 1.5e-2)


@pytest.mark.parametrize("tokens", [TOKENS, 1000])
def test_one_stretch_is_the_whole_recomputed(tokens: int) -> None:
    inputs = random_inputs(TOKENS, 2, **STATES)
    found, expected = (evaluate(inputs | {"recompute": value}, "chunked") for value in (tokens, True))
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_without_gradients_there_are_no_stretches() -> None:
    inputs = random_inputs(TOKENS, 2, **STATES)
    with torch.no_grad():
        plain = delta_product(**inputs, output_final_state=True)
        again = delta_product(**inputs, output_final_state=True, recompute=7)
    assert all(map(torch.equal, again, plain))


@pytest.mark.usefixtures("by_chunks")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", ["chunked", "triton"])
@pytest.mark.parametrize("case", [GATED, DOCUMENTS | GATED], ids=["rows", "documents"])
def test_one_state_a_row_is_kept_between_stretches(case: dict, backend: str, compiled: bool) -> None:
    inputs = on_device(random_inputs(TOKENS, 2, heads=1, dtype=torch.float32, **case))
    differentiable(inputs)
    own = {x.untyped_storage().data_ptr() for x in inputs.values() if isinstance(x, Tensor)}
    kept = []

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own and x.is_floating_point() and x.dim():
            kept.append(list(x.shape))
        return x

    def run() -> Tensor:
        return delta_product(**inputs, recompute=32, backend=backend)[0]

    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run()
    rows = 1 if "documents" in case else 2
    assert kept == [[rows, 1, 8, 5]] * 2  # before tokens 32 and 64


@pytest.mark.usefixtures("by_chunks")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_autocast_and_activation_checkpointing_change_nothing(checkpointed: bool) -> None:
    inputs = on_device(random_inputs(30, 2, **GATED))
    leaves = [inputs[name].float().requires_grad_() for name in ("q", "k", "v", "beta", "g")]

    def run() -> Tensor:
        return delta_product(*leaves, qk_l2norm=True, backend="triton")[0]

    do = torch.randn_like(run())
    expected = torch.autograd.grad(run(), leaves, do)
    with torch.autocast(DEVICE, torch.bfloat16):
        o = checkpoint(run, use_reentrant=False) if checkpointed else run()
    found = torch.autograd.grad(o, leaves, do)
    assert o.dtype == torch.float32 and all(map(torch.equal, found, expected))
