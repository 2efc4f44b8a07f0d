"""Models that end where their table of positions ends, beside those that read on."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
)

from fla_train.cli.eval import _show
from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.likelihood import position_limit
from fla_train.eval.report import page, write_comparison
from fla_train.eval.run import evaluate

LIMIT = 32
SIZE = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZE |= {"intermediate_size": 16, "max_position_embeddings": LIMIT}


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=16, n_layer=1, n_head=2, n_positions=LIMIT))


def gptj() -> PreTrainedModel:
    config = {"vocab_size": 320, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": LIMIT}
    return GPTJForCausalLM(GPTJConfig(rotary_dim=4, **config))


def mpt() -> PreTrainedModel:
    return MptForCausalLM(MptConfig(vocab_size=320, d_model=16, n_layers=1, n_heads=2, max_seq_len=LIMIT))


def opt() -> PreTrainedModel:
    return OPTForCausalLM(OPTConfig(ffn_dim=16, word_embed_proj_dim=16, **SIZE))


ENDING: dict[str, tuple[Callable[[], PreTrainedModel], int]] = {
    "gpt2": (gpt2, LIMIT),
    "gptj": (gptj, LIMIT),  # rotary, from a fixed table
    "mpt": (mpt, LIMIT),  # ALiBi, for so many tokens
    "opt": (opt, LIMIT),
    "bert": (lambda: BertLMHeadModel(BertConfig(is_decoder=True, **SIZE)), LIMIT),
    "roberta": (lambda: RobertaForCausalLM(RobertaConfig(is_decoder=True, **SIZE)), LIMIT - 2),
}


@pytest.mark.parametrize("name", ENDING)
def test_the_limit_is_the_most_that_can_be_read(name: str) -> None:
    build, limit = ENDING[name]
    model = build().eval()
    assert position_limit(model) == limit
    with torch.no_grad():
        model(torch.full((1, limit), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, limit + 1), 7))


def test_others_have_none(build_model) -> None:
    llama = LlamaForCausalLM(LlamaConfig(**SIZE))
    ours = build_model(max_position_embeddings=LIMIT)
    hybrid = build_model(
        max_position_embeddings=LIMIT, attn={"layers": [1], "num_heads": 2, "num_kv_heads": 2}
    )
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
        build = {"gpt2": gpt2, "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZE)), "ours": build_model}
        model = build[name]()
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        perplexity = {"lengths": [16, 32, 64], "panels": [32, 64], "bucket": 8, "chunk": 24} | settings
        suite = SuiteConfig("long", PerplexityConfig(sets=[str(file)], **perplexity))
        config = EvalConfig(str(tmp_path / name), str(tmp_path / f"{name}_out"), device="cpu", suite=suite)
        return evaluate(config, progress=False)

    return run


def test_lengths_beyond_the_table_are_not_read(evaluated, tmp_path: Path, capsys) -> None:
    folders = {}
    for name in ("gpt2", "llama", "ours"):
        folders[name], record = evaluated(name)
        result = record["perplexity"]["texts"]
        ends = name == "gpt2"
        assert record["model"]["positions"] == (LIMIT if ends else None)
        assert [row["length"] for row in result["lengths"]] == ([16, 32] if ends else [16, 32, 64])
        assert result["not_reached"] == ([64] if ends else [])
        assert [rows[-1]["end"] for rows in result["panels"].values()] == [32, 32 if ends else 64]
        assert all(math.isfinite(row["loss"]) for row in result["positions"])
        _show(folders[name])  # what fla-eval prints
        line = "gpt2 has positions for 32 tokens only: not read over 64."
        for text in (capsys.readouterr().out, page([record])):
            assert (line in text) == ends and "No document is long enough" not in text
    records = write_comparison(tmp_path / "compared", list(folders.values()))
    assert line in (tmp_path / "compared/table.md").read_text()
    prints = {record["perplexity"]["texts"]["data"]["fingerprint"] for record in records}
    assert len(prints) == 1  # the same documents, so that losses up to 32 tokens are compared in pairs


def test_packed_sequences_longer_than_the_table(evaluated) -> None:
    _, record = evaluated("gpt2", layout="packed", documents=2)
    result = record["perplexity"]["texts"]
    assert result["data"]["tokens"] == 2 * 64 and result["positions"][-1]["end"] == LIMIT


def test_nothing_within_the_table(evaluated) -> None:
    with pytest.raises(ValueError, match=r"positions for 32 tokens only: lower suite\.perplexity\.lengths"):
        evaluated("gpt2", lengths=[64], panels=[])


def test_the_window_of_tasks_ends_with_the_table(evaluated, tmp_path: Path) -> None:
    evaluated("gpt2")
    config = EvalConfig(str(tmp_path / "gpt2"), str(tmp_path / "out"), device="cpu")
    config.suite = SuiteConfig("tasks", tasks=["piqa"], max_length=33)
    with pytest.raises(ValueError, match=r"suite\.max_length=33: the model has positions for 32 tokens only"):
        evaluate(config, progress=False)
