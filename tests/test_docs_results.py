"""Tables of current figures in docs/ are those of the JSON in docs/reports/."""

import importlib.util
import json
import re

import pytest
from test_layout import ROOT

SPEC = importlib.util.spec_from_file_location("docs_results", ROOT / "scripts" / "docs_results.py")
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def test_pages_agree_with_their_json(capsys: pytest.CaptureFixture) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_each_file_of_figures_is_on_a_page() -> None:
    files = {path.stem for path in (ROOT / "docs" / "reports" / "benchmarks").glob("*.json")}
    assert files == set(re.findall(r"\sbenchmarks/([\w.-]+)", (ROOT / "docs" / "benchmarks.md").read_text()))


def test_a_page_that_differs_is_found_and_rewritten(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(script, "DOCS", tmp_path / "docs")
    (tmp_path / "docs" / "reports").mkdir(parents=True)
    environment = {
        "time": "2031-02-03T04:05:06+00:00",
        "command": ["/venv/bin/fla-bench", "kernels", "--norm", "--json", "f.json"],
        "commit": f"{'c' * 40}-dirty",
        "hardware": "a card",
        "packages": {"torch": "9.8", "numpy": "1.2", "lm-eval": None},
    }
    row = {"kernel": "fla_train triton", "num_householder": 2, "gated": True, "memory_bytes": 3 * 2**20}
    rows = [row | {"forward_ms": 1.25, "both_ms": 4.0}]
    (tmp_path / "docs" / "reports" / "x.json").write_text(
        json.dumps({"environment": environment, "rows": rows})
    )
    page = tmp_path / "docs" / "page.md"
    page.write_text("before\n<!-- table: operator\n  x -->\nold\n<!-- end of table -->\nafter\n")
    assert script.main(["--check"]) == 1 and "old" in page.read_text()
    assert script.main([]) == 0 and script.main(["--check"]) == 0
    assert page.read_text() == (
        "before\n<!-- table: operator\n  x -->\n\n```sh\nfla-bench kernels --norm\n```\n\n"
        "| n_h | gate | forward ms | forward + backward ms | memory MiB |\n|---|---|---|---|---|\n"
        "| 2 | yes | 1.250 | 4.000 | 3 |\n\n"
        "a card, torch 9.8, commit ccccccc with edits, 2031-02-03 ([JSON](reports/x.json)).\n\n"
        "<!-- end of table -->\nafter\n"
    )
    assert "docs/page.md: differs" in capsys.readouterr().out


def test_peers_of_several_files_are_compared_with_ours_of_the_same_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(script, "DOCS", tmp_path)
    (tmp_path / "reports").mkdir()
    environment = {"command": ["fla-bench", "kernels"], "hardware": "a card", "packages": {"attn-gym": "7.8"}}

    def measured(name: str, ours: float, **others: float | None) -> script.Measurement:
        rows = [
            {"kernel": f"{kernel} rule", "num_householder": 1, "gated": True, "both_ms": time}
            for kernel, time in {"fla_train": ours, **others}.items()
        ]
        (tmp_path / "reports" / f"{name}.json").write_text(
            json.dumps({"environment": environment, "rows": rows})
        )
        return script.Measurement(name)

    found = measured("a", 2.0, **{"attn-gym": 3.0}, fla=None), measured("b", 4.0, FlashQLA=5.0)
    text = "\n".join(script.operator_peers(*found))
    assert "| n_h | gate | ours, ms | attn-gym, ms | FlashQLA, ms |" in text
    assert "| 1 (1) | yes | 2.000 | 3.000 (1.50x) | |" in text
    assert "| 1 (2) | yes | 4.000 | | 5.000 (1.25x) |" in text
    assert "(1), (2): a card, attn-gym 7.8" in text
