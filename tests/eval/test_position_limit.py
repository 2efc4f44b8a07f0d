"""Models that end where their table of positions ends, and models without a limit."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.run import evaluate
from fla_train.eval.session import position_limit

LIMIT = 32
SIZE = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZE |= {"intermediate_size": 16, "max_position_embeddings": LIMIT}
GPT = {"vocab_size": 320, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": LIMIT}
MPT = {"vocab_size": 320, "d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": LIMIT}
ENDING: dict[str, dict[str, object]] = {
    "gpt2": GPT,
    "gptj": GPT | {"rotary_dim": 4},  # rotary, from a fixed table
    "mpt": MPT,  # ALiBi, for a fixed number of tokens
    "opt": SIZE | {"ffn_dim": 16, "word_embed_proj_dim": 16},
}


def built(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **ENDING.get(name, SIZE))).eval()


@pytest.mark.parametrize("name", ENDING)
def test_the_limit_is_the_most_that_can_be_read(name: str) -> None:
    model = built(name)
    assert position_limit(model) == LIMIT
    with torch.no_grad():
        model(torch.full((1, LIMIT), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, LIMIT + 1), 7))


def test_others_have_none(build_model) -> None:
    llama = built("llama")
    ours = build_model(max_position_embeddings=LIMIT)
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2}
    hybrid = build_model(max_position_embeddings=LIMIT, **kinds)
    for model in (llama, ours, hybrid):
        assert position_limit(model.eval()) is None
        with torch.no_grad():
            assert model(torch.full((1, 3 * LIMIT), 7)).logits.isfinite().all()


@pytest.fixture
def evaluated(build_model, tokenizer, tmp_path: Path) -> Callable[..., tuple[Path, dict]]:
    """`evaluated(name)`: a GPT-2, a Llama or ours, on lengths within and beyond the table of the first."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "red and blue " * n}) + "\n" for n in (9, 12, 7)))

    def run(name: str, **settings: object) -> tuple[Path, dict]:
        model = build_model() if name == "ours" else built(name)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        perplexity = {"lengths": [16, 32, 64], "panels": [32, 64], "bucket": 8, "chunk": 24} | settings
        suite = SuiteConfig("long", PerplexityConfig(sets=[str(file)], **perplexity))
        config = EvalConfig(str(tmp_path / name), str(tmp_path / f"{name}_out"), device="cpu", suite=suite)
        return evaluate(config, progress=False)

    return run


def test_lengths_beyond_the_table_are_not_read(evaluated) -> None:
    """The documents are the same, so losses up to 32 tokens are compared in pairs."""
    prints = set()
    for name in ("gpt2", "llama", "ours"):
        folder, result = evaluated(name)
        ends = name == "gpt2"
        assert result.model["positions"] == (LIMIT if ends else None)
        losses = [score for score in result.scores if score.metric == "loss"]
        assert [score.length for score in losses] == ([16, 32] if ends else [16, 32, 64])
        assert [curve.edges[-1] for curve in result.curves[::2]] == ([32] if ends else [32, 64])
        assert all(math.isfinite(score.value) for score in losses)
        line = "texts was not read over 64 tokens: the model has positions for 32 tokens."
        assert (line in (folder / "table.md").read_text()) == ends
        prints.add(losses[0].fingerprint)
    assert len(prints) == 1


def test_the_window_of_tasks_ends_with_the_table(evaluated, tmp_path: Path) -> None:
    evaluated("gpt2")
    config = EvalConfig(str(tmp_path / "gpt2"), str(tmp_path / "out"), device="cpu")
    config.suite = SuiteConfig("tasks", tasks=["piqa"], max_length=33)
    with pytest.raises(ValueError, match=r"suite\.max_length=33: .*32"):
        evaluate(config, progress=False)
