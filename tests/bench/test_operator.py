"""The operator's benchmark: counts of FLOPs and bytes, and kernels that are wrong in one place."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fla_train.bench.kernels import make_problem, ours
from fla_train.bench.measure import Implementation, compare
from fla_train.bench.report import Report
from fla_train.bench.roofline import Ceilings, Shape, backward_bytes, bounds, forward_bytes, kept_bytes
from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.selfcheck import Case, make_inputs, relative_rms
from fla_train.models.layer_sizes import CHUNK, operator_flops

CPU = torch.device("cpu")
NUM_HOUSEHOLDER = pytest.mark.parametrize("num_householder", [1, 3])


@NUM_HOUSEHOLDER
def test_flops_equal_those_of_a_chunk_in_plain_torch(num_householder: int) -> None:
    """Compute one chunk of 6 tokens with an initial state. Equal results show that no product is missing."""
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

    counted = forward.get_total_flops() + rows**3 / 3, backward.get_total_flops()  # with the inverse
    per_token = operator_flops(num_householder, key_dim, value_dim, rows)
    assert counted == pytest.approx([tokens * flops for flops in per_token])


@NUM_HOUSEHOLDER
def test_bytes_are_those_of_the_tensors(num_householder: int) -> None:
    sizes = Shape(2, 48, 3, 32, 16, num_householder, gated=True)
    count = sizes.batch * sizes.tokens * sizes.heads
    rows = (sizes.batch, sizes.tokens)
    q = torch.empty(*rows, sizes.heads, sizes.key_dim, dtype=torch.bfloat16)
    k = torch.empty(*rows, num_householder, sizes.heads, sizes.key_dim, dtype=torch.bfloat16)
    v = torch.empty(*rows, num_householder, sizes.heads, sizes.value_dim, dtype=torch.bfloat16)
    o = torch.empty(*rows, sizes.heads, sizes.value_dim, dtype=torch.bfloat16)
    beta, g = torch.empty(*rows, num_householder, sizes.heads), torch.empty(*rows, sizes.heads)
    total = sum(x.nbytes for x in (q, k, v, o, beta, g))
    assert forward_bytes(sizes) * count == total
    ungated = replace(sizes, gated=False)
    assert forward_bytes(ungated) * count == total - g.nbytes

    chunks = sizes.tokens * num_householder / CHUNK * sizes.batch * sizes.heads  # of CHUNK Householder steps
    kept = 2 * chunks * (CHUNK**2 + sizes.key_dim * sizes.value_dim)
    assert kept_bytes(sizes) * count == pytest.approx(kept)
    gradients = 2 * sum(x.nbytes for x in (q, k, v, beta, g)) + o.nbytes
    assert backward_bytes(sizes) * count == pytest.approx(gradients + kept)


def test_the_longer_of_two_times_bounds() -> None:
    shape = Shape(1, 1, 1, 128, 128, 2, gated=True)
    assert bounds(shape, Ceilings(1e30, 1e12))[0] == forward_bytes(shape) / 1e12
    assert bounds(shape, Ceilings(1e12, 1e30))[0] == operator_flops(2, 128, 128)[0] / 1e12
    # Worked out by hand for K = V = 128 at 790 TFLOP/s and 3.0 TB/s: 2.31 ns per token and head.
    assert bounds(shape, Ceilings(790e12, 3.0e12))[1] * 1e9 == pytest.approx(2.31, rel=0.005)


@pytest.mark.parametrize("change", ["gradient of q", "last head", "late tokens", "nan", "fails"])
def test_a_wrong_kernel_gets_no_time(change: str, monkeypatch) -> None:
    monkeypatch.setattr("fla_train.bench.measure.CPU_SECONDS", 1e-3)

    def run(p):
        q, beta = p.q, p.beta
        if change == "fails":
            raise RuntimeError("no such\ninstruction")
        if change == "gradient of q":
            q = q + (q - q.detach()) * 0.02
        if change in ("last head", "late tokens"):
            mask = torch.ones_like(beta)
            where = (
                (-1, slice(None), slice(None), -1)
                if change == "last head"
                else (slice(None), slice(15, None))
            )
            mask[where] = 0.9
            beta = beta * mask
        o, _ = delta_product(q, p.k, p.v, beta, p.g, qk_l2norm=p.norm, backend="recurrent")
        return o * float("nan") if change == "nan" else o

    shape = Shape(2, 20, 2, 8, 4, 2, gated=True, element_size=4)
    problem = make_problem(shape, torch.float32, CPU, norm=True)
    report = Report({"dtype": "fp32"})
    report.device = CPU
    wrong, right = compare(problem, [Implementation("wrong", run), *ours(["recurrent"])], report)
    said = "RuntimeError: no such instruction" if change == "fails" else "wrong: "
    assert wrong["note"].startswith(said) and "both_ms" not in wrong
    assert right["both_ms"] > 0 and max(right["errors"].values()) < 1e-5
