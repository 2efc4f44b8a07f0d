"""The definition against matrices written out; both it and `chunk` against transformers and derivatives."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as transformers_rule

from fla_train.kernels.delta_product import chunk_torch, delta_product, delta_product_step
from tests.kernels.helpers import differentiable, random_inputs

BACKENDS = pytest.mark.parametrize("backend", ["recurrent", "chunk"])


def by_matrices(inputs: dict, scale: float) -> tuple[Tensor, Tensor]:
    """S_t = A_t S_{t-1} + B_t with the transition matrix of each token formed explicitly, head by head."""
    q, k, v, beta, g = (inputs[name] for name in ("q", "k", "v", "beta", "g"))
    if inputs["qk_l2norm"]:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    batch, tokens, num_householder, key_heads, key_dim = k.shape
    heads = v.shape[-2]
    o = torch.empty(batch, tokens, heads, v.shape[-1], dtype=q.dtype)
    final = torch.empty(batch, heads, key_dim, v.shape[-1], dtype=q.dtype)
    for b in range(batch):
        for h in range(heads):
            S = torch.zeros(key_dim, v.shape[-1], dtype=q.dtype)
            S = S if inputs["initial_state"] is None else inputs["initial_state"][b, h]
            for t in range(tokens):
                A = torch.eye(key_dim, dtype=q.dtype) * (1.0 if g is None else g[b, t, h].exp())
                B = torch.zeros_like(S)
                for j in range(num_householder):
                    key, step = k[b, t, j, h * key_heads // heads], beta[b, t, j, h]
                    householder = torch.eye(key_dim, dtype=q.dtype) - step * torch.outer(key, key)
                    A, B = householder @ A, householder @ B + step * torch.outer(key, v[b, t, j, h])
                S = A @ S + B
                o[b, t, h] = scale * (S.T @ q[b, t, h * key_heads // heads])
            final[b, h] = S
    return o, final


@pytest.mark.parametrize(
    ("num_householder", "alpha", "initial_state"),
    [(1, None, False), (1, (0.3, 1.0), True), (2, None, True), (3, (0.3, 1.0), False)],
)
def test_equals_the_product_of_transition_matrices(num_householder, alpha, initial_state):
    inputs = random_inputs(9, num_householder, alpha=alpha, initial_state=initial_state)
    found = delta_product(**inputs, scale=0.7, output_final_state=True, backend="recurrent")
    torch.testing.assert_close(found, by_matrices(inputs, 0.7), rtol=1e-12, atol=1e-12)


@BACKENDS
def test_value_heads_share_queries_and_keys(backend, monkeypatch):
    monkeypatch.setattr(chunk_torch, "MAX_CHUNK_STEPS", 8)
    inputs = random_inputs(9, 2, heads=4, alpha=(0.3, 1.0), initial_state=True)
    inputs |= {name: inputs[name][..., ::2, :] for name in "qk"}  # value heads 0, 1 and 2, 3
    o, state = delta_product(**inputs, scale=0.7, output_final_state=True, backend=backend)
    expected = by_matrices(inputs, 0.7)
    torch.testing.assert_close((o, state), expected, rtol=1e-10, atol=1e-10)
    now = {name: inputs[name][:, 0] for name in ("q", "k", "v", "beta", "g")}
    first, _ = delta_product_step(**now, state=inputs["initial_state"], scale=0.7, qk_l2norm=True)
    torch.testing.assert_close(first, expected[0][:, 0], rtol=1e-10, atol=1e-10)
    leaves = differentiable(inputs)
    assert torch.autograd.gradcheck(
        lambda *_: delta_product(**inputs, backend=backend)[0], leaves, fast_mode=True
    )


@BACKENDS
@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_one_householder_step_equals_that_of_transformers(backend, qk_l2norm):
    inputs = random_inputs(
        130, key_dim=16, value_dim=24, alpha=(0.5, 1.0), initial_state=True, qk_l2norm=qk_l2norm,
        dtype=torch.float32,
    )  # fmt: skip
    found = delta_product(**inputs, output_final_state=True, backend=backend)
    expected = getattr(transformers_rule, f"torch_{backend}_gated_delta_rule")(
        inputs["q"],
        inputs["k"][:, :, 0],
        inputs["v"][:, :, 0],
        inputs["g"],
        inputs["beta"][:, :, 0],
        initial_state=inputs["initial_state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=qk_l2norm,
    )
    for actual, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("backend", "documents"), [("recurrent", None), ("chunk", (0, 0, 1, 5))])
def test_gradients_are_numerically_right(backend, documents, monkeypatch):
    monkeypatch.setattr(chunk_torch, "MAX_CHUNK_STEPS", 4)  # several chunks, of two tokens each
    gates = {"alpha": (0.3, 0.9), "beta": (0.1, 1.9)}
    inputs = random_inputs(5, 2, key_dim=3, value_dim=2, initial_state=True, documents=documents, **gates)
    leaves = differentiable(inputs)

    def call(*_: Tensor) -> tuple[Tensor, Tensor]:
        return delta_product(**inputs, output_final_state=True, backend=backend)

    # gradcheck perturbs its arguments in place, and `inputs` holds the same tensors.
    assert torch.autograd.gradcheck(call, leaves)


def test_a_closed_gate_forgets_everything_without_nan():
    inputs = random_inputs(7, 2, alpha=(0.5, 1.0), initial_state=True)
    inputs["g"][:, 3] = -torch.inf
    leaves = differentiable(inputs)
    o, state = delta_product(**inputs, output_final_state=True, backend="recurrent")
    found = torch.autograd.grad(o[:, 3:].sum() + state.sum(), leaves)
    gradients = dict(zip(("q", "k", "v", "beta", "g", "h0"), found, strict=True))
    assert all(x.isfinite().all() for x in gradients.values())
    assert not gradients["g"][:, :4].any() and not gradients["h0"].any() and not gradients["k"][:, :3].any()
    assert gradients["g"][:, 4:].all()
    later = {name: x[:, 3:] if name in ("q", "k", "v", "beta") else x for name, x in inputs.items()}
    later.update(
        g=torch.cat([torch.zeros_like(inputs["g"][:, :1]), inputs["g"][:, 4:]], 1), initial_state=None
    )
    torch.testing.assert_close(delta_product(**later, backend="recurrent")[0], o[:, 3:])


@BACKENDS
def test_packed_documents_equal_separate_calls(backend):
    inputs = random_inputs(
        70, 2, alpha=(0.3, 1.0), initial_state=True, documents=(0, 0, 1, 40, 40, 41, 70, 70), seed=3
    )
    o, state = delta_product(**inputs, output_final_state=True, backend=backend)
    outputs = []
    for i, (start, end) in enumerate(pairwise(inputs["cu_seqlens"].tolist())):
        before = inputs["initial_state"][i : i + 1]
        if start == end:
            assert torch.equal(state[i : i + 1], before)
            continue
        document = {name: inputs[name][:, start:end] for name in ("q", "k", "v", "beta", "g")}
        options = {"output_final_state": True, "qk_l2norm": True, "backend": "recurrent"}
        alone, final = delta_product(**document, initial_state=before, **options)
        torch.testing.assert_close(final, state[i : i + 1])
        outputs.append(alone)
    torch.testing.assert_close(o, torch.cat(outputs, 1))


@pytest.mark.parametrize(("num_householder", "alpha"), [(1, None), (3, (0.3, 1.0))])
def test_steps_equal_the_sequence(num_householder, alpha):
    inputs = random_inputs(12, num_householder, alpha=alpha, initial_state=True)
    expected = delta_product(**inputs, scale=0.3, output_final_state=True, backend="recurrent")
    state, outputs = inputs["initial_state"], []
    for t in range(12):
        gate = None if alpha is None else inputs["g"][:, t]
        before = state.clone()
        tensors = [inputs[name][:, t] for name in ("q", "k", "v", "beta")]
        o, after = delta_product_step(*tensors, gate, state=state, scale=0.3, qk_l2norm=True)
        assert torch.equal(state, before), "the step must leave the state it was given as it was"
        state = after
        outputs.append(o)
    torch.testing.assert_close(torch.stack(outputs, 1), expected[0])
    torch.testing.assert_close(state, expected[1])
