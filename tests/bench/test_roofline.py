"""FLOP and byte counts of the operator: against a chunk computed by hand while torch counts its products, and
against figures worked out earlier for K = V = 128, M = 64, bf16 (3.0 TB/s, 790 TFLOP/s)."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fla_train.bench.roofline import (
    CHUNK,
    Ceilings,
    Shape,
    backward_bytes,
    backward_flops,
    forward_bound,
    forward_bytes,
    forward_flops,
    known_ceilings,
    link_bandwidth,
    measured_ceilings,
    training_bound,
)
from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.selfcheck import Case, make_inputs, relative_rms
from fla_train.models import build_config
from fla_train.models.flops import flops_per_token

NUM_HOUSEHOLDER = pytest.mark.parametrize("num_householder", [1, 2, 3, 4])
H100 = Ceilings(790e12, 3.0e12, "measured")


def shape(num_householder: int, **sizes: object) -> Shape:
    return replace(Shape(8, 4096, 16, 128, 128, num_householder, gated=True), **sizes)


@NUM_HOUSEHOLDER
def test_counts_equal_those_of_a_chunk_computed_by_hand(num_householder: int) -> None:
    """One chunk of 6 tokens, a state before it. The results are the recurrence's: no product is missing."""
    tokens, key_dim, value_dim = 6, 7, 5
    rows = tokens * num_householder
    case = Case("chunk", tokens, num_householder, alpha=(0.6, 1.0), initial_state=True, qk_l2norm=False)
    call = {
        name: x[:1].requires_grad_() if isinstance(x, torch.Tensor) else x
        for name, x in make_inputs(case, torch.float64, (key_dim, value_dim), seed=0, heads=1).items()
    }
    o, final = delta_product(**call, scale=1.0, output_final_state=True, backend="recurrent")
    do, dS1 = torch.randn_like(o), torch.randn_like(final)
    tensors = [call[name] for name in ("q", "k", "v", "initial_state")]
    expected = torch.autograd.grad([o, final], tensors, [do, dS1])

    q, S = call["q"][0, :, 0].detach(), call["initial_state"][0, 0].detach()
    k, v = (call[name].detach().reshape(rows, -1) for name in ("k", "v"))
    beta, total = call["beta"].detach().reshape(rows, 1), call["g"].detach()[0, :, 0].cumsum(0)
    of = torch.arange(rows) // num_householder
    start, end = total[of].exp()[:, None], (total[-1] - total[of]).exp()[:, None]
    decay = (total[of][:, None] - total[of]).exp().tril(-1)
    query_decay = (total[:, None] - total[of]).exp() * (of <= torch.arange(tokens)[:, None])
    dS, dO = dS1[0, 0], do[0, :, 0]
    with FlopCounterMode(display=False) as forward:
        T = torch.linalg.inv(torch.eye(rows, dtype=S.dtype) + beta * decay * (k @ k.T))  # counted as n M^2/3
        P = query_decay * (q @ k.T)
        U = T @ (beta * (v - start * (k @ S)))
        out = total.exp()[:, None] * (q @ S) + P @ U
        after = total[-1].exp() * S + k.T @ (end * U)
    with FlopCounterMode(display=False) as backward:
        P = query_decay * (q @ k.T)
        W = v - start * (k @ S)
        U = T @ (beta * W)
        dU = end * (k @ dS) + P.T @ dO
        dW = beta * (T.T @ dU)
        dL = -((dW / beta) @ U.T).tril(-1) * beta * decay
        dP = query_decay * (dO @ U.T)
        dq = total.exp()[:, None] * (dO @ S.T) + dP @ k
        dk = end * (U @ dS.T) - start * (dW @ S.T) + dP.T @ q + (dL + dL.T) @ k
        dS0 = total[-1].exp() * dS + q.T @ (total.exp()[:, None] * dO) - k.T @ (start * dW)
    results = [out[None, :, None], after[None, None], dq, dk, dW, dS0]
    for result, reference in zip(results, [o, final, *expected], strict=True):
        assert relative_rms(result.reshape(reference.shape), reference) < 1e-12

    sizes = Shape(1, tokens, 1, key_dim, value_dim, num_householder, gated=True)
    solve = rows**3 / 3
    assert forward.get_total_flops() + solve == pytest.approx(tokens * forward_flops(sizes, chunk=rows))
    assert backward.get_total_flops() == pytest.approx(tokens * backward_flops(sizes, chunk=rows))


@pytest.mark.parametrize(
    ("num_householder", "forward_kflop", "backward_kflop", "inferring", "training", "backward", "bound_ns"),
    [
        (1, 165, 377, 1032, 1672, 2448, 1.37),
        (2, 265, 606, 1548, 2828, 4120, 2.31),
        (3, 365, 836, 2064, 3984, 5792, 3.25),
        (4, 464, 1065, 2580, 5140, 7464, 4.19),
    ],
)
def test_known_figures(
    num_householder, forward_kflop, backward_kflop, inferring, training, backward, bound_ns
) -> None:
    sizes = shape(num_householder)
    assert forward_flops(sizes) / 1e3 == pytest.approx(forward_kflop, abs=0.5)
    assert backward_flops(sizes) / 1e3 == pytest.approx(backward_kflop, abs=0.5)
    assert forward_bytes(sizes, keep=False) == inferring
    assert forward_bytes(sizes, keep=True) == training
    assert backward_bytes(sizes) == backward
    assert training_bound(sizes, H100) / sizes.token_heads * 1e9 == pytest.approx(bound_ns, rel=0.005)


@NUM_HOUSEHOLDER
def test_bytes_are_those_of_the_tensors(num_householder: int) -> None:
    sizes = shape(num_householder, batch=2, tokens=48, heads=3, key_dim=32, value_dim=16)
    rows = (sizes.batch, sizes.tokens)
    q = torch.empty(*rows, sizes.heads, sizes.key_dim, dtype=torch.bfloat16)
    k = torch.empty(*rows, num_householder, sizes.heads, sizes.key_dim, dtype=torch.bfloat16)
    v = torch.empty(*rows, num_householder, sizes.heads, sizes.value_dim, dtype=torch.bfloat16)
    o = torch.empty(*rows, sizes.heads, sizes.value_dim, dtype=torch.bfloat16)
    beta, g = torch.empty(*rows, num_householder, sizes.heads), torch.empty(*rows, sizes.heads)
    total = sum(x.nbytes for x in (q, k, v, o, beta, g))
    assert forward_bytes(sizes, keep=False) * sizes.token_heads == total
    ungated = replace(sizes, gated=False)
    assert forward_bytes(ungated, keep=False) * sizes.token_heads == total - g.nbytes

    chunks = sizes.tokens * num_householder / CHUNK * sizes.batch * sizes.heads  # of CHUNK Householder steps
    kept = 2 * chunks * (CHUNK**2 + sizes.key_dim * sizes.value_dim)
    assert forward_bytes(sizes, keep=True) * sizes.token_heads == pytest.approx(total + kept)
    gradients = 2 * sum(x.nbytes for x in (q, k, v, beta, g)) + o.nbytes
    assert backward_bytes(sizes) * sizes.token_heads == pytest.approx(gradients + kept)


@NUM_HOUSEHOLDER
def test_the_model_counts_its_operator_alike(num_householder: int) -> None:
    """Two models that differ in the number of heads by the operator, whose projections can be told apart."""
    base = {
        "hidden_size": 64,
        "num_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "vocab_size": 100,
        "num_householder": num_householder,
        "use_short_conv": False,
    }
    config = build_config(base)
    sizes = Shape(1, 1, 1, config.head_dim, config.head_v_dim, num_householder, config.use_forget_gate)
    projections = config.hidden_size * config.num_heads
    projections *= (
        config.head_dim * (1 + num_householder) + config.head_v_dim * (num_householder + 1) + num_householder
    )
    projections += (
        config.hidden_size
        * config.num_heads
        * (config.use_forget_gate + config.head_v_dim * config.use_output_gate)
    )
    weights = projections + 3 * config.hidden_size * config.intermediate_size + 100 * config.hidden_size
    operator = flops_per_token(config, 64) - 6 * weights
    assert operator == pytest.approx(config.num_heads * (forward_flops(sizes) + backward_flops(sizes)))


def test_bounds_are_the_longer_of_the_two_times() -> None:
    sizes = shape(2)
    by_memory = Ceilings(1e30, 1e12, "given")
    assert forward_bound(sizes, by_memory) == sizes.token_heads * forward_bytes(sizes, keep=False) / 1e12
    by_products = Ceilings(1e12, 1e30, "given")
    assert forward_bound(sizes, by_products) == sizes.token_heads * forward_flops(sizes) / 1e12


def test_ceilings_are_known_by_the_device_or_measured() -> None:
    h200 = known_ceilings("NVIDIA H200", torch.bfloat16)
    assert (h200.flops, h200.bandwidth) == (989.4e12, 4.8e12)
    assert known_ceilings("NVIDIA H100 80GB HBM3", torch.float16).bandwidth == 3.35e12
    for other in ("NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA H200 NVL", "NVIDIA GH200 480GB"):
        assert known_ceilings(other, torch.bfloat16) is None and link_bandwidth(other) is None
    assert link_bandwidth("NVIDIA H200") == 4.5e11 and link_bandwidth("NVIDIA A40") is None
    assert known_ceilings("NVIDIA H100 80GB HBM3", torch.float32) is None
    assert known_ceilings("cpu", torch.bfloat16) is None
    here = measured_ceilings(torch.device("cpu"), torch.float32)
    assert 1e8 < here.flops < 1e14
    assert 1e8 < here.bandwidth < 1e13
