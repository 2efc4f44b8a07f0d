"""The report's views and the comparison, from records written by hand."""

import copy
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM

from fla_train.cli.eval import exit_status
from fla_train.eval.compare import comparison, flat_metrics, mark
from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.figures import _panel, legend
from fla_train.eval.paper import HEADS, paper_row
from fla_train.eval.report import page, write_report
from fla_train.eval.run import evaluate
from fla_train.eval.tables import COUNTS, data_notes, latex, markdown, notes
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model

TASKS = {
    "wikitext": {"word_perplexity": 30.0, "higher_is_better": {"word_perplexity": False}},
    "lambada_openai": {"perplexity": 40.0, "perplexity_stderr": 1.0, "acc": 0.30, "acc_stderr": 0.01}
    | {"higher_is_better": {"perplexity": False, "acc": True}},
    **{name: {"acc": 0.5, "acc_stderr": 0.01} for name in ("piqa", "winogrande", "arc_easy")},
    **{name: {"acc_norm": 0.4, "acc_norm_stderr": 0.01} for name in ("hellaswag", "arc_challenge")},
}


def row(length: int, losses: list[float]) -> dict:
    mean = sum(losses) / len(losses)
    return {"length": length, "loss": mean, "stderr": 0.5, "documents": len(losses), "losses": losses} | {
        "perplexity": math.exp(mean), "low": math.exp(mean - 1), "high": math.exp(mean + 1)
    }  # fmt: skip


def record(name: str, losses: list[float], **scores: float) -> dict:
    tasks = {
        task: {"scores": {task: values | {"examples": 9, "num_fewshot": 0, "fingerprint": "t"}}}
        for task, values in TASKS.items()
    }
    tasks["lambada_openai"]["scores"]["lambada_openai"] |= scores
    point = {key: value for key, value in row(64, losses).items() if key not in ("length", "losses")}
    states = {
        "positions": [64, 128], "layers": [0, 1], "documents": 1, "beta_max": 2.0, "decay": None,
        "norm": [[1.0, 2.0]] * 2, "effective_rank": [[3.0, 4.0]] * 2, "beta": [[[0.5, 0.5]] * 2] * 2,
    }  # fmt: skip
    return {
        "name": name,
        "checkpoint": name,
        "model": {"type": "delta_product", "parameters": 5, "parameters_embedding_once": 4},
        "trained_length": 64,
        "suite": {"name": "all", "perplexity": {"panels": [64, 128]}, "tasks": list(tasks), "limit": None},
        "mirror": None,
        "perplexity": {
            "web": {
                "lengths": [row(64, losses), row(128, losses)],
                "positions": [{"start": 0, "end": 64} | point, {"start": 64, "end": 128} | point],
                "not_reached": [],
                "states": states,
                "data": {"layout": "documents", "sequences": 3, "tokens": 300, "fingerprint": "f"},
            },
            "code": {"error": "not to be had <!--<script></script>"},
        },
        "tasks": tasks,
        "paper_row": paper_row(tasks),
        "environment": {"hardware": "abacus", "dtype": "float32", "packages": {"torch": "2"}, "commit": "c"},
        "seconds": 1.0,
    }


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href")]


def test_one_folder_with_everything(tmp_path: Path) -> None:
    write_report(tmp_path / "out", record("ours_1", [2.0, 3.0, 4.0]))
    figures = {
        f"{n}.{e}" for n in ("perplexity", "length_extrapolation", "states", "tasks") for e in ("png", "pdf")
    }
    texts = {"results.json", "table.md", "table.tex", "index.html"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == texts | figures
    for name in figures:
        start = (tmp_path / "out" / name).read_bytes()[:4]
        assert start == (b"\x89PNG" if name.endswith("png") else b"%PDF")
    text = (tmp_path / "out/table.md").read_text()
    assert "| **ours_1** | **30.00** | **40.00** | **30.0** |" in text
    assert "Could not run: not to be had" in text and "abacus, float32, torch 2, commit c" in text


def test_the_curve_of_a_panel() -> None:
    """Its own, over more documents; of an evaluation without the panel the beginning of its only curve."""
    result = record("a", [2.0, 3.0])["perplexity"]["web"]
    assert _panel(result, 64) == result["positions"][:1] and _panel({"error": "lost"}, 64) == []
    wide = [point | {"documents": 7} for point in result["positions"][:1]]
    assert _panel(result | {"panels": {"64": wide}}, 64) == wide
    assert _panel(result | {"panels": {"64": wide}}, 128) == result["positions"]


def test_latex_has_the_papers_columns_and_balanced_rows() -> None:
    text = latex([record("ours_1", [2.0, 3.0])])
    tables = re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, re.S)
    assert [len(columns) for columns, _ in tables] == [1 + 9, 4]
    for columns, body in tables:
        rows = [line for line in body.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
        assert all(line.count("&") == len(columns) - 1 for line in rows) and len(rows) > 1
    assert r"DeltaProduct\_3 [-1,1] 443M & 25.94 & 29.91 & 34.2 & 69.9" in text
    assert r"Wiki. ppl $\downarrow$" in text and r"ours\_1 & 30.00 & 40.00 & 30.0" in text
    assert not re.search(r"(?<!\\)_", text) and "↓" not in text


def test_latex_of_tasks_that_are_none_of_the_papers() -> None:
    one, two = record("one", [2.0]), record("two", [2.0])
    for value, found in ((0.5, one), (0.6, two)):
        scores = {"acc": value, "acc_stderr": 0.04, "higher_is_better": {"acc": True}, "fingerprint": "f"}
        found |= {"tasks": {"my_task": {"scores": {"my_task": scores}}}, "paper_row": {}, "perplexity": {}}
    (body,) = re.findall(r"\\begin\{tabular\}\{llrrrr\}(.*?)\\end", latex([one, two]), re.S)
    row = r"my\_task & acc & - & 0.500 $\pm$ 0.040 & 0.600 $\pm$ 0.040 & +0.1000 $\pm$ 0.0566 \\"
    assert " & chance & one & two & difference" in body and row in body


def test_the_page_stands_alone() -> None:
    one = record("<ours>", [2.0, math.inf])
    text = page([one])
    parsed = Page(text)
    assert not parsed.addresses and parsed.tags.count("script") == 2 and "link" not in parsed.tags
    assert "<title>&lt;ours&gt;</title>" in text and "__DATA__" not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert data["records"][0]["perplexity"]["code"]["error"] == "not to be had <!--<script></script>"
    assert "<!--" not in text
    assert data["records"][0]["perplexity"]["web"]["lengths"][0]["loss"] is None  # JSON has no infinity
    assert data["heads"] == list(HEADS[:9]) and data["cells"]["<ours>"]["Avg. ↑"] == "43.3"
    assert len(data["published"]) == 7 and all(len(cells) == 4 for cells in data["comparison"]["rows"])


def test_the_page_holds_no_more_than_it_shows() -> None:
    """Histograms over all layers; panels of other documents than the curve over all positions."""
    one = record("ours", [2.0, 3.0])
    result = one["perplexity"]["web"]
    result["states"]["beta"] = [[[0.5, 0.5], [0.25, 0.75]], [[0.0, 1.0]] * 2]
    more = [point | {"documents": 7} for point in result["positions"]]
    result["panels"] = {"64": result["positions"][:1], "96": more[:1], "128": result["positions"]}
    data = json.loads(re.search(r'id="data">(.*?)</script>', page([one]), re.S)[1])
    shown = data["records"][0]["perplexity"]["web"]
    assert list(shown["panels"]) == ["96"] and shown["panels"]["96"][0]["documents"] == 7
    assert shown["states"]["beta"] == [[0.375, 0.625], [0.0, 1.0]] and shown["states"]["decay"] is None
    assert shown["states"]["norm"] == result["states"]["norm"] and "losses" not in shown["lengths"][0]


def test_scores_on_data_with_a_note_are_marked() -> None:
    """And the average that holds one; nothing else is, nor the same columns of a model on the real data."""
    noted, plain = record("noted", [2.0, 3.0]), record("plain", [2.0, 3.0])
    noted["tasks"]["piqa"]["note"] = "a stand-in"
    noted["perplexity"]["web"]["note"] = "only easy ones"
    lines = ["† web: only easy ones.", "† piqa: a stand-in."]
    for records in ([noted], [noted, plain]):
        text = markdown(records)
        assert all(f"\n{line}\n" in text for line in lines)
        assert "| **noted** | **30.00** | **40.00** | **30.0** | **50.0 †** | **40.0** |" in text
        assert "| **40.0** | **43.3 †** |" in text
        tex = latex(records)
        assert r"noted & 30.00 & 40.00 & 30.0 & 50.0 $\dagger$ & 40.0" in tex
        assert r"{\footnotesize $\dagger$ piqa: a stand-in.\par}" in tex
        data = json.loads(re.search(r'id="data">(.*?)</script>', page(records), re.S)[1])
        assert data["footnotes"] == lines
        assert [head for head, cell in data["cells"]["noted"].items() if "†" in cell] == [
            "PIQA acc ↑",
            "Avg. ↑",
        ]
        marked = {tuple(cells[:2]) for cells in data["comparison"]["rows"] if "†" in "".join(cells)}
        assert marked == {("piqa", "acc"), *(("web", f"perplexity, {n} tokens") for n in (64, 128))}
    assert "| piqa | acc | - | 0.500 ± 0.010 † | 0.500 ± 0.010 |" in text
    assert "†" not in markdown([plain]) + page([plain]).partition("<script")[0] + latex([plain])


def test_marks() -> None:
    assert mark(0.5, 1.0, lower_is_better=True) == mark(3.0, None, True) == mark(0.0, 0.0, True) == ""
    assert mark(2.5, 1.0, lower_is_better=True) == "▼" and mark(2.5, 1.0, lower_is_better=False) == "▲"
    assert mark(-2.0, 1.0, lower_is_better=True) == "" and mark(math.inf, None, True) == "▼"
    assert mark(math.nan, 1.0, True) == mark(1.0, math.nan, True) == ""


def test_differences_are_paired_on_the_same_sequences_only() -> None:
    """Documents differ far more than the models do: only the paired error shows the difference."""
    base = record("base", [1.0, 3.0, 5.0])
    better = record("better", [0.9, 2.8, 4.9])  # less by 0.133 on average, with a spread of 0.058
    noisy = record("noisy", [0.0, 3.0, 5.5])  # -0.167, spread 0.764
    other = copy.deepcopy(better) | {"name": "other"}
    other["perplexity"]["web"]["data"]["fingerprint"] = "g"
    rows = {(r.group, r.label): r.cells for r in comparison([base, better, noisy, other])}
    cells = rows["web", "perplexity, 64 tokens"]
    assert [cell.mark for cell in cells] == ["", "▲", "", ""]
    better, noisy, other = cells[1:]
    assert (
        better.difference == pytest.approx(math.exp(3 - 0.4 / 3) - math.exp(3)) and other.difference is None
    )
    # The errors are of perplexities: those of the paired losses, at the same number of standard errors.
    assert better.difference / better.difference_error == pytest.approx(-0.4 / 3 / 0.0333333, rel=1e-4)
    assert noisy.difference_error == pytest.approx(noisy.difference / (-0.5 / 3) * 0.4409586, rel=1e-4)
    assert cells[0].value == pytest.approx(math.exp(3)) and cells[0].error == pytest.approx(math.exp(3) / 2)


def test_other_tokens_are_said_to_be_others() -> None:
    base, same, other = (record(name, [1.0, 2.0]) for name in ("base", "same", "other"))
    other["perplexity"]["web"]["data"]["fingerprint"] = "of another tokenizer"
    assert "other tokenizers" not in "".join(notes([base, same]))
    line, _ = notes([base, same, other])
    assert line.startswith("web: not all models read the same tokens") and line in markdown([base, other])


def test_lengths_that_fewer_documents_have_are_said_to_be_of_others() -> None:
    one = record("one", [1.0, 2.0])
    one["perplexity"]["web"]["lengths"][1] = row(128, [1.0])
    assert COUNTS in notes([one]) and COUNTS in markdown([one]) and COUNTS in page([one])


def test_a_training_length_is_marked_only_where_it_was_recorded(
    build_model, tokenizer, tmp_path: Path
) -> None:
    """A Llama, whose folder says how many positions it has and nothing of its training; and an export."""
    size = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, max_position_embeddings=32, **size))
    llama.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    export_model(build_model(), tokenizer, tmp_path / "ours", CardInfo(seq_len=32), validate=False)
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"text": "red and blue " * 9}) + "\n")
    suite = SuiteConfig("short", PerplexityConfig(sets=[str(file)], lengths=[16, 32], bucket=8))
    for name, length in (("llama", None), ("ours", 32)):
        config = EvalConfig(str(tmp_path / name), str(tmp_path / f"{name}_out"), device="cpu", suite=suite)
        folder, found = evaluate(config, progress=False)
        assert found["trained_length"] == length
        assert ("| 32 (trained) |" in (folder / "table.md").read_text()) == (length is not None)


def test_documents_with_and_without_a_prefix_token_are_not_paired() -> None:
    """The same documents, of which one is a target too short without the prefix."""
    rows = comparison([record("with", [1.0, 3.0, 5.0]), record("without", [0.9, 2.8])])
    assert [cell.mark for cell in rows[0].cells] == ["", ""]


def test_perplexities_of_an_untrained_model_fit_into_a_cell() -> None:
    one = record("ours", [2.0, 3.0])
    for row in one["perplexity"]["web"]["lengths"]:
        row |= {"perplexity": math.exp(700), "low": math.exp(600), "high": math.exp(700)}
    one["tasks"]["wikitext"]["scores"]["wikitext"]["word_perplexity"] = 1.5e60
    one["paper_row"] = paper_row(one["tasks"])
    for text in (markdown([one]), markdown([one, one]), latex([one])):
        assert not re.search(r"\d{20}", text) and "1.50e+60" in text and "1.01" in text


def test_latex_escapes_every_sign_of_a_name() -> None:
    text = latex([record(r"~/a^2 {b} $c\d", [2.0, 3.0])])
    escaped = r"\textasciitilde{}/a\textasciicircum{}2 \{b\} \$c\textbackslash{}d"
    assert f" & chance & {escaped} " in text


def test_differences_of_task_scores() -> None:
    """Standard errors of 0.01 each make 0.0141 for the difference."""
    records = [record("a", [1.0], acc=0.30), record("b", [1.0], acc=0.32), record("c", [1.0], acc=0.26)]
    records += [record("d", [1.0], acc=0.31, perplexity=35.0), record("e", [1.0], acc=0.9, fingerprint="u")]
    del records[3]["tasks"]["piqa"]
    rows = {(r.group, r.label): r.cells for r in comparison(records)}
    assert [cell.mark for cell in rows["lambada_openai", "acc"]] == [
        "",
        "",
        "▼",
        "",
        "",
    ]  # e: other prompts
    assert rows["lambada_openai", "acc"][1].difference_error == pytest.approx(0.02**0.5 / 10)
    assert [cell.mark for cell in rows["lambada_openai", "perplexity"]] == ["", "", "", "▲", ""]
    assert rows["piqa", "acc"][3].value is None and rows["wikitext", "word_perplexity"][1].mark == ""
    assert ("lambada_openai", "acc_stderr") not in rows and ("lambada_openai", "examples") not in rows
    for key in ("fingerprint", "higher_is_better", "by_document"):
        assert ("lambada_openai", key) not in rows


def test_scores_are_paired_by_document() -> None:
    """Models that fail on the same questions: 4 of 40 more are two errors, and less than one by the root of
    the summed squares; a single one is an error and not beyond it. And WikiText's perplexity, for which
    lm-eval has no error, on pages that differ far more than the models do.
    """
    right = [0.0, 1.0] * 20
    pages = [2.0, 3.0, 4.0]
    records = []
    for name, more, change in (("a", 0, 0.0), ("b", 4, -0.1), ("c", 1, 0.0)):
        one = record(name, [1.0], acc=0.5 + more / 40, acc_stderr=0.08)
        mine = [1.0] * (2 * more) + right[2 * more :]
        one["tasks"]["lambada_openai"]["scores"]["lambada_openai"]["by_document"] = {"acc": mine}
        losses = [page + change + 0.01 * i * (change < 0) for i, page in enumerate(pages)]
        wiki = one["tasks"]["wikitext"]["scores"]["wikitext"]
        wiki |= {"word_perplexity": math.exp(sum(losses) / 3), "by_document": {"word_perplexity": losses}}
        records.append(one)
    rows = {(r.group, r.label): r.cells for r in comparison(records)}
    assert [cell.mark for cell in rows["lambada_openai", "acc"]] == ["", "▲", ""]  # 4 of 40: 2.08 errors
    assert [cell.mark for cell in rows["wikitext", "word_perplexity"]] == ["", "▲", ""]
    del records[1]["tasks"]["lambada_openai"]["scores"]["lambada_openai"]["by_document"]
    rows = {(r.group, r.label): r.cells for r in comparison(records)}
    assert rows["lambada_openai", "acc"][1].mark == ""  # 0.1 of 0.113
    assert '"by_document"' not in page(records) and '"losses"' not in page(records)


def test_the_task_says_which_direction_is_better() -> None:
    """Not the metric's name: here a `loss` of which more is better, and one whose task says nothing."""

    def scored(value: float, better: dict) -> dict:
        found = record("a", [1.0])
        scores = {"higher_is_better": better, "examples": 9, "num_fewshot": 0, "fingerprint": "t"}
        scores |= {name: value for name in ("loss", "acc")} | {"loss_stderr": 0.1, "acc_stderr": 0.1}
        return found | {"tasks": {"odd": {"scores": {"odd": scores}}}}

    rows = comparison([scored(1.0, {"loss": True}), scored(2.0, {"loss": True})])
    marks = {row.label: row.cells[1].mark for row in rows if row.group == "odd"}
    assert marks == {"loss": "▲", "acc": ""}
    rows = comparison([scored(1.0, {}), scored(2.0, {"acc": False, "loss": False})])
    assert {row.label: row.cells[1].mark for row in rows if row.group == "odd"} == {"loss": "▼", "acc": "▼"}


def test_side_by_side_in_markdown() -> None:
    one, two = record("a", [1.0, 2.0]), record("b", [1.0, 2.0])
    two["tasks"]["swde"] = {"error": "no data"}
    text = markdown([one, two])
    assert (
        text.startswith("# a, b\n")
        and "| lambada_openai | acc | - | 0.300 ± 0.010 | 0.300 ± 0.010 | 0.0000 ± 0.0141 |" in text
    )
    assert text.count("\n| **") == 2  # both rows below the published ones
    assert "\na, code: could not run: not to be had <" in text
    assert "\nb, swde: could not run: no data\n" in text


def test_evaluations_without_results_have_no_table() -> None:
    lost = [record(name, [1.0]) | {"tasks": {}, "paper_row": {}} for name in "ab"]
    for one in lost:
        one["perplexity"] = {"web": {"error": "none"}}
    assert "|" not in markdown(lost) and "b, web: could not run: none" in markdown(lost)


def test_a_part_of_the_documents_and_prompts_with_examples_are_said_everywhere(tmp_path: Path) -> None:
    """In every table that may be copied from the report, and in the figure beside the published rows."""
    some = record("some", [2.0])
    some["suite"] |= {"limit": 20, "num_fewshot": 2}
    lines = [
        "Only the first 20 examples of each task (suite.limit): some.",
        "2-shot (suite.num_fewshot): some.",
    ]
    for records in ([some], [record("whole", [2.0]), some]):
        assert data_notes(records) == lines
        html = page(records)
        for line in lines:
            assert line in markdown(records) and line in html
            assert line.replace("_", r"\_") in latex(records)
    assert data_notes([some, some])[1] == "2-shot (suite.num_fewshot): some, some."
    assert data_notes([some | {"tasks": {}}]) == []


def test_metrics_for_the_training_log() -> None:
    found = flat_metrics(record("a", [1.0, 2.0]))
    assert found["eval/web/loss_128"] == 1.5 and found["eval/lambada_openai/acc"] == 0.3
    assert len(found) == 2 + 8 and all(isinstance(value, float) for value in found.values())


@pytest.mark.parametrize("models", [1, 2, 8])
@pytest.mark.parametrize("columns", [1, 3])
def test_the_whole_legend_is_on_the_figure(models: int, columns: int) -> None:
    figure = Figure(figsize=(3.3 * columns, 3), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)
    for i in range(models):
        axes[0, 0].plot([0, 1], label=f"gated_delta_product_{i}/step-0000520")
    legend(axes)
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


LOST, FAILED = {"error": "no data", "missing": True}, {"error": "broken", "missing": False}


@pytest.mark.parametrize(
    ("sets", "code"),
    [({"web": {}, "code": {}}, 0), ({"web": {}, "code": LOST}, 0), ({"web": LOST, "code": LOST}, 1),
     ({"web": {}, "code": FAILED}, 1), ({"web": LOST, "code": FAILED}, 1)],
)  # fmt: skip
def test_sets_whose_data_are_not_here_do_not_fail_the_others(
    sets: dict, code: int, capsys: pytest.CaptureFixture
) -> None:
    assert exit_status(Path("out"), {"perplexity": sets, "needle": {}, "tasks": {}}) == code
    said = capsys.readouterr().err
    assert ("suite.perplexity.sets=[web]" in said) == (sets == {"web": {}, "code": LOST})
