"""The parallel forward: an independent block, padding, packing, caching, checkpointing and the loss."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_models import every_variant, small_config
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import LinearAttentionLayer

from fla_train.models.activation_checkpointing import checkpoint_activations
from fla_train.models.modeling import DeltaProductForCausalLM

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def oracle_block(state: dict[str, torch.Tensor], config, x: torch.Tensor) -> torch.Tensor:
    """One block on x [T, hidden], token by token and head by head, straight from the equations."""
    heads, n, k, v = config.num_heads, config.num_householder, config.head_dim, int(8 * config.expand_v)
    length = len(x)

    def rms(y, weight):
        return weight * y / torch.sqrt((y * y).mean(-1, keepdim=True) + config.norm_eps)

    def silu(y):
        return y / (1 + torch.exp(-y))

    def convolved(y, name):
        if not config.use_short_conv:
            return silu(y)
        taps = state[f"attn.{name}_conv1d.weight"][:, 0]
        out = torch.zeros_like(y)
        for t in range(length):
            for w in range(config.conv_size):
                source = t - (config.conv_size - 1 - w)
                if source >= 0:
                    out[t] += taps[:, w] * y[source]
        return silu(out)

    after = config.norm_after == "all"
    h = x if after else rms(x, state["attn_norm.weight"])
    q, keys, values = (convolved(h @ state[f"attn.{c}_proj.weight"].T, c) for c in "qkv")
    mixed = torch.zeros(length, heads * v, dtype=x.dtype)
    for head in range(heads):
        memory = torch.zeros(k, v, dtype=x.dtype)
        for t in range(length):
            if config.use_forget_gate:
                a = h[t] @ state["attn.a_proj.weight"][head] + state["attn.dt_bias"][head]
                memory = memory * torch.exp(-torch.exp(state["attn.A_log"][head]) * torch.log1p(torch.exp(a)))
            for j in range(n):
                row = j * heads + head
                key = keys[t, row * k : (row + 1) * k]
                key = key / torch.sqrt((key * key).sum() + 1e-6)
                beta = 1 / (1 + torch.exp(-h[t] @ state["attn.b_proj.weight"][row]))
                beta = beta * (2 if config.allow_neg_eigval else 1)
                memory = (torch.eye(k, dtype=x.dtype) - beta * torch.outer(key, key)) @ memory
                memory = memory + beta * torch.outer(key, values[t, row * v : (row + 1) * v])
            query = q[t, head * k : (head + 1) * k]
            query = query / torch.sqrt((query * query).sum() + 1e-6)
            mixed[t, head * v : (head + 1) * v] = rms(
                memory.T @ query / math.sqrt(k), state["attn.o_norm.weight"]
            )
    if config.use_output_gate:
        mixed = mixed * silu(h @ state["attn.g_proj.weight"].T)
    y = mixed @ state["attn.o_proj.weight"].T
    x = x + (rms(y, state["attn_norm.weight"]) if after else y)
    h = x if after else rms(x, state["mlp_norm.weight"])
    up = silu(h @ state["mlp.gate_proj.weight"].T) * (h @ state["mlp.up_proj.weight"].T)
    y = up @ state["mlp.down_proj.weight"].T
    return x + (rms(y, state["mlp_norm.weight"]) if after else y)


@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
@pytest.mark.parametrize("variant", ["delta_net", "gated_delta_product", "without_conv", "norm_after"])
@torch.no_grad()
def test_logits_equal_the_equations(build, tokens, variant, backend):
    model = build(variant, backend=backend)
    for parameter in model.parameters():  # norm weights of 1 would hide a forgotten one
        parameter.add_(0.1 * torch.randn_like(parameter))
    state = model.state_dict()
    for row, logits in zip(tokens, model(tokens).logits, strict=True):
        x = state["model.embeddings.weight"][row]
        for layer in range(2):
            prefix = f"model.layers.{layer}."
            block = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
            x = oracle_block(block, model.config, x)
        x = state["model.norm.weight"] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        torch.testing.assert_close(logits, x @ state["lm_head.weight"].T, rtol=1e-8, atol=1e-8)


@every_variant
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(build, tokens, variant):
    model = build(variant)
    lengths = [19, 11, 4]
    outputs = [model(row[None, :n], use_cache=True) for row, n in zip(tokens, lengths, strict=True)]
    alone = [output.logits[0] for output in outputs]
    mask = torch.arange(19)[None, :] < torch.tensor(lengths)[:, None]
    right = torch.where(mask, tokens, 0)
    left = torch.stack([row.roll(19 - n) for row, n in zip(right, lengths, strict=True)])
    padded_right = model(right, attention_mask=mask.long(), use_cache=True)
    padded_left = model(left, attention_mask=mask.flip(1).long(), use_cache=True)
    for i, n in enumerate(lengths):
        torch.testing.assert_close(padded_right.logits[i, :n], alone[i], **EXACT)
        torch.testing.assert_close(padded_left.logits[i, 19 - n :], alone[i], **EXACT)
        for padded in (padded_right, padded_left):
            for layer, expected in zip(
                *(x.past_key_values.layers for x in (padded, outputs[i])), strict=True
            ):
                if isinstance(layer, LinearAttentionLayer):
                    state, other = layer.recurrent_states[0][i], expected.recurrent_states[0][0]
                    torch.testing.assert_close(state, other, **EXACT)


@every_variant
def test_packed_documents_equal_separate_ones_with_gradients(build, tokens, variant):
    model = build(variant)
    pieces = [tokens[0, :8], tokens[1, :1], tokens[2, :13]]
    cu_seqlens = torch.tensor([0, 8, 8, 9, 22], dtype=torch.int32)  # the second document is empty
    packed = model(torch.cat(pieces)[None], cu_seqlens=cu_seqlens).logits[0]
    separate = torch.cat([model(piece[None]).logits[0] for piece in pieces])
    torch.testing.assert_close(packed, separate, **EXACT)
    probe = torch.randn_like(packed)
    ours = torch.autograd.grad((packed * probe).sum(), list(model.parameters()))
    expected = torch.autograd.grad((separate * probe).sum(), list(model.parameters()))
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).norm() <= EXACT["rtol"] * b.norm() + 1e-12


@every_variant
@pytest.mark.parametrize("cuts", [list(range(1, 19)), [7], [2, 3, 17]], ids=["steps", "7", "mixed"])
@torch.no_grad()
def test_pieces_through_the_cache_equal_the_parallel_forward(build, tokens, variant, cuts):
    model = build(variant)
    whole, cache, pieces = model(tokens).logits, None, []
    for piece in tokens.tensor_split(cuts, dim=1):
        outputs = model(piece, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **EXACT)
    assert cache.get_seq_length() == 19


# transformers 5.23 has a new name for it, which 5.17 does not know
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize(
    ("variant", "mode"),
    [
        ("gated_delta_product", True),
        ("gated_delta_product", "selective"),
        ("hybrid", "selective"),
        ("olmo_hybrid", True),
    ],
)
def test_activation_checkpointing_gives_the_same_gradients(build, tokens, variant, mode):
    """In selective mode no matrix product runs again."""
    model, gradients, flops = build(variant).train(), [], []
    for now in (False, mode):
        checkpoint_activations(model, now)
        with FlopCounterMode(display=False) as counter:
            model(tokens, labels=tokens, use_cache=bool(now)).loss.backward()
        flops.append(counter.get_total_flops())
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *gradients))
    assert flops[1] == flops[0] if mode == "selective" else flops[1] > flops[0]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("packed", [False, True])
def test_a_recomputed_operator_gives_the_same_gradients(build, tokens, packed):
    inputs = {"input_ids": tokens, "labels": tokens}
    if packed:
        inputs = {name: x.view(1, -1) for name, x in inputs.items()}
        inputs["cu_seqlens"] = torch.tensor([0, 3, 3, tokens.numel()])
    gradients = []
    for recompute, nested in ((False, False), (True, False), (True, "selective")):
        model = build(backend="chunk", recompute_operator=recompute).train()
        checkpoint_activations(model, nested)  # blocks that run again, and in each of them the operator
        model(**inputs).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=1e-9, atol=1e-12)


def test_loss_equals_cross_entropy_of_the_logits(build, tokens):
    model = build()
    labels = tokens.clone()
    labels[0, :6] = -100
    labels[2, 10:] = -100
    outputs = model(tokens, labels=labels, logits_to_keep=0)
    expected = F.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    torch.testing.assert_close(outputs.loss, expected, **EXACT)
    total = expected * (labels[:, 1:] != -100).sum()
    for items in (7, 0.25, torch.tensor(3.0)):  # a global count over the ranks may be any positive number
        torch.testing.assert_close(model(tokens, labels=labels, num_items_in_batch=items).loss, total / items)
    assert torch.equal(model(tokens, labels=labels).logits, outputs.logits)
    each = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(model.token_losses(tokens), each.detach(), **EXACT)
    assert model.train()(tokens, labels=labels).logits is None  # they would be the largest tensor of a step


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_a_batch_without_targets_has_loss_zero(build, tokens, items):
    model = build()
    loss = model(tokens, labels=torch.full_like(tokens, -100), num_items_in_batch=items).loss
    loss.backward()
    assert loss == 0 and all(not p.grad.any() for p in model.parameters())


def test_autocast_stays_close_to_fp32_and_keeps_states_wide(tokens):
    torch.manual_seed(0)
    config = small_config(initializer_range=0.05)
    model = DeltaProductForCausalLM(config)
    exact = model(tokens, labels=tokens).loss
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(tokens, labels=tokens, logits_to_keep=0, use_cache=True)
    assert outputs.loss.dtype == torch.float32 and outputs.logits.dtype == torch.bfloat16
    assert {layer.recurrent_states[0].dtype for layer in outputs.past_key_values.layers} == {torch.float32}
    torch.testing.assert_close(outputs.loss, exact, rtol=5e-3, atol=0)
    outputs.loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("variant", "backend"), [("gated_delta_product", "recurrent"), ("hybrid", "chunk")])
def test_a_model_in_bf16_trains_and_decodes(build, tokens, variant, backend):
    """All weights in bf16, the gates' parameters too: gates, states and the loss stay wide."""
    model = build(variant, initializer_range=0.1, backend=backend).float()
    exact = model(tokens, labels=tokens).loss
    half = model.to(torch.bfloat16)
    whole = half(tokens, labels=tokens, logits_to_keep=0)
    assert whole.loss.dtype == torch.float32 and whole.logits.dtype == torch.bfloat16
    torch.testing.assert_close(whole.loss, exact, rtol=5e-3, atol=0)
    whole.loss.backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in half.parameters())
    with torch.no_grad():
        for length in (1, 14):
            cache = half(tokens[:, :length], use_cache=True).past_key_values
            pieces = [half(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(length, 19)]
            mixers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
            assert {layer.recurrent_states[0].dtype for layer in mixers} <= {torch.float32}
            error = (torch.cat(pieces, 1) - whole.logits[:, length:]).abs().max()
            assert error <= 0.1 * whole.logits.abs().max()  # 0.05 is rounding to bf16, by other kernels
        assert half.generate(tokens[:, :5], max_new_tokens=3, pad_token_id=0).shape == (3, 8)


@pytest.mark.parametrize(("wide", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_the_residual_stream_stays_wide_under_autocast_unless_asked(build, tokens, wide, dtype):
    model = build(residual_in_fp32=wide).float()
    with torch.autocast("cpu", torch.bfloat16):
        *stream, normed = model(tokens, output_hidden_states=True).hidden_states
    assert {x.dtype for x in stream} == {dtype} and normed.dtype == torch.bfloat16
