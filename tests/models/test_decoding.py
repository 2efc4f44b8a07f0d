"""The decoding loop behind `generate` against transformers' own loop and against recomputed prefixes."""

import copy

import pytest
import torch
from small_models import every_variant
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from fla_train.models import decoding, modeling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Penalty(LogitsProcessor):
    """Reads the tokens so far: none is repeated."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids, float("-inf"))


class Sum(StoppingCriteria):
    """Stops a sequence whose tokens sum to a multiple of five."""

    def __call__(self, input_ids, scores, **_):
        return input_ids.sum(1) % 5 == 0


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


@every_variant
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_loop_gives_what_the_loop_of_transformers_gives(build, tokens, variant, settings, monkeypatch):
    """Left padded, ends of sequences included, with the states that are left; then without what is kept."""
    model, tokens = build(variant).to(DEVICE), tokens.to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    options = {"inputs": tokens, "attention_mask": mask, "max_new_tokens": 25, "pad_token_id": 0}
    options |= {"eos_token_id": [3, 7], **SETTINGS[settings]}

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


@pytest.mark.parametrize("variant", ["gated_delta_product", "hybrid", "hybrid_full_attention"])
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
    prefix.reorder_cache(torch.zeros(3, dtype=torch.long, device=DEVICE))
    assert torch.equal(model.generate(prompts, past_key_values=prefix, **options), expected)


@pytest.mark.parametrize("variant", ["gated_delta_product", "hybrid"])
@torch.no_grad()
def test_long_prompts_are_read_in_chunks(build, tokens, variant, monkeypatch):
    model, tokens, lengths = build(variant).to(DEVICE), tokens.to(DEVICE), []
    options = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0}
    expected = model.generate(tokens, **options), model.generate(tokens, num_beams=2, **options)
    monkeypatch.setattr(modeling, "PREFILL_TOKENS", 24)
    model.model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    found = model.generate(tokens, **options), model.generate(tokens, num_beams=2, **options)
    assert lengths[:3] == [8, 8, 3]
    assert all(map(torch.equal, found, expected))


def test_a_graph_serves_calls_of_one_kind(build, tokens):
    """Only weights that stay where they are and settings of the same kind share one."""
    if DEVICE == "cpu":
        pytest.skip("graphs need a GPU")
    model, tokens = build().to(DEVICE, torch.float32), tokens.to(DEVICE)
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
