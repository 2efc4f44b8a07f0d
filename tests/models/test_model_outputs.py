"""Arguments and outputs of transformers' models: hidden states, attentions, positions, labels, heads."""

import pytest
import torch
import torch.nn.functional as F
from small_models import small_config
from transformers import AutoModelForSequenceClassification, DataCollatorWithFlattening, DynamicCache

from fla_train.models.modeling import DeltaProductForTokenClassification

EXACT = {"rtol": 1e-9, "atol": 1e-9}
LENGTHS = [8, 1, 13]


@pytest.fixture
def documents(tokens) -> list[torch.Tensor]:
    return [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]


@pytest.mark.parametrize("variant", ["gated_delta_product", "hybrid"])
@torch.no_grad()
def test_hidden_states_are_what_the_blocks_read_and_the_head_gets(build, tokens, variant):
    model, streams = build(variant), []
    norm = model.model.layers[1].attn_norm
    norm.register_forward_hook(lambda layer, inputs, output: streams.append(output[1]))
    outputs = model(tokens, output_hidden_states=True)
    first, second, last = outputs.hidden_states
    assert torch.equal(first, model.get_input_embeddings()(tokens))
    torch.testing.assert_close(second, streams[0], **EXACT)
    assert torch.equal(model.lm_head(last), outputs.logits)

    assert model(tokens).hidden_states is None
    chosen = model(tokens, output_hidden_states=[-1, 0]).hidden_states
    assert chosen[1] is None and torch.equal(chosen[0], first) and torch.equal(chosen[2], last)
    model.config.output_hidden_states = True
    assert torch.equal(model(tokens).hidden_states[1], second)
    assert torch.equal(model(tokens, use_cache=False, return_dict=False)[1][1], second)


@pytest.mark.parametrize("variant", ["hybrid", "hybrid_full_attention"])
@torch.no_grad()
def test_attentions_are_the_weights_that_make_the_output(build, tokens, variant):
    model, seen = build(variant), {}
    layer = model.model.layers[1].attn
    layer.v_proj.register_forward_hook(lambda _, inputs, output: seen.update(v=output))
    layer.o_proj.register_forward_pre_hook(lambda _, inputs: seen.update(o=inputs[0]))
    logits = model(tokens).logits  # by torch's scaled_dot_product_attention
    (weights,) = model(tokens, output_attentions=True).attentions
    v = seen["v"].view(3, 19, 2, 4).transpose(1, 2).repeat_interleave(2, dim=1)  # [B, H, T, D]
    torch.testing.assert_close((weights @ v).transpose(1, 2).flatten(-2), seen["o"], **EXACT)
    query, key = torch.arange(19)[:, None], torch.arange(19)
    visible = (key <= query) & (key > query - (5 if variant == "hybrid" else 19))
    assert torch.equal(weights > 0, visible.expand_as(weights))
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, 19).double(), **EXACT)

    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(tokens).logits, logits, rtol=1e-6, atol=1e-6)
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_attentions": True}
    steps = model.generate(tokens, pad_token_id=0, do_sample=False, **options)
    keys = [19, 5, 5] if variant == "hybrid" else [19, 20, 21]
    assert [step[0].shape[-1] for step in steps.attentions] == keys
    model.set_attn_implementation("sdpa")
    greedy = model.generate(tokens, pad_token_id=0, do_sample=False, max_new_tokens=3)
    assert torch.equal(steps.sequences, greedy)


@pytest.mark.parametrize("variant", ["gated_delta_product", "hybrid"])
@torch.no_grad()
def test_the_bounds_of_documents_by_every_name(build, documents, variant):
    model, row = build(variant), torch.cat(documents)[None]
    bounds = torch.tensor([0, 8, 9, 22], dtype=torch.int32)
    expected = torch.cat([model(document[None]).logits[0] for document in documents])
    for given in (
        {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]},
        {"seq_idx": torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor(LENGTHS))[None]},
        {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 13, "max_length_k": 13},
    ):
        torch.testing.assert_close(model(row, **given).logits[0], expected, **EXACT)


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}])
def test_a_batch_of_the_flattening_collator(build, documents, options):
    """The loss of a row of documents is that of the documents one by one."""
    model = build().train()
    batch = DataCollatorWithFlattening(**options)([{"input_ids": document} for document in documents])
    expected = torch.cat([model.token_losses(document[None])[0] for document in documents]).mean()
    torch.testing.assert_close(model(**batch).loss, expected, **EXACT)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"position_ids": torch.tensor([[0, 1, 3, 4]])}, "position_ids"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]] * 3)}, "3 rows"),
        ({"cu_seqlens": torch.tensor([0, 2, 5])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 2, 4]), "use_cache": True}, "cache with packed documents"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask has shape"),
        ({"input_ids": None}, "input_ids or inputs_embeds"),
    ],
)
@pytest.mark.parametrize("variant", ["delta_net", "hybrid"])
def test_arguments_that_would_give_wrong_results(build, tokens, arguments, error, variant):
    rows = 3 if error == "3 rows" else 1
    model = build(variant)
    with pytest.raises(ValueError, match=error):
        model(**({"input_ids": torch.ones(rows, 4, dtype=torch.long)} | arguments))
    with pytest.raises(TypeError, match="segments"):
        model(tokens, segments=torch.zeros_like(tokens))
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(tokens, past_key_values=DynamicCache(config=model.config))


@pytest.mark.parametrize("plain", [True, False], ids=["fused", "hooked head"])
def test_labels_that_a_caller_has_shifted(build, tokens, plain):
    model = build().train()
    if not plain:
        model.lm_head.register_forward_hook(lambda layer, inputs, output: output)
    labels = tokens.masked_fill(tokens < 8, -100)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    outputs = model(tokens, shift_labels=shifted)
    torch.testing.assert_close(outputs.loss, model(tokens, labels=labels).loss, **EXACT)
    assert outputs.logits is None
    other = model(tokens, labels=tokens, shift_labels=shifted, num_items_in_batch=7).loss
    torch.testing.assert_close(other, outputs.loss * (shifted != -100).sum() / 7, **EXACT)


def test_task_heads_on_a_pretrained_backbone(build, tokens, tmp_path):
    model = build(pad_token_id=0)
    model.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).double()
    classifier.config.backend = model.config.backend
    padded, mask = tokens.clone(), torch.ones_like(tokens)
    padded[1, 11:] = mask[1, 11:] = 0
    outputs = classifier.eval()(padded, attention_mask=mask, labels=torch.tensor([2, 0, 1]))
    hidden = model.model(padded, attention_mask=mask).last_hidden_state
    expected = classifier.score(hidden[torch.arange(3), torch.tensor([18, 10, 18])])
    torch.testing.assert_close(outputs.logits, expected, **EXACT)
    outputs.loss.backward()
    assert classifier.model.layers[0].attn.k_proj.weight.grad.any()
    tagger = DeltaProductForTokenClassification(small_config())
    assert tagger(tokens).logits.shape == (3, 19, tagger.config.num_labels)
    assert not tagger.score.bias.any()
