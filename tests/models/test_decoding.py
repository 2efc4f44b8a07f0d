"""The decoding loop behind `generate` against transformers' own loop and against recomputed prefixes."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from fla_train.kernels.fused_ops import flash_decoding
from fla_train.models import decoding, fused_step, modeling
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Penalty(LogitsProcessor):
    """Reads the tokens so far: none is repeated."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids, float("-inf"))


class Sum(StoppingCriteria):
    """Stops a sequence whose tokens sum to a multiple of five."""

    def __call__(self, input_ids, scores, **_):
        return input_ids.sum(1) % 5 == 0


class Calls(StoppingCriteria):
    """Stops nothing, and calls a function after each token."""

    def __init__(self, function: Callable[[], object]):
        self.function = function

    def __call__(self, input_ids, scores, **_):
        self.function()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Heard(BaseStreamer):
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value.tolist())

    def end(self):
        self.heard.append("end")


SETTINGS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    "own parts": {
        "do_sample": True,
        "logits_processor": LogitsProcessorList([Penalty()]),
        "stopping_criteria": StoppingCriteriaList([Sum()]),
    },
}


@pytest.mark.parametrize(
    ("variant", "settings", "ends"),
    [
        ("gated_delta_product", "own parts", [3, 7]),
        ("gated_delta_product", "sampling", [3, 7]),
        ("hybrid", "greedy", [3, 7]),
        ("hybrid", "own parts", None),
        ("wide_window", "greedy", [3, 7]),
        ("olmo_hybrid", "sampling", [3, 7]),
    ],
)
def test_the_loop_gives_what_the_loop_of_transformers_gives(
    build, tokens, variant, settings, ends, monkeypatch
):
    """Left padded, ends of sequences included, with the states that are left; then without what is kept."""
    model, tokens = build(variant).to(DEVICE), tokens.to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    options = {"inputs": tokens, "attention_mask": mask, "max_new_tokens": 25, "pad_token_id": 0}
    options |= {"eos_token_id": ends, **SETTINGS[settings]}

    def generate():
        torch.manual_seed(5)
        cache, streamer = DynamicCache(config=model.config), Heard()
        return model.generate(**options, past_key_values=cache, streamer=streamer), cache, streamer.heard

    found, cache, heard = generate()
    again = model.generate(**options)
    monkeypatch.setattr(modeling, "takes_loop", lambda *_: False)
    expected, expected_cache, expected_heard = generate()
    assert torch.equal(found, expected) and heard == expected_heard
    assert cache.get_seq_length() == expected_cache.get_seq_length() == expected.shape[1] - 1
    steps = [model(tokens[:, :1], past_key_values=x).logits for x in (cache, expected_cache)]
    torch.testing.assert_close(*steps, rtol=1e-6, atol=1e-6)
    if not options["do_sample"]:
        assert torch.equal(again, expected)


@pytest.mark.parametrize(
    ("variant", "batch"), [("gated_delta_product", 1), ("without_conv", 3), ("hybrid_full_attention", 3)]
)
@torch.no_grad()
def test_the_kernels_of_a_step_give_what_the_model_gives(build, variant, batch, monkeypatch):
    """Two tokens on the states of a prompt, and the states that they leave (interpreted without a GPU)."""
    monkeypatch.setattr(decoding, "takes_fused_step", lambda _: True)
    model = build(variant).to(DEVICE, torch.float32)
    tokens = torch.randint(1, 31, (batch, 11), device=DEVICE)
    cache = model(tokens[:, :9], use_cache=True).past_key_values
    decoder = decoding.Decoder(model, batch, 8, 64, decoding.Choice((), False, (), 0))
    decoder.load(cache, None)
    for step in range(2):
        decoder.token.copy_(tokens[:, 9 + step, None])
        decoder.step(model)
        expected = model(tokens[:, : 10 + step], use_cache=False).logits[:, -1]
        torch.testing.assert_close(decoder.logits, expected, rtol=2e-4, atol=2e-4)
    decoder.unload(cache, 2)
    found = model(tokens[:, :1], past_key_values=cache).logits
    expected = model(torch.cat([tokens, tokens[:, :1]], 1)).logits[:, -1:]
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("batch", "rows", "heads", "kv_heads", "size"), [(2, 1, 6, 2, 24), (3, 3, 4, 4, 32)])
def test_attention_of_one_token(batch, rows, heads, kv_heads, size, monkeypatch):
    """Against softmax written out, with keys that are not visible and may hold anything."""
    monkeypatch.setattr(flash_decoding, "PROGRAMS_PER_PROCESSOR", 20)
    q = torch.randn(batch, heads, 1, size, device=DEVICE)
    k, v = torch.randn(2, batch, kv_heads, 330, size, device=DEVICE)
    visible = torch.rand(rows, 1, 1, 330, device=DEVICE) < 0.4
    visible[..., 64:200] = False
    visible[..., 7] = True
    scores = q @ k.repeat_interleave(heads // kv_heads, 1).mT * size**-0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    expected = weights @ v.repeat_interleave(heads // kv_heads, 1)
    k, v = (x.masked_fill(~visible.mT, float("nan")) for x in (k, v))
    found = flash_decoding.attention_step(q, k, v, visible)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_norms_on_outputs_take_no_fused_step(build, monkeypatch):
    for name in ("resolve_operator", "resolve_backend"):
        monkeypatch.setattr(fused_step, name, lambda *_: "triton")
    assert fused_step.takes_fused_step(build("gated_delta_product"))
    assert not fused_step.takes_fused_step(build("norm_after"))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5, 64, 130])
@torch.no_grad()
def test_the_kernels_of_a_step_in_bf16(batch):
    """At the sizes of a 340M model's layer, with the errors of the model's own step."""
    config = DeltaProductConfig(
        vocab_size=1024, num_hidden_layers=3, num_householder=2, use_forget_gate=True, use_output_gate=True
    )
    torch.manual_seed(0)
    model = DeltaProductForCausalLM(config).to("cuda", torch.bfloat16).eval()
    tokens = torch.randint(0, 1024, (batch, 70), device="cuda")
    cache = model(tokens[:, :-2], use_cache=True).past_key_values
    decoder = decoding.Decoder(model, batch, 8, 64, decoding.Choice((), False, (), 0))
    decoder.load(cache, None)
    exact = copy.deepcopy(model).double()
    exact.config.backend = "chunk"
    assert decoding.takes_fused_step(model) and not decoding.takes_fused_step(exact)
    for step in (-2, -1):
        decoder.token.copy_(tokens[:, step, None])
        decoder.step(model)
        own = model(tokens[:, step, None], past_key_values=cache).logits[:, -1].double()
    expected = exact(tokens, use_cache=False).logits[:, -1]
    errors = [((x - expected).norm() / expected.norm()).item() for x in (decoder.logits.double(), own)]
    assert errors[0] < 1.5 * errors[1] < 0.04


@pytest.mark.parametrize("variant", ["gated_delta_product", "hybrid"])
@torch.no_grad()
def test_a_prefix_is_read_once_for_many_continuations(build, tokens, variant):
    """By copies of a cache for prompts that continue it, or by one repeated cache for a batch of them."""
    model, tokens = build(variant).to(DEVICE), tokens.to(DEVICE)
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    prompts = torch.cat([tokens[:1, :12].expand(3, -1), tokens[:, 12:]], 1)
    expected = model.generate(prompts, **options)
    prefix = model(prompts[:1, :12], use_cache=True).past_key_values
    for row, prompt in enumerate(prompts):
        found = model.generate(prompt[None], past_key_values=copy.deepcopy(prefix), **options)
        assert torch.equal(found[0], expected[row])
    with pytest.raises(ValueError, match="reorder_cache"):
        model(prompts[:, 12:], past_key_values=prefix)
    prefix.reorder_cache(torch.zeros(3, dtype=torch.long, device=DEVICE))
    assert torch.equal(model.generate(prompts, past_key_values=prefix, **options), expected)


def test_overlapping_and_failing_calls_have_separate_states(build, tokens, monkeypatch):
    """Two threads alternate token by token; an earlier call left a decoder that fits both prompts."""
    model, prompts = build().to(DEVICE), [tokens[:1, :4].to(DEVICE), tokens[1:2, :9].to(DEVICE)]

    def generate(row, **options):
        return model.generate(prompts[row], max_new_tokens=12, do_sample=False, pad_token_id=0, **options)

    with monkeypatch.context() as patch:
        patch.setattr(modeling, "takes_loop", lambda *_: False)
        expected = [generate(row) for row in range(2)]
    assert torch.equal(generate(0), expected[0])
    both = threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda row: generate(row, stopping_criteria=[Calls(both.wait)]), range(2)))
    assert all(map(torch.equal, found, expected))
    left = iter(range(3))
    with pytest.raises(StopIteration):
        generate(0, stopping_criteria=[Calls(lambda: next(left))])
    assert all(map(torch.equal, map(generate, range(2)), expected))


@pytest.mark.gpu
def test_a_graph_serves_calls_of_one_kind(build, tokens):
    """Only weights that stay where they are and settings of the same kind share one."""
    model, tokens = build().to("cuda", torch.float32), tokens.to("cuda")
    options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    first = model.generate(tokens, **options)
    graph = decoding.DECODERS[model][1]
    assert torch.equal(model.generate(tokens, **options), first)
    assert decoding.DECODERS[model][1] is graph
    model.generate(tokens[:2], **options)
    assert decoding.DECODERS[model][1] is not graph
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)  # in place: the graph reads the new values
    assert not torch.equal(model.generate(tokens, **options), first)
