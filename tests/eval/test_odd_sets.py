"""Sets of the sweep that cannot be had, are short of memory, or have odd names."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch

from fla_train.eval import sweep
from fla_train.eval.config import PerplexityConfig, SuiteConfig, set_name
from fla_train.eval.mirror import DatasetUnavailable
from fla_train.eval.result_cache import ResultCache
from fla_train.eval.sets import PAPER_SETS, hub_documents
from fla_train.eval.sweep import run_sweep
from fla_train.utils.keys import find_errors
from tests.eval.conftest import short_of_memory


@pytest.fixture
def measured(build_model, tokenizer, tmp_path: Path):
    """`measured(names, **settings)`: the sweep over files of these names, each with the same five texts, and
    over files in `more` as they are.
    """

    def run(names: list[str], more: Sequence[str] = (), **settings: object) -> dict:
        for name in names:
            rows = (json.dumps({"text": "red and blue " * n}) + "\n" for n in (9, 12, 7, 9, 8))
            (tmp_path / name).write_text("".join(rows))
        torch.manual_seed(0)
        model = build_model(initializer_range=0.3).double().eval()
        config = PerplexityConfig(
            [str(tmp_path / name) for name in (*names, *more)], lengths=[16, 64], **settings
        )
        parts = ResultCache(tmp_path / "parts", {})
        return run_sweep(model, tokenizer, config, run=None, mirror=None, cache=parts, progress=False)

    return run


def test_a_file_that_may_not_be_read_costs_only_itself(measured, monkeypatch) -> None:
    plain = Path.open

    def guarded(path: Path, mode: str = "r", *rest: object, **options: object) -> IO:
        if path.name == "secret.jsonl" and "r" in mode:  # the tests may run as root, who may read all
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", guarded)
    found = measured(["secret.jsonl", "open.jsonl"])
    assert "secret.jsonl: cannot be read" in found["secret"]["error"]
    assert found["open"]["lengths"][0]["documents"] == 5


@pytest.mark.parametrize("layout", ["documents", "packed"])
def test_an_empty_file_costs_only_itself(measured, tmp_path: Path, layout: str) -> None:
    """No length could be lowered for it."""
    (tmp_path / "none.jsonl").touch()
    found = measured(["open.jsonl"], more=["none.jsonl"], layout=layout, documents=None)
    assert "lengths" in found["open"] and "suite.perplexity.lengths" not in found["none"]["error"]


def test_a_full_disk_stops_the_sweep(measured, monkeypatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ResultCache, "__call__", full)
    with pytest.raises(OSError, match="No space left"):
        measured(["open.jsonl"])


def test_states_are_looked_at_in_halves_when_memory_is_short(measured, monkeypatch, tmp_path) -> None:
    expected = measured(["texts.jsonl"], state_documents=5)["texts"]["states"]
    sizes = short_of_memory(monkeypatch, sweep, "state_statistics", most=2)
    (tmp_path / "parts/perplexity-texts.json").unlink()
    found = measured(["texts.jsonl"], state_documents=5)["texts"]["states"]
    assert sizes == [5, 2, 3, 1, 2] and found.keys() == expected.keys()
    for name, values in expected.items():  # ranks are rounded like the eigenvalues that they come from
        assert np.allclose(found[name], values, rtol=1e-6, atol=1e-9), name
    short_of_memory(monkeypatch, sweep, "state_statistics", most=0)
    (tmp_path / "parts/perplexity-texts.json").unlink()
    found = measured(["texts.jsonl", "more.jsonl"], state_documents=5)
    assert all(
        "or set suite.perplexity.state_documents=0" in found[name]["error"] for name in ("texts", "more")
    )


def test_a_stream_that_cannot_be_had_or_breaks_is_named(tokenizer, tmp_path, monkeypatch) -> None:
    import datasets

    def no_network(*args: object, **options: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    for mirror in (None, tmp_path):
        with pytest.raises(
            DatasetUnavailable, match=r"cerebras/SlimPajama-627B/ .*scripts/build_eval_mirror\.py"
        ):
            next(hub_documents(PAPER_SETS["slimpajama"], tokenizer, mirror))

    def breaks(*args: object, **options: object):
        yield {"text": "red"}
        raise ConnectionError("reset")

    monkeypatch.setattr(datasets, "load_dataset", breaks)
    with pytest.raises(DatasetUnavailable, match=r"\(ConnectionError: reset\)"):
        list(hub_documents(PAPER_SETS["slimpajama"], tokenizer, None))


def test_names_end_before_known_endings_only(tmp_path: Path, monkeypatch) -> None:
    names = {
        "v1.0-web.jsonl": "v1.0-web",
        "a/v1.0-code.jsonl.gz": "v1.0-code",
        "web.v2.parquet": "web.v2",
        "v1.0/*.jsonl": "v1.0",
        "corpus.v3": "corpus.v3",
        "~/texts.jsonl": "texts",
    }
    assert {path: set_name(path) for path in names} == names
    assert not find_errors(SuiteConfig("own", PerplexityConfig(sets=list(names))), "suite.")
    monkeypatch.chdir(tmp_path)
    assert set_name(".") == set_name("*.jsonl") == tmp_path.name


def test_a_file_is_told_from_the_papers_set(measured, build_model, monkeypatch, tokenizer, tmp_path) -> None:
    found = measured(["slimpajama.jsonl"])
    assert found["slimpajama"]["own_file"] is True
    assert measured(["slimpajama.jsonl"]) == found  # the kept part, too
    ours = tokenizer.encode("red and blue " * 30, add_special_tokens=False)
    monkeypatch.setattr(sweep, "hub_documents", lambda *args: (ids for ids in [ours]))
    config = PerplexityConfig(["slimpajama"], lengths=[16])
    options = {"run": None, "mirror": None, "cache": ResultCache(tmp_path / "other", {}), "progress": False}
    paper = run_sweep(build_model().eval(), tokenizer, config, **options)
    assert "lengths" in paper["slimpajama"] and "own_file" not in paper["slimpajama"]
