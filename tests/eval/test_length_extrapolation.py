"""The length-extrapolation suite: how documents are packed, and the papers' sets."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig, set_name
from fla_train.eval.documents import longest_documents, pack_documents, recut_sequences
from fla_train.eval.perplexity import loss_table
from fla_train.eval.run import evaluate
from fla_train.eval.sets import PAPER_SETS, hub_documents
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.utils.keys import find_errors
from tests.eval.conftest import token_losses, value, write_mirror

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
    """Return a mirror in which every set has 40 rows."""
    sets = {
        (PAPER_SETS[name].hub, PAPER_SETS[name].config or "default", PAPER_SETS[name].split): [row] * 40
        for name, (row, _) in ROWS.items()
    }
    return write_mirror(tmp_path_factory.mktemp("mirror"), sets)


def test_the_suite_holds_the_papers_sets_and_panels() -> None:
    loaded = OmegaConf.load(ROOT / "configs/suite/length_extrapolation.yaml")
    config = PerplexityConfig(**OmegaConf.to_container(loaded.perplexity))
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
            found, spans = pack_documents(iter(documents), count, [10], prefix, scan, progress=False)
            assert len(found) == len(spans)
            return [s.tolist() for s in found]

        assert first(99, 99) == expected and len(expected) >= 6
        assert first(2, 99) == expected[:2]
        assert first(99, 4) == expected[: (23 + len(prefix) * 2) // size]
    (short,), (span,) = pack_documents(iter(documents[:1]), 4, [10], [2], 9, progress=False)
    # Less than one sequence is better than nothing.
    assert span == ((0, 0),) and short.tolist() == documents[0].tolist()
    assert pack_documents(iter([]), 4, [10], [2], 9, progress=False) == ([], [])


def test_all_of_the_documents_are_cut_to_the_longest_length_of_which_there_are_enough() -> None:
    """And to the training length at least."""
    documents = [np.full(100, i) for i in range(20)]  # 2,019 tokens with the separators

    def sizes(lengths: list[int], min_length: int = 1) -> set[tuple[int, int]]:
        found, _ = pack_documents(
            iter(documents), None, lengths, [2], None, progress=False, min_length=min_length
        )
        return {(len(found), len(sequence)) for sequence in found}

    assert sizes([32, 62, 63, 64, 2048]) == {(32, 63)}  # 32 of 64 would be 2,048
    assert sizes([32, 500], min_length=500) == {(4, 500)}
    assert sizes([500, 900], min_length=4) == {(4, 500)}


def test_the_longest_documents_have_a_token_of_context_more_than_targets() -> None:
    documents = [np.arange(size) for size in (3, 9, 4, 8)]
    for count, sizes in ((2, [5, 5]), (None, [5, 5, 4, 3])):
        found = longest_documents(iter(documents), count, 4, None, progress=False)
        assert [document.tolist() for document in found] == [[*range(size)] for size in sizes]


def test_cutting_again_is_as_packing_to_that_length() -> None:
    draw = np.random.default_rng(0)
    documents = [draw.integers(3, 300, size=n) for n in (5, 0, 1, 170, 3, 40, 2, 90)]
    for prefix in ([2], []):
        long = pack_documents(iter(documents), None, [100], prefix, None, progress=False)
        size = 10 if prefix else 11
        found, spans = recut_sequences(*long, size)
        expected, expected_spans = pack_documents(
            iter(documents), len(found), [10], prefix, None, progress=False
        )
        assert [s.tolist() for s in found] == [s.tolist() for s in expected] and spans == expected_spans
        assert len(found) == sum(map(len, long[0])) // size > 20


def test_suite_through_a_mirror(mirror: Path, scholar, tokenizer, tmp_path: Path) -> None:
    checkpoint = export_model(scholar, tokenizer, tmp_path / "model", CardInfo(seq_len=32))
    (mirror / "codeparrot").rename(mirror / "away")
    perplexity = PerplexityConfig(
        sets=["codeparrot", "math_hard"], layout="packed", lengths=[32, 128], panels=[64, 128, 4096],
        bucket=16, documents=2,
    )  # fmt: skip
    config = EvalConfig(
        str(checkpoint), str(tmp_path / "out"), str(mirror), suite=SuiteConfig("long", perplexity)
    )
    _, result = evaluate(config, progress=False)  # a mirror is never completed from the Hub
    assert result.errors["codeparrot"].startswith("data set codeparrot/codeparrot-clean-valid cannot be read")
    assert "hf download" in result.errors["codeparrot"]
    ids = []
    for text in [ROWS["math_hard"][1]] * 40:
        ids += [tokenizer.eos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
    losses = token_losses(scholar, ids[:129])  # of the first sequence
    loss = result.find("perplexity", "math_hard", "loss", 128)
    targets = loss.weights[0]  # of the first document, with the separator after it
    assert targets == len(tokenizer.encode(ROWS["math_hard"][1], add_special_tokens=False)) + 1
    assert loss.by_document[0] == pytest.approx(losses[:targets].mean(), abs=1e-4)
    assert loss.sequences == 2 and loss.documents == len(loss.by_document) == -(-256 // targets)
    per_byte = loss.value / math.log(2) * targets / (targets - 1)  # a token is a byte, a separator none
    assert value(result, "math_hard", "bits_per_byte", 128) == pytest.approx(per_byte, rel=5e-3)
    assert {curve.length: curve.edges[-1] for curve in result.curves} == {64: 64, 128: 128}
    drawn = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"perplexity.png", "perplexity.pdf", "table.md", "table.csv", "table.tex"} <= drawn
    (mirror / "away").rename(mirror / "codeparrot")
    _, again = evaluate(config, progress=False)
    assert not again.errors and [s for s in again.scores if s.data == "math_hard"] == result.scores


def test_a_model_that_overflows_has_an_infinite_loss_and_loses_no_document(build_model) -> None:
    model = build_model().eval()
    with torch.no_grad():
        model.model.embeddings.weight[7] = math.nan
    table = loss_table(model, [[3] * 17, [3] * 12 + [7] * 5], (0, 8, 16))
    assert all(table.up_to(8).targets)
    assert table.up_to(16).mean.value == math.inf and table.up_to(16).mean.stderr is None
    assert math.isfinite(table.up_to(16).values()["perplexity"].value) and math.isfinite(
        table.up_to(8).losses[0]
    )
