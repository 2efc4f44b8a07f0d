"""Tables of current figures in docs/ are those of the JSON in docs/reports/."""

import importlib.util
import json
import re
import statistics
from types import ModuleType

import pytest
from test_layout import ROOT

from fla_train.eval.expressivity_table import read_tables


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script, figures = _script("docs_results"), _script("docs_figures")


def test_pages_agree_with_their_json(capsys: pytest.CaptureFixture) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_curves_are_of_rows_and_columns_of_the_tables_and_on_a_page() -> None:
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("results", "expressivity"))
    for name, panels in figures.FIGURES.items():
        table = read_tables()[panels.table]
        assert set(panels.columns) <= set(table["columns"]) and set(panels.rows) <= set(table["rows"])
        assert f"(figures/{name}.png)" in pages and (ROOT / "docs" / "figures" / f"{name}.png").is_file()


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


def test_a_papers_table_has_its_layout_with_published_figures_beside_ours(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(script, "DOCS", tmp_path)
    (tmp_path / "reports").mkdir()

    def cell(*values: float, cut: int = 0, half: dict | None = None, **beside: dict[str, float]) -> dict:
        seeds = {f"seed-{number}": value for number, value in enumerate(values)}
        numbers = {"best": max(values), "median": statistics.median(values), "lowest": min(values)}
        steps = {seed: 2000 + 500 * number for number, seed in enumerate(seeds)}
        share = {seed: count / 2e5 for seed, count in steps.items()}
        return numbers | {
            "values": seeds, "cut": cut, "steps": steps, "share_of_paper_words": share, "beside": beside,
            "half": half or {},
        }  # fmt: skip

    def environment(**more: str | int | dict) -> dict:
        about = {"hardware": "a card", "packages": {"torch": "9.8"}, "commit": "c" * 40, "time": "2031-02-03"}
        return about | {"runs": 4} | more

    parity = {"Mamba [-1, 1]": cell(0.9, 0.95, cut=1), "DeltaNet [-1, 1]": cell(1.0, 0.5, 0.75)}
    parity |= {"Mamba-2": cell(1.0, 1.0, 1.0), "GLA": cell(-0.25), "RetNet": None}
    formal = {row: {"parity": content, "with brackets": None} for row, content in parity.items()}
    environments = [environment(), environment(hardware="another", time="2031-02-03 to 2031-02-05")]
    # Of the first kind: equal versions, of another commit and day. A package of two versions is another kind.
    more = {"packages": {"torch": "9.8", "triton": "1.2"}, "time": "2031-01-31", "runs": 2}
    environments += [environment(**more), environment(**more, commit="d" * 40)]
    environments.append(environment(packages={"torch": "9.9", "triton": None}))
    ours = {
        "DeltaProduct_2 [-1, 1]": {
            "S3": cell(0.25, half={"seed-0": [3, 9]}, **{"at 2048": {"seed-0": 0.125, "seed-1": 0.5}})
        }
    }
    tables = {
        "formal": {"environments": environments, "rows": formal},
        "state_tracking_512": {"environments": [environment(runs=1)], "rows": ours},
        "layers": {"environments": [], "rows": {}},
        "regbench": {"environments": [], "rows": {}},
    }
    (tmp_path / "reports" / "t.json").write_text(json.dumps(tables))
    page = tmp_path / "page.md"
    page.write_text(
        "".join(f"<!-- table: papers_table t:{name} -->\n<!-- end of table -->\n" for name in tables)
    )
    assert script.main([]) == 0 and script.main(["--check"]) == 0
    first, second, third, fourth, _ = page.read_text().split("<!-- end of table -->")
    words = " ".join(first.split())
    assert "Formal languages, scaled accuracy at lengths 40 to 256. Paper: arXiv 2502.10297, table" in words
    assert "| model | parity: paper | ours | mod. arithmetic: paper | ours | with brackets: paper |" in first
    for line in (
        "| sLSTM | 1.000 | | 0.787 | | 0.173 | | 0.653 | |",
        "| Mamba [-1, 1] | 1.000 | 0.950* (0.925; 0.900), 2 seeds | 0.241 | | 0.136 | | 0.459 | |",
        "| DeltaNet [-1, 1] | 0.982 | 1.000 (0.750; 0.500) | 0.915 | | 0.253 | | 0.717 | |",
        "| Mamba-2 | | 1.000, 3 seeds | | | | | | |",
        "| GLA | | -0.250, 1 seed | | | | | | |",
    ):
        assert line in first.splitlines()
    assert "RetNet" not in first
    assert (
        "Steps (presented sequences, relative to the full recipe): parity 2,000 to 3,000 (1 to 1.5%)."
        in first
    )
    sources = [
        "a card, torch 9.8, triton 1.2 (some runs), 2031-01-31 to 2031-02-03, "
        "commit ccccccc (6 runs), commit ddddddd (2 runs)",
        "another, torch 9.8, 2031-02-03 to 2031-02-05, commit ccccccc (4 runs)",
        "a card, torch 9.9, 2031-02-03, commit ccccccc (4 runs)",
    ]
    assert f"{'; '.join(sources)} ([JSON](reports/t.json))." in words
    # Columns of which the paper has no number, what is beside ours, and columns of which there is nothing.
    assert (
        "| model | S3: ours | at 2048; half right to |\n|---|---|---|\n| DeltaProduct_2 [-1, 1] | 0.250, 1"
        in second
    )
    assert (
        " seed | 0.125 to 0.500; 3 |\n\nSteps (presented sequences, relative to the full recipe): "
        "S3 2,000 (1%).\n\na card" in second
    )
    assert "commit ccccccc (1 run) (" in second
    assert "| 2 layers | no | | | no | | | no | | |" in third and "not run yet ([JSON]" in third
    assert "| model" not in fourth
