"""`model.generate` of transformers against loops over the parallel forward."""

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import every_variant, small_config
from transformers import CompileConfig, DynamicCache, Mamba2Config, StaticCache

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.hub.export import export_model

GREEDY = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}


def argmax_loop(model, prompt: torch.Tensor, steps: int = 9) -> torch.Tensor:
    """Greedy continuation of one prompt [T], the whole sequence at each step and no cache."""
    for _ in range(steps):
        prompt = torch.cat([prompt, model(prompt[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return prompt[-steps:]


@every_variant
@torch.no_grad()
def test_greedy_generation_of_a_left_padded_batch(build, tokens, variant):
    model = build(variant)
    lengths = [12, 7, 1]
    prompts = torch.zeros(3, 12, dtype=torch.long)
    mask = torch.zeros(3, 12, dtype=torch.long)
    for i, n in enumerate(lengths):
        prompts[i, 12 - n :], mask[i, 12 - n :] = tokens[i, :n], 1
    generated = model.generate(prompts, attention_mask=mask, **GREEDY)[:, 12:]
    for i, n in enumerate(lengths):
        assert torch.equal(generated[i], argmax_loop(model, tokens[i, :n]))


@torch.no_grad()
def test_a_cache_has_two_names(build, tokens):
    """`past_key_values`, and `cache` as transformers calls it since 5.24."""
    model = build()
    logits = []
    for name in ("past_key_values", "cache"):
        cache = model(tokens[:, :6], use_cache=True).past_key_values
        logits.append(model(tokens[:, 6:9], **{name: cache}).logits)
    torch.testing.assert_close(logits[1], model(tokens[:, :9]).logits[:, 6:], rtol=1e-9, atol=1e-9)
    assert torch.equal(*logits)


def test_a_tokenizer_is_accepted(build, tokens):
    """That of stop strings, which `generate` hands on to the model; `transformers serve` always gives one."""
    model = build()
    expected = model.generate(tokens[:, :6], **GREEDY)
    assert torch.equal(model.generate(tokens[:, :6], tokenizer=object(), **GREEDY), expected)


@torch.no_grad()
def test_greedy_generation_without_padding_and_without_cache(build, tokens):
    model = build()
    expected = torch.stack([argmax_loop(model, row[:6]) for row in tokens])
    assert torch.equal(model.generate(tokens[:, :6], **GREEDY)[:, 6:], expected)
    assert torch.equal(model.generate(tokens[:, :6], use_cache=False, **GREEDY)[:, 6:], expected)


@pytest.mark.parametrize(
    ("length", "dtype"),
    # In float32 narrow heads go token by token, of which the interpreter does two a second.
    [(1, torch.float32), (5, torch.float32), (1, torch.bfloat16), (5, torch.bfloat16), (63, torch.bfloat16)],
    ids=str,
)
@torch.no_grad()
def test_generation_by_the_triton_backend(build, length, dtype):
    """Prefill by the kernels (interpreted without a GPU), then single steps on the state they leave."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, prompt = (
        build(backend="triton", initializer_range=0.1).to(device, dtype),
        torch.randint(1, 31, (2, length), device=device),
    )
    outputs = model.generate(prompt, return_dict_in_generate=True, output_logits=True, **GREEDY)
    whole = outputs.sequences[:, :-1]
    model.config.backend = "recurrent"
    expected = model.double()(whole).logits[:, length - 1 :]
    found = torch.stack(outputs.logits, 1).double()
    assert (found - expected).norm() <= (1e-4 if dtype == torch.float32 else 0.03) * expected.norm()
    assert outputs.past_key_values.layers[0].recurrent_states[0].dtype == torch.float32


@torch.no_grad()
def test_generation_reads_only_new_tokens(build, tokens):
    """Each step after the prompt must run one token, or decoding is not constant-time."""
    model, lengths = build(), []
    model.model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    model.generate(tokens[:, :6], **GREEDY)
    assert lengths == [6] + [1] * 8


@torch.no_grad()
def test_generation_continues_from_a_given_cache(build, tokens):
    model = build()
    cache = DynamicCache(config=model.config)
    first = model.generate(tokens[:, :6], past_key_values=cache, **(GREEDY | {"max_new_tokens": 3}))
    assert cache.get_seq_length() == 8
    second = model.generate(first, past_key_values=cache, **(GREEDY | {"max_new_tokens": 6}))
    assert torch.equal(second[:, 6:], torch.stack([argmax_loop(model, row[:6]) for row in tokens]))


@torch.no_grad()
def test_chunked_prefill_of_generate(build, tokens):
    model, lengths = build(), []
    model.model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    found = model.generate(tokens, prefill_chunk_size=8, **GREEDY)
    assert lengths[:3] == [8, 8, 3]
    assert torch.equal(found[:, 19:], torch.stack([argmax_loop(model, row) for row in tokens]))


@torch.no_grad()
def test_embeddings_go_before_ids_in_a_long_prompt(build, tokens):
    """transformers takes both: the ids for the processors of scores, and the embeddings for the model."""
    model = build()
    others = tokens.flip(1)
    embeddings = model.get_input_embeddings()(others)
    found = model.generate(tokens, inputs_embeds=embeddings, prefill_chunk_size=8, **GREEDY)
    assert torch.equal(found[:, 19:], torch.stack([argmax_loop(model, row) for row in others]))


@pytest.mark.parametrize("variant", ["gated_delta_product", "hybrid"])
@torch.no_grad()
def test_embeddings_continue_from_a_given_cache(build, tokens, variant):
    """The embeddings and the mask are those of all tokens, as transformers has it; the new ones are read."""
    model = build(variant)
    cache = DynamicCache(config=model.config)
    model(tokens[:, :7], past_key_values=cache)
    embeddings, mask = model.get_input_embeddings()(tokens), torch.ones_like(tokens)
    found = model.generate(inputs_embeds=embeddings, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert torch.equal(found, torch.stack([argmax_loop(model, row) for row in tokens]))


@pytest.mark.parametrize("variant", ["gated_delta_product", "hybrid"])
@torch.no_grad()
def test_beam_search_with_the_cache_equals_beam_search_without(build, tokens, variant):
    model = build(variant)
    settings = GREEDY | {"num_beams": 4, "num_return_sequences": 2}
    cached = model.generate(tokens[:, :5], **settings)
    assert torch.equal(cached, model.generate(tokens[:, :5], use_cache=False, **settings))


@torch.no_grad()
def test_wide_beam_search_finds_the_best_of_all_continuations(build):
    model = build(vocab_size=6)
    prompt = torch.tensor([[1, 4, 2]])
    continuations = torch.tensor(list(itertools.product(range(6), repeat=3)))
    sequences = torch.cat([prompt.expand(len(continuations), -1), continuations], 1)
    best = sequences[model.token_losses(sequences)[:, 2:].sum(1).argmin()]
    found = model.generate(prompt, num_beams=36, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(found[0], best)


@torch.no_grad()
def test_reordered_cache_continues_the_chosen_sequences(build, tokens):
    model = build("hybrid")
    cache = model(tokens[:, :10], use_cache=True).past_key_values
    order = torch.tensor([2, 2, 0])
    cache.reorder_cache(order)
    found = model(tokens[order, 10:11], past_key_values=cache).logits[:, -1]
    expected = model(tokens[order, :11]).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["gated_delta_product", "hybrid"])
@torch.no_grad()
def test_a_copied_cache_goes_its_own_way(build, tokens, variant):
    model = build(variant)
    cache = model(tokens[:, :10], use_cache=True).past_key_values
    copied = copy.deepcopy(cache)
    model(tokens[:, :3], past_key_values=cache)
    assert (cache.get_seq_length(), copied.get_seq_length()) == (13, 10)
    found = model(tokens[:, 10:], past_key_values=copied).logits
    torch.testing.assert_close(found, model(tokens).logits[:, 10:], rtol=1e-5, atol=1e-6)


@every_variant
@torch.no_grad()
def test_a_static_cache_gives_what_a_growing_one_does(build, tokens, variant):
    """Padded on the left, in one pass or in chunks, used again after a reset, reordered by beam search."""
    model, mask = build(variant), torch.ones(3, 12, dtype=torch.long)
    mask[0, :4] = 0
    inputs = {"inputs": tokens[:, :12], "attention_mask": mask, **GREEDY}
    expected = model.generate(**inputs)
    cache = StaticCache(config=model.config, max_cache_len=30)
    assert torch.equal(model.generate(**inputs, past_key_values=cache), expected)
    cache.reset()
    assert torch.equal(model.generate(**inputs, past_key_values=cache, prefill_chunk_size=5), expected)
    beams = inputs | {"num_beams": 3}
    assert torch.equal(model.generate(**beams, cache_implementation="static"), model.generate(**beams))


@pytest.mark.usefixtures("fresh_compiler")
@every_variant
@torch.no_grad()
def test_generation_by_a_compiled_forward(build, tokens, variant):
    """By one graph for all steps; with a window by one per step, whose number transformers' cache reads."""
    model, graphs = build(variant), []

    def backend(graph: torch.fx.GraphModule, _: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    compiled = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=None)
    compiled._compile_all_devices = True  # not only GPUs
    settings = GREEDY | {"max_new_tokens": 3}
    found = model.generate(tokens, cache_implementation="static", compile_config=compiled, **settings)
    assert torch.equal(found, model.generate(tokens, **settings))
    assert len(graphs) == (1 if model.config.sliding_window is None else 2)


@pytest.mark.parametrize("filled", [False, True])
@torch.no_grad()
def test_a_cache_that_has_no_place_for_the_states_is_refused(build, tokens, filled):
    model, cache = build(), DynamicCache()
    if filled:
        cache.update(torch.zeros(3, 1, 4, 8), torch.zeros(3, 1, 4, 8), 0)
    with pytest.raises(ValueError, match=r"DynamicCache.*DynamicCache\(config=model.config\)"):
        model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match=r"DynamicCache.*DynamicCache\(config=model.config\)"):
        model.generate(tokens, past_key_values=cache, **GREEDY)
    for other in (DynamicCache(config=small_config("hybrid")), DynamicCache(config=Mamba2Config())):
        with pytest.raises(ValueError, match="without a place for the model's states"):
            model(tokens, past_key_values=other)
    with pytest.raises(ValueError, match="assistant_model"):
        build("hybrid_full_attention").generate(tokens, is_assistant=True, **GREEDY)


@torch.no_grad()
def test_sampling_with_return_of_scores(build, tokens):
    model = build()
    outputs = model.generate(
        tokens[:, :5], max_new_tokens=4, do_sample=True, return_dict_in_generate=True, output_scores=True
    )
    assert outputs.sequences.shape == (3, 9) and len(outputs.scores) == 4


def test_the_code_of_the_page_runs(build: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, as a reader types them; a shared prefix changes no token."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "generation.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    tokenizer = load_tokenizer(TokenizerConfig(name="bytes"))
    folder = re.search(r'from_pretrained\("(.+?)"\)', page)[1]
    export_model(build(vocab_size=len(tokenizer)).float(), tokenizer, tmp_path / folder, validate=False)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks:
        exec(block, names)
    batch = names["batch"]
    new = names["output"].shape[1] - batch.shape[1]
    assert torch.equal(names["output"], names["model"].generate(batch, max_new_tokens=new))
