"""`model.generate` of transformers against loops over the parallel forward."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.hub.export import export_model

GREEDY = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}


def argmax_loop(model, prompt: torch.Tensor, steps: int = 9) -> torch.Tensor:
    """Greedy continuation of one prompt [T], the whole sequence at each step and no cache."""
    for _ in range(steps):
        prompt = torch.cat([prompt, model(prompt[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return prompt[-steps:]


@pytest.mark.parametrize("variant", ["without_conv", "hybrid", "olmo_hybrid"])
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
def test_generation_by_the_triton_backend(build):
    """Prefill by the kernels (interpreted without a GPU), then single steps on the state they leave."""
    device, length = "cuda" if torch.cuda.is_available() else "cpu", 33
    model = build(backend="triton", initializer_range=0.1).to(device, torch.bfloat16)
    prompt = torch.randint(1, 31, (2, length), device=device)
    settings = GREEDY | {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
    outputs = model.generate(prompt, **settings)
    model.config.backend = "recurrent"
    expected = model.double()(outputs.sequences[:, :-1]).logits[:, length - 1 :]
    found = torch.stack(outputs.logits, 1).double()
    assert (found - expected).norm() <= 0.03 * expected.norm()
    assert outputs.past_key_values.layers[0].recurrent_states[0].dtype == torch.float32


@torch.no_grad()
def test_generation_continues_from_a_given_cache(build, tokens):
    model = build()
    cache = DynamicCache(config=model.config)
    first = model.generate(tokens[:, :6], past_key_values=cache, **(GREEDY | {"max_new_tokens": 3}))
    assert cache.get_seq_length() == 8
    second = model.generate(first, past_key_values=cache, **(GREEDY | {"max_new_tokens": 6}))
    assert torch.equal(second[:, 6:], torch.stack([argmax_loop(model, row[:6]) for row in tokens]))
    cache = model(tokens[:, :6], use_cache=True).past_key_values
    logits = model(tokens[:, 6:9], cache=cache).logits  # the name of `past_key_values` in transformers 5.24
    torch.testing.assert_close(logits, model(tokens[:, :9]).logits[:, 6:], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_embeddings_continue_from_a_given_cache(build, tokens):
    """The embeddings and the mask are those of all tokens, as transformers has it; the new ones are read."""
    model = build("hybrid")
    cache = DynamicCache(config=model.config)
    model(tokens[:, :7], past_key_values=cache)
    embeddings, mask = model.get_input_embeddings()(tokens), torch.ones_like(tokens)
    found = model.generate(inputs_embeds=embeddings, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert torch.equal(found, torch.stack([argmax_loop(model, row) for row in tokens]))


@pytest.mark.parametrize("variant", ["without_conv", "hybrid"])
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
    short = StaticCache(config=build("wide_window").config, max_cache_len=12)
    with pytest.raises(ValueError, match="max_cache_len"):
        build("wide_window").generate(**inputs, past_key_values=short)
    beams = inputs | {"num_beams": 3}
    made = {"cache_implementation": "static", "prefill_chunk_size": 5}
    assert torch.equal(model.generate(**beams, **made), model.generate(**beams))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("variant", ["without_conv", pytest.param("hybrid", marks=pytest.mark.long)])
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


@pytest.mark.long
def test_the_code_of_the_page_runs(build: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, as a reader types them; a shared prefix changes no token."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "generation.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    tokenizer = load_tokenizer(TokenizerConfig(name="bytes"))
    folder = re.search(r'from_pretrained\("(.+?)"\)', page)[1]
    export_model(build(vocab_size=len(tokenizer)).float(), tokenizer, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks:
        exec(block, names)
    batch = names["batch"]
    new = names["output"].shape[1] - batch.shape[1]
    assert torch.equal(names["output"], names["model"].generate(batch, max_new_tokens=new))
