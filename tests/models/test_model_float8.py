"""Linear layers in float8: gradients against autograd over rounded numbers, and which layers take part."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla_train.models.activation_checkpointing import checkpoint_activations
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.float8 import Float8Weights
from fla_train.models.layers import GatedMLP, project
from fla_train.models.modeling import DeltaProductForCausalLM
from tests.interpreted_float8 import round_to_nearest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 64, "vocab_size": 160,
    "num_householder": 2, "use_forget_gate": True, "intermediate_size": 256,
}  # fmt: skip


MIXED = {"layer_types": ["linear_attention", "full_attention"]}


class Holder(nn.Module):
    """Layers without a language model around them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def get_output_embeddings(self) -> None:
        return None


def rounded(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """x in bf16, in a float8 format and back, by a scale of a power of two; its gradient passes as it is."""
    top = {torch.float8_e4m3fn: 7, torch.float8_e5m2: 14}[dtype]
    scale = 2.0 ** (top - x.detach().abs().max().double().log2().floor().item())
    return x + ((x.detach().bfloat16() * scale).to(dtype).to(x.dtype) / scale - x.detach())


def half(x: Tensor) -> Tensor:
    """x as it is in bf16."""
    return x.bfloat16().to(x.dtype)


class WithGradient(torch.autograd.Function):
    """x as it is, whose gradient is `change`d."""

    @staticmethod
    def forward(ctx: object, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None


def with_rounded_gradient(x: Tensor) -> Tensor:
    return WithGradient.apply(x, lambda grad: rounded(grad, torch.float8_e5m2))


def assert_same(
    ours: Callable, reference: Callable, x: Tensor, layers: list[nn.Module], bound: float
) -> None:
    """Outputs and gradients in bf16 within `bound` of a reference in fp64."""
    found = []
    for function, dtype in ((ours, torch.float32), (reference, torch.float64)):
        leaf, weights = x.to(dtype).requires_grad_(), [layer.to(dtype).weight for layer in layers]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=function is ours):
            y = function(leaf)
        generator = torch.Generator().manual_seed(0)
        dy = (torch.randn(y.shape, generator=generator) * 1e-3).bfloat16().to(y)
        found.append([y, *torch.autograd.grad(y, [leaf, *weights], dy)])
    for actual, expected in zip(*found, strict=True):
        assert actual.dtype == torch.float32 or actual is found[0][0]
        assert (actual.double() - expected).norm() / expected.norm() < bound


def test_projections_are_products_of_rounded_numbers() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(160, rows, bias=False, device=DEVICE) for rows in (128, 32, 256)]  # 32: stays bf16
    Float8Weights(Holder(*layers))
    x = torch.randn(2, 24, 160, device=DEVICE).bfloat16()

    def reference(x: Tensor) -> Tensor:
        weight = rounded(torch.cat([layers[0].weight, layers[2].weight]))
        first, last = with_rounded_gradient(F.linear(rounded(x), weight)).split([128, 256], -1)
        return torch.cat([first, F.linear(x, layers[1].weight.bfloat16().double()), last], -1)

    assert_same(lambda x: torch.cat(project(x, *layers), -1), reference, x, layers, 4e-3)


def test_an_mlp_is_products_of_rounded_numbers() -> None:
    torch.manual_seed(0)
    mlp = GatedMLP(160, 272, "silu").to(DEVICE)
    Float8Weights(Holder(mlp))
    layers = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    x = torch.randn(2, 24, 160, device=DEVICE).bfloat16()

    def reference(x: Tensor) -> Tensor:
        weight = rounded(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        gate, up = with_rounded_gradient(half(F.linear(rounded(x), weight))).chunk(2, -1)
        y = WithGradient.apply(F.silu(gate) * up, half)
        return with_rounded_gradient(F.linear(rounded(y), rounded(mlp.down_proj.weight)))

    # Tensor cores keep sums in fewer bits, which takes some numbers to the next one in float8.
    assert_same(mlp, reference, x, layers, 4e-3 if DEVICE == "cpu" else 2e-2)


def loss_and_gradients(model: nn.Module, ids: Tensor) -> Tensor:
    """In one vector."""
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())])


def make_model(float8: bool = True, **changes: object) -> DeltaProductForCausalLM:
    torch.manual_seed(0)
    model = DeltaProductForCausalLM(DeltaProductConfig(**(SMALL | changes))).to(DEVICE).train()
    if float8:
        model.float8 = Float8Weights(model)
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(160, (2, 32), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("changes", [{"use_output_gate": True}, MIXED | {"norm_after": "all"}], ids=str)
def test_gradients_of_a_model_are_near_those_in_bf16(ids: Tensor, changes: dict) -> None:
    half, eighth = (loss_and_gradients(make_model(float8, **changes), ids) for float8 in (False, True))
    assert abs(eighth[0] - half[0]) < 1e-2
    assert 2e-2 < distance(eighth[1:], half[1:]) < 0.25


def test_the_kernels_give_nearly_the_same(ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts to bf16 instead of rounding, and takes some numbers to the next one in float8."""
    round_to_nearest(monkeypatch)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is filled with NaN
    found = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("FLA_TRAIN_FUSED_OPS", backend)
        found.append(loss_and_gradients(make_model(num_hidden_layers=1, use_short_conv=False), ids))
    torch.use_deterministic_algorithms(False)
    assert abs(found[0][0] - found[1][0]) < 1e-2
    assert distance(found[1][1:], found[0][1:]) < 0.1


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("mode", [True, "selective"])
def test_activation_checkpointing_changes_nothing(ids: Tensor, mode: bool | str) -> None:
    """But the embedding's gradient by rounding: on a GPU its parts are added in another order, bf16 too."""
    model = make_model()
    expected = loss_and_gradients(model, ids)
    checkpoint_activations(model, mode)
    found = loss_and_gradients(model, ids)
    embedding = model.model.embeddings.weight
    assert next(model.parameters()) is embedding
    after = 1 + embedding.numel()
    assert torch.equal(found[0], expected[0]) and torch.equal(found[after:], expected[after:])
    torch.testing.assert_close(found[1:after], expected[1:after], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("changed", ["mlp.down_proj.weight", "attn.o_norm.weight"])
def test_weights_are_those_of_the_last_cast(ids: Tensor, changed: str) -> None:
    model = make_model()
    first = loss_and_gradients(model, ids)[0]
    with torch.no_grad():
        model.model.layers[0].get_parameter(changed).mul_(2)
    assert torch.equal(loss_and_gradients(model, ids)[0], first)
    model.float8.cast()
    assert not torch.equal(loss_and_gradients(model, ids)[0], first)
