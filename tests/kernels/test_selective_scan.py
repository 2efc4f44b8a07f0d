"""The selective scan against its recurrence in fp64, token after token, by both backends."""

import pytest
import torch
from torch import Tensor

from fla_train.kernels.fused_ops import selective_scan
from fla_train.kernels.fused_ops.selective_scan import SPAN

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(batch: int, tokens: int, channels: int, size: int) -> list[Tensor]:
    """u, dt, rate, b, c; time steps so long that signed transitions are below 0."""
    torch.manual_seed(tokens + channels)
    u, b, c = (torch.randn(batch, tokens, n) for n in (channels, size, size))
    dt, rate = torch.rand(batch, tokens, channels) * 2, torch.rand(channels, size) + 0.1
    return [x.to(DEVICE) for x in (u, dt, rate, b, c)]


def recurrence(u: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, signed: bool) -> Tensor:
    h, outputs = 0.0, []
    for t in range(u.shape[1]):
        a = torch.exp(-dt[:, t, :, None] * rate)
        h = (2 * a - 1 if signed else a) * h + (dt[:, t] * u[:, t])[..., None] * b[:, t, None]
        outputs.append((h * c[:, t, None]).sum(-1))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("sizes", "signed"),
    [((2, 9, 5, 3), False), ((1, SPAN + 3, 40, 16), True), ((2, SPAN + 1, 3, 1), False)],
    ids=["padded", "two tiles and spans", "one number a state"],
)
def test_outputs_and_gradients(sizes: tuple[int, ...], signed: bool, backend: str) -> None:
    check(inputs(*sizes), backend, signed)


@pytest.mark.gpu
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("sizes", [(3, 300, 300, 16), (64, 70, 256, 16), (2, 130, 33, 64)])
def test_gpu(sizes: tuple[int, ...], signed: bool) -> None:
    check(inputs(*sizes), "triton", signed)


def check(leaves: list[Tensor], backend: str, signed: bool) -> None:
    leaves = [x.requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = recurrence(*exact, signed)
    slope = torch.randn(expected.shape, device=DEVICE)
    y = selective_scan(*leaves, signed=signed, backend=backend)
    found = [y, *torch.autograd.grad(y, leaves, slope)]
    for x, e in zip(found, [expected, *torch.autograd.grad(expected, exact, slope.double())], strict=True):
        assert x.dtype == torch.float32
        assert (x.double() - e).norm() <= 3e-6 * e.norm() + 1e-12


def test_the_definition_in_fp64() -> None:
    leaves = [x.double().requires_grad_() for x in inputs(2, 5, 3, 2)]
    assert torch.autograd.gradcheck(lambda *given: selective_scan(*given, signed=True), leaves)
