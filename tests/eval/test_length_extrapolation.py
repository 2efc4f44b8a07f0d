"""The length-extrapolation suite: how documents are packed, the papers' sets, what the state does."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig, set_name
from fla_train.eval.documents import fingerprint, packed, recut
from fla_train.eval.perplexity import loss_table
from fla_train.eval.run import evaluate
from fla_train.eval.sets import PAPER_SETS, hub_documents
from fla_train.eval.states import effective_rank, positions_up_to, state_statistics
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.utils.keys import find_errors
from tests.eval.conftest import token_losses

ROOT = Path(__file__).resolve().parents[2]
ROWS = {  # a row of each set with the Hub's columns, and the document it makes
    "codeparrot": ({"repo_name": "a/b", "path": "c.py", "content": "print(1)\n"}, "print(1)\n"),
    "openthoughts_math": (
        {
            "problem": "?",
            "solution": "!",
            "conversations": [{"from": "user", "value": "2+2?"}, {"from": "assistant", "value": "4"}],
        },
        "2+2?\n4",
    ),
    "trivia_qa": (
        {"question": "Who?", "answer": {"value": "Ann", "aliases": ["Anna"]}},
        "Question: Who?\nAnswer: Ann\n",
    ),
    "slimpajama": ({"text": "some words", "meta": {"redpajama_set_name": "C4"}}, "some words"),
    "math_hard": ({"problem": "1+1?", "level": "Level 5", "type": "Algebra", "solution": "2"}, "1+1?\n2"),
}


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every set with 40 rows, laid out by the script."""
    splits, folder = tmp_path_factory.mktemp("splits"), tmp_path_factory.mktemp("mirror")
    files = {"trivia_qa": "triviaqa/rc.wikipedia.nocontext.validation", "math_hard": "hendrycks_math/test"}
    for name, (row, _) in ROWS.items():
        file = splits / (files.get(name, f"{name}/{PAPER_SETS[name].split}") + ".jsonl")
        file.parent.mkdir()
        rows = [row] * 40
        if name == "math_hard":  # MATH-Hard is the rows of level 5
            rows = [r for hard in rows for r in (hard, hard | {"level": "Level 1", "problem": "easy"})]
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    script = ROOT / "scripts/build_eval_mirror.py"
    subprocess.run([sys.executable, script, splits, folder], check=True, capture_output=True)
    return folder


def test_the_suite_holds_the_papers_sets_and_panels() -> None:
    loaded = OmegaConf.load(ROOT / "configs/suite/length_extrapolation.yaml")
    config = PerplexityConfig(**loaded.perplexity)
    assert list(config.sets) == list(PAPER_SETS) and list(config.panels) == [4096, 16384, 32768]
    assert max(config.lengths) == 32768 and config.layout == "packed"
    assert not find_errors(SuiteConfig(name=loaded.name, perplexity=config), "suite.")
    assert [set_name(name) for name in PAPER_SETS] == list(PAPER_SETS)


@pytest.mark.parametrize("name", PAPER_SETS)
def test_documents_of_the_papers_sets(name: str, mirror: Path, tokenizer) -> None:
    documents = list(hub_documents(PAPER_SETS[name], tokenizer, mirror))
    assert [tokenizer.decode(document) for document in documents] == [ROWS[name][1]] * 40


def test_packed_documents_are_the_stream_cut_at_every_length() -> None:
    draw = np.random.default_rng(0)
    documents = [draw.integers(3, 300, size=n) for n in (5, 0, 1, 17, 3, 40, 2)]
    for prefix in ([2], []):
        stream = []
        for document in documents:
            if len(document):
                stream += (prefix if stream else []) + document.tolist()
        size = 10 if prefix else 11  # without a prefix the first token is context only
        expected = [stream[i : i + size] for i in range(0, len(stream) - size + 1, size)]

        def first(count: int, scan: int, prefix: list[int] = prefix) -> list[list[int]]:
            found, spans = packed(iter(documents), count, [10], prefix, scan, progress=False)
            assert len(found) == len(spans)
            return [s.tolist() for s in found]

        assert first(99, 99) == expected and len(expected) >= 6
        assert first(2, 99) == expected[:2]
        assert first(99, 4) == expected[: (23 + len(prefix) * 2) // size]
    (short,), (span,) = packed(iter(documents[:1]), 4, [10], [2], 9, progress=False)
    # Less than one sequence is better than nothing.
    assert span == ((0, 0),) and short.tolist() == documents[0].tolist()
    assert packed(iter([]), 4, [10], [2], 9, progress=False) == ([], [])


def test_all_of_the_documents_are_cut_to_the_longest_length_of_which_there_are_enough() -> None:
    """And to the training length at least."""
    documents = [np.full(100, i) for i in range(20)]  # 2,019 tokens with the separators

    def sizes(lengths: list[int], least: int = 1) -> set[tuple[int, int]]:
        found, _ = packed(iter(documents), None, lengths, [2], None, progress=False, least=least)
        return {(len(found), len(sequence)) for sequence in found}

    assert sizes([32, 62, 63, 64, 2048]) == {(32, 63)}  # 32 of 64 would be 2,048
    assert sizes([32, 500], least=500) == {(4, 500)}
    assert sizes([500, 900], least=4) == {(4, 500)}


def test_cutting_again_is_as_packing_to_that_length() -> None:
    draw = np.random.default_rng(0)
    documents = [draw.integers(3, 300, size=n) for n in (5, 0, 1, 170, 3, 40, 2, 90)]
    for prefix in ([2], []):
        long = packed(iter(documents), None, [100], prefix, None, progress=False)
        size = 10 if prefix else 11
        found, spans = recut(*long, size)
        expected, expected_spans = packed(iter(documents), len(found), [10], prefix, None, progress=False)
        assert [s.tolist() for s in found] == [s.tolist() for s in expected] and spans == expected_spans
        assert len(found) == sum(map(len, long[0])) // size > 20


def test_fingerprint_tells_tokens_and_bounds_apart() -> None:
    prints = {fingerprint(documents) for documents in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]], [[1, 2]])}
    assert len(prints) == 4 and fingerprint([np.array([1, 2]), [3]]) == fingerprint([[1, 2], [3]])


def test_suite_through_a_mirror(mirror: Path, scholar, tokenizer, tmp_path: Path) -> None:
    checkpoint = export_model(scholar, tokenizer, tmp_path / "model", CardInfo(seq_len=32))
    (mirror / "codeparrot").rename(mirror / "away")
    note = mirror / "lighteval/MATH-Hard/default/NOTE.txt"
    note.write_text("only easy\nones\n")
    perplexity = PerplexityConfig(
        sets=["codeparrot", "math_hard"], layout="packed", lengths=[32, 128], panels=[64, 128, 4096],
        bucket=16, documents=2, state_documents=1,
    )  # fmt: skip
    config = EvalConfig(
        str(checkpoint), str(tmp_path / "out"), str(mirror), suite=SuiteConfig("long", perplexity)
    )
    _, record = evaluate(config, progress=False)
    assert record["perplexity"]["codeparrot"]["error"].startswith(
        "data set codeparrot/codeparrot-clean-valid is"
    )
    assert record["perplexity"]["codeparrot"]["missing"]
    result = record["perplexity"]["math_hard"]
    ids = []
    for text in [ROWS["math_hard"][1]] * 40:
        ids += [tokenizer.eos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
    losses = token_losses(scholar, ids[:129])  # of the first sequence
    row = result["lengths"][1]
    targets = row["targets"][0]  # of the first document, with the separator after it
    assert targets == len(tokenizer.encode(ROWS["math_hard"][1], add_special_tokens=False)) + 1
    assert row["losses"][0] == pytest.approx(losses[:targets].mean(), abs=1e-4)
    assert row["sequences"] == 2 and row["documents"] == len(row["losses"]) == -(-256 // targets)
    per_byte = row["loss"] / math.log(2) * targets / (targets - 1)  # a token is a byte, a separator none
    assert row["bits_per_byte"] == pytest.approx(per_byte, rel=5e-3)
    assert result["data"]["sequences"] == 2 and result["data"]["tokens"] == 256
    assert result["states"]["positions"] == [64, 128] and result["states"]["documents"] == 1
    drawn = {file.name for file in (tmp_path / "out").iterdir()}
    for name in ("perplexity", "length_extrapolation", "states"):
        assert {f"{name}.png", f"{name}.pdf"} <= drawn
    text = (tmp_path / "out/table.md").read_text()
    assert "## Perplexity, math_hard †" in text and "\n† math_hard: only easy ones.\n" in text
    (mirror / "away").rename(mirror / "codeparrot")
    _, record = evaluate(config, progress=False)
    assert record["perplexity"]["codeparrot"]["lengths"] and record["perplexity"]["math_hard"] == result
    note.unlink()


def test_a_set_whose_rows_lack_a_column(mirror: Path, tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "lighteval/MATH-Hard"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text('{"question": "1+1?"}\n')
    with pytest.raises(ValueError, match=r"lighteval/MATH-Hard cannot be read \(KeyError: 'problem'\)"):
        list(hub_documents(PAPER_SETS["math_hard"], tokenizer, tmp_path))


def test_positions() -> None:
    assert positions_up_to(300) == [64, 128, 256, 300] and positions_up_to(256) == [64, 128, 256]
    assert positions_up_to(64) == [64] and positions_up_to(5) == [5] and positions_up_to(127) == [64, 127]


def test_effective_rank() -> None:
    q = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    assert effective_rank(q).item() == pytest.approx(6)
    assert effective_rank(torch.outer(q[0], q[1])).item() == pytest.approx(1, abs=1e-6)
    values = torch.tensor([3.0, 1.0]).double()
    expected = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert effective_rank(q[:, :2] * values @ q[:2]).item() == pytest.approx(expected)
    assert effective_rank(torch.zeros(2, 3, 4)).tolist() == [0, 0]
    lost = torch.stack([q, q * math.inf, q * math.nan])  # of a model that overflows: no reason to stop
    assert effective_rank(lost)[0].item() == pytest.approx(6) and effective_rank(lost)[1:].isnan().all()


@pytest.mark.parametrize("chunk", [7, 1000])
def test_state_statistics_against_the_recurrence(build_model, chunk: int) -> None:
    """Norms from a loop over single tokens; histograms from the gates of one forward pass."""
    model = build_model(initializer_range=0.3, allow_neg_eigval=True).double().eval()
    draw = np.random.default_rng(0)
    documents = [draw.integers(3, 320, size=n).tolist() for n in (24, 31)]
    found = state_statistics(model, documents, [8, 24], prefix=[2], chunk=chunk)
    ids = torch.tensor([[2, *document[:24]] for document in documents])
    seen = []
    hook = model.model.layers[1].attn.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    cache = None
    with torch.no_grad():
        for t in range(25):
            cache = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).past_key_values
            if t == 8:
                early = cache.layers[1].recurrent_states[0].clone()
        beta, g = model.model.layers[1].attn.gates(torch.cat(seen, 1))  # [2, 25, N, H], [2, 25, H]
    hook.remove()
    late = cache.layers[1].recurrent_states[0]
    assert [row[1] for row in found["norm"]] == pytest.approx(
        [state.flatten(2).norm(dim=-1).mean().item() for state in (early, late)]
    )
    assert found["effective_rank"][1][1] == pytest.approx(effective_rank(late).mean().item())
    counts = np.histogram(beta[:, 9:].numpy(), bins=20, range=(0, 2))[0]
    assert found["beta"][1][1] == pytest.approx(counts / counts.sum())
    counts = np.histogram(g[:, 9:].exp().numpy(), bins=20, range=(0, 1))[0]
    assert found["decay"][1][1] == pytest.approx(counts / counts.sum())
    assert found["positions"] == [8, 24] and found["layers"] == [0, 1] and found["beta_max"] == 2


def test_models_without_a_state_have_no_statistics(build_model) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_attention_heads=1, **shape))
    assert state_statistics(llama, [[1] * 9], [4]) is None
    with pytest.raises(ValueError, match="at least 9 tokens"):
        state_statistics(build_model(), [[1] * 5], [9])
    assert state_statistics(build_model(), [[1] * 9], [9])["decay"] is not None


def test_a_model_that_overflows_has_an_infinite_loss_and_loses_no_document(build_model) -> None:
    model = build_model().eval()
    with torch.no_grad():
        model.model.embeddings.weight[7] = math.nan
    table = loss_table(model, [[3] * 17, [3] * 12 + [7] * 5], (0, 8, 16))
    assert table.up_to(8).mean.documents == 2
    assert table.up_to(16).mean.value == math.inf and table.up_to(16).mean.stderr is None
    assert math.isfinite(table.up_to(16).numbers()["perplexity"]) and math.isfinite(table.up_to(8).losses[0])
