"""The papers' suites: lm-eval's own task definitions on a small mirror of the Hub, and the papers' table."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import datasets
import lm_eval.tasks
import pytest
import torch
from lm_eval.tasks import TaskManager
from omegaconf import OmegaConf

from fla_train.eval import harness
from fla_train.eval.config import EvalConfig, SuiteConfig
from fla_train.eval.harness import FlaTrainLM, run_tasks
from fla_train.eval.mirror import DatasetUnavailable, hub_datasets
from fla_train.eval.paper import AVERAGE, HEADS, RECALL, ZERO_SHOT, paper_cell, paper_row
from fla_train.eval.run import evaluate
from fla_train.eval.tables import paper_heads, paper_markdown
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.utils.keys import find_errors
from tests.eval.conftest import token_losses

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = Path(lm_eval.tasks.__file__).parent
TASKS = ["wikitext", "lambada_openai", "arc_easy", "squad_completion"]

PAGES = [
    " = Ann = \n \n She sang , twice . \n = = Life = = \n It was 1 @,@ 000 years . \n",
    " = Bob = \n He ran . \n",
]
DETOKENIZED = [  # by hand: lm-eval takes the spaces before punctuation and around newlines out
    " = Ann =\n\nShe sang, twice.\n== Life ==\nIt was 1,000 years. ",
    " = Bob =\nHe ran.\n",
]
LAMBADA = ["the sun is up and the sky is blue", "a red and a green and a pink"]
ARC = [
    {"id": str(i), "question": question, "choices": {"text": texts, "label": labels}, "answerKey": key}
    for i, (question, texts, labels, key) in enumerate(
        [
            ("What is hot?", ["ice", "the sun at noon"], ["A", "B"], "B"),
            ("What is wet?", ["a river", "sand"], ["A", "B"], "A"),
            ("How many?", ["one", "two and a half", "three"], ["1", "2", "3"], "3"),
        ]
    )
]


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory, quiz: list[dict]) -> Path:
    """Official splits as they are kept: every second answer of the recall set is a wrong one."""
    folder = tmp_path_factory.mktemp("splits")
    recall = [
        {"doc_id": str(i), "key": "colour", "value": f" {row['choices'][(row['answer'] + i % 2) % 4]}"}
        | {"text": f"{row['question']} \n"}
        for i, row in enumerate(quiz[:6])
    ]
    write(folder / "wikitext2/wiki.test.raw", " \n" + "".join(PAGES))
    write(folder / "lambada_openai/test.jsonl", lines([{"text": text} for text in LAMBADA]))
    write(folder / "arc_easy/test.jsonl", lines(ARC))
    write(folder / "arc_easy/validation.jsonl", lines(ARC[:1]))
    write(folder / "squad_completion/validation.jsonl", lines(recall))
    return folder


@pytest.fixture(scope="module")
def mirror(splits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror")
    done = build(splits, folder)
    assert done.returncode == 0 and "based-fda is not in the mirror" in done.stdout
    return folder


@pytest.fixture(scope="module")
def checkpoint(scholar, tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "hf/step-0000001"
    return export_model(scholar, tokenizer, folder, CardInfo(seq_len=512))


@pytest.fixture(scope="module", autouse=True)
def upstream_tasks() -> None:
    """lm-eval's own folders of these tasks, and no others: indexing all of them takes ten seconds."""
    folders = [str(UPSTREAM / name) for name in ("wikitext", "lambada", "arc", "squad_completion")]
    manager = TaskManager(include_path=folders, include_defaults=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "TaskManager", lambda **_: manager)
        yield


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def build(*arguments: Path) -> subprocess.CompletedProcess:
    script = ROOT / "scripts/build_eval_mirror.py"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)


def suite(tasks: list[str], **settings: object) -> SuiteConfig:
    return SuiteConfig(name="paper", tasks=tasks, batch_size="auto", **settings)


@torch.no_grad()
def log_likelihood(model, tokenizer, context: str, text: str) -> tuple[float, bool]:
    """Of `text` after `context` (or the token between documents); and whether it is the greedy choice."""
    head = tokenizer.encode(context, add_special_tokens=False) or [tokenizer.eos_token_id]
    tail = tokenizer.encode(text, add_special_tokens=False)
    greedy = model(torch.tensor([head + tail])).logits[0, len(head) - 1 : -1].argmax(-1).tolist()
    return -token_losses(model, head + tail)[-len(tail) :].sum(), greedy == tail


def test_the_mirror_is_the_splits_in_the_layout_of_the_hub(mirror: Path) -> None:
    pages = datasets.load_dataset(str(mirror / "EleutherAI/wikitext_document_level"), "wikitext-2-raw-v1")
    joined = "\n".join(pages["test"]["page"])
    assert joined == "".join(PAGES) and len(pages["test"]) == 2
    arc = datasets.load_dataset(str(mirror / "allenai/ai2_arc"), "ARC-Easy")
    assert list(arc["test"]) == ARC and list(arc["validation"]) == ARC[:1]


def test_scores_equal_a_direct_computation(
    mirror: Path, checkpoint: Path, scholar, tokenizer, tmp_path
) -> None:
    config = EvalConfig(str(checkpoint), str(tmp_path / "out"), str(mirror), suite=suite(TASKS))
    _, record = evaluate(config, progress=False)
    assert record["mirror"] == str(mirror) and record["paper_row"] == {}
    scores = {name: record["tasks"][name]["scores"][name] for name in TASKS}

    values = [log_likelihood(scholar, tokenizer, "", text)[0] for text in DETOKENIZED]
    words = sum(len(page.strip().split()) + 2 for page in PAGES)  # the blanks at both ends count, upstream
    assert scores["wikitext"]["word_perplexity"] == pytest.approx(math.exp(-sum(values) / words), rel=1e-4)

    pairs = [text.rpartition(" ") for text in LAMBADA]
    found = [log_likelihood(scholar, tokenizer, head, " " + tail) for head, _, tail in pairs]
    expected = math.exp(-sum(value for value, _ in found) / len(found))
    assert scores["lambada_openai"]["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert scores["lambada_openai"]["acc"] == sum(greedy for _, greedy in found) / len(found)

    right = normed = 0
    for row in ARC:
        prompt, texts = f"Question: {row['question']}\nAnswer:", row["choices"]["text"]
        values = [log_likelihood(scholar, tokenizer, prompt, f" {text}")[0] for text in texts]
        per_character = [value / len(text) for value, text in zip(values, texts, strict=True)]
        answer = row["choices"]["label"].index(row["answerKey"])
        right += values.index(max(values)) == answer
        normed += per_character.index(max(per_character)) == answer
    assert scores["arc_easy"]["acc"] == right / 3 and scores["arc_easy"]["acc_norm"] == normed / 3
    assert scores["arc_easy"]["num_fewshot"] == 0 and scores["arc_easy"]["examples"] == 3

    # The model knows the answers, and every second label is wrong; lm-eval has no error for these two.
    assert scores["squad_completion"]["contains"] == 0.5
    assert scores["squad_completion"]["by_document"] == {"contains": [1, 0, 1, 0, 1, 0]}
    assert scores["squad_completion"]["contains_stderr"] == pytest.approx(0.5 / math.sqrt(5))
    values = scores["wikitext"]["by_document"]["word_perplexity"]
    assert math.exp(sum(values) / 2) == pytest.approx(scores["wikitext"]["word_perplexity"])
    spread = scores["wikitext"]["word_perplexity"] * abs(values[0] - values[1]) / 2
    assert scores["wikitext"]["word_perplexity_stderr"] == pytest.approx(spread)


def test_a_stand_in_is_marked_until_the_real_rows_are_there(
    splits: Path, checkpoint: Path, tmp_path: Path
) -> None:
    some, mirror = tmp_path / "splits", tmp_path / "mirror"
    some.mkdir()
    (some / "squad_completion_proxy").symlink_to(splits / "squad_completion")
    (some / "arc_easy").symlink_to(splits / "arc_easy")
    assert build(some, mirror).returncode == 0
    tasks = suite(["squad_completion", "arc_easy"], limit=2)
    config = EvalConfig(str(checkpoint), str(tmp_path / "out"), str(mirror), suite=tasks)
    _, record = evaluate(config, progress=False)
    note = record["tasks"]["squad_completion"]["note"]
    assert note.startswith("a stand-in of the same layout for hazyresearch/based-squad, not its own data")
    assert "note" not in record["tasks"]["arc_easy"]
    text = (tmp_path / "out/table.md").read_text()
    assert re.search(r"\| squad_completion \| contains \| \d\.\d{4} † \|", text) and text.count(" † ") == 1
    assert f"\n† squad_completion: {note}.\n" in text
    (some / "squad_completion_proxy").rename(some / "squad_completion")
    assert build(some, mirror).returncode == 0 and not list(mirror.rglob("NOTE.txt"))


def test_few_shot_prompts_need_the_training_split(mirror: Path, scholar, tokenizer) -> None:
    lm = FlaTrainLM(scholar, tokenizer)
    results = run_tasks(lm, ["arc_easy"], mirror=mirror, num_fewshot=1, limit=1, bootstrap_iters=0)
    assert "no documents available for sampling" in results["arc_easy"]["error"]
    assert "Few-shot prompts need the task's training split." in results["arc_easy"]["error"]


def test_data_sets_that_cannot_be_had(mirror: Path, tmp_path: Path, scholar, tokenizer) -> None:
    load_dataset = datasets.load_dataset
    online = r"^data set nobody/nothing cannot be had .* give mirror=FOLDER with FOLDER/nobody/nothing/ in it"
    with hub_datasets(None), pytest.raises(DatasetUnavailable, match=online):
        datasets.load_dataset("nobody/nothing")
    absent = "nobody/nothing is neither in the mirror nor in the cache"
    with hub_datasets(mirror), pytest.raises(DatasetUnavailable, match=absent):
        datasets.load_dataset("nobody/nothing")
    with hub_datasets(mirror), pytest.raises(DatasetUnavailable, match=r"ai2_arc cannot be read: .*ARC-Easy"):
        datasets.load_dataset("allenai/ai2_arc", "ARC-Medium")
    assert datasets.load_dataset is load_dataset
    with pytest.raises(ValueError, match=r"mirror=.*absent is no folder"):
        run_tasks(FlaTrainLM(scholar, tokenizer), ["arc_easy"], mirror=tmp_path / "absent")


def test_a_mirrored_file_without_rows_or_with_damaged_ones(splits: Path, tmp_path: Path) -> None:
    """What went wrong in the first place is said, not what `datasets` makes of it."""
    mirror = tmp_path / "mirror"
    assert build(splits, mirror).returncode == 0
    file = mirror / "EleutherAI/lambada_openai/default/test.jsonl"
    for text, reason in (("", "it holds no rows$"), ("{broken\n", "Missing a name for object member")):
        file.write_text(text)
        with hub_datasets(mirror), pytest.raises(DatasetUnavailable, match=f"cannot be read: .*{reason}"):
            datasets.load_dataset("EleutherAI/lambada_openai", "default")


def test_what_the_hubs_cache_holds_needs_neither_network_nor_mirror(tmp_path: Path, monkeypatch) -> None:
    """A cache as the Hub's data sets leave it, made from a folder's, which differs in its name alone."""
    write(tmp_path / "rows/test.jsonl", lines(ARC))
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    datasets.load_dataset(str(tmp_path / "rows"))
    (file,) = cache.rglob("dataset_info.json")
    info = json.loads(file.read_text())
    place = cache / "someone___riddles/default/0.0.0" / ("0" * 40)
    place.mkdir(parents=True)
    for shard in file.parent.glob("*.arrow"):
        shard.rename(place / shard.name.replace(info["dataset_name"], "riddles"))
    write(place / "dataset_info.json", json.dumps(info | {"dataset_name": "riddles"}))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for mirror in (None, tmp_path):
        with hub_datasets(mirror):
            for streaming in (False, True):  # as tasks ask for their data, and sets of documents for theirs
                rows = datasets.load_dataset("someone/riddles", split="test", streaming=streaming)
                assert list(rows) == ARC


def test_two_mirrors_and_changed_files_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """`datasets` itself would: whatever the files, a named config has the rows that it had first."""
    header = "---\nconfigs:\n- config_name: old\n  data_files:\n  - split: test\n    path: test.jsonl\n---\n"

    def rows(mirror: str, *found: dict) -> list[dict]:
        if found:
            write(tmp_path / mirror / "someone/riddles/test.jsonl", lines(found))
            write(tmp_path / mirror / "someone/riddles/README.md", header)
        with hub_datasets(tmp_path / mirror):
            return list(datasets.load_dataset("someone/riddles", "old", split="test"))

    assert rows("first", *ARC) == ARC
    assert rows("second", *ARC[:1]) == ARC[:1]
    assert rows("first") == ARC
    assert rows("first", *ARC[1:]) == ARC[1:]


def test_the_mirror_script_refuses_what_cannot_work(tmp_path: Path) -> None:
    assert build(tmp_path).returncode == 2 and build(tmp_path / "absent", tmp_path).returncode == 2
    assert build(tmp_path, tmp_path / "mirror").returncode == 1  # no set at all


@pytest.mark.parametrize("batch_size", ["auto", "auto:4"])
def test_automatic_batches_on_a_cpu(scholar, tokenizer, batch_size: str) -> None:
    assert FlaTrainLM(scholar, tokenizer, batch_size=batch_size).batch_size == harness.CPU_BATCH


@pytest.mark.parametrize("name", ["zero_shot", "recall", "paper"])
def test_suites_hold_the_columns_of_the_table(name: str) -> None:
    config = SuiteConfig(**OmegaConf.load(ROOT / f"configs/suite/{name}.yaml"))
    columns = {"zero_shot": ZERO_SHOT, "recall": RECALL, "paper": ZERO_SHOT + RECALL}[name]
    assert list(config.tasks) == list(dict.fromkeys(column.task for column in columns))
    assert config.name == name and not find_errors(config, "suite.")


def scored(tasks: tuple[str, ...] = ()) -> dict[str, dict]:
    """Distinct values for every task; each with metrics that the table must not take."""
    names = tasks or tuple(dict.fromkeys(column.task for column in ZERO_SHOT + RECALL))
    values = {"word_perplexity": 20.0, "perplexity": 30.0, "acc": 0.10, "acc_norm": 0.20, "contains": 0.30}
    return {n: {"scores": {n: {k: v + i / 100 for k, v in values.items()}}} for i, n in enumerate(names)}


def test_columns_their_order_and_their_metrics() -> None:
    row = paper_row(scored())
    assert list(row) == list(HEADS) == [
        "Wiki. ppl ↓", "LMB. ppl ↓", "LMB. acc ↑", "PIQA acc ↑", "Hella. acc_n ↑", "Wino. acc ↑",
        "ARC-e acc ↑", "ARC-c acc_n ↑", "Avg. ↑", "SWDE cont. ↑", "SQUAD cont. ↑", "FDA cont. ↑",
    ]  # fmt: skip
    assert [paper_cell(head, value) for head, value in row.items()] == [
        "20.00", "30.01", "11.0", "12.0", "23.0", "14.0", "15.0", "26.0", "16.8", "37.0", "38.0", "39.0"
    ]  # fmt: skip


def test_a_task_that_could_not_run_leaves_a_dash_and_no_average() -> None:
    tasks = scored() | {"piqa": {"error": "no data"}}
    row = paper_row(tasks)
    assert row["PIQA acc ↑"] is None and row[AVERAGE] is None and row["ARC-e acc ↑"] == pytest.approx(15.0)
    ours = paper_markdown([{"name": "ours", "paper_row": row, "tasks": tasks}], HEADS)
    assert "**11.0** | **-** | **23.0**" in ours and "**26.0** | **-** | **37.0**" in ours


def test_other_suites_have_no_such_table() -> None:
    assert paper_row(scored(("piqa", "arc_easy"))) == {}
    only_recall = paper_row(scored(tuple(column.task for column in RECALL)))
    assert list(only_recall) == paper_heads([{"paper_row": only_recall}]) == [c.head for c in RECALL]
