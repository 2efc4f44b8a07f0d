"""The papers' suites: lm-eval's task definitions on local copies of the data, and the papers' table."""

import json
import math
import socket
from pathlib import Path

import datasets
import huggingface_hub
import lm_eval.tasks
import pytest
import torch
from lm_eval.tasks import TaskManager
from omegaconf import OmegaConf

from fla_train.cli.app import compose
from fla_train.cli.eval import register
from fla_train.eval import harness
from fla_train.eval.config import EvalConfig, SuiteConfig
from fla_train.eval.harness import FlaTrainLM
from fla_train.eval.paper import AVERAGE, RECALL, ZERO_SHOT, paper_row, paper_table
from fla_train.eval.result import EvalResult, Score
from fla_train.eval.run import evaluate
from fla_train.eval.sets import local_datasets
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.utils.keys import find_errors
from tests.eval.conftest import token_losses, value, write_mirror

UPSTREAM = Path(lm_eval.tasks.__file__).parent
TASKS = ["wikitext", "lambada_openai", "arc_easy", "squad_completion"]

PAGES = [
    " = Ann = \n \n She sang , twice . \n = = Life = = \n It was 1 @,@ 000 years . ",
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
def mirror(tmp_path_factory: pytest.TempPathFactory, quiz: list[dict]) -> Path:
    """Return local copies of the sets. Every second answer of the recall set is a wrong one."""
    recall = [
        {"doc_id": str(i), "key": "colour", "value": f" {row['choices'][(row['answer'] + i % 2) % 4]}"}
        | {"text": f"{row['question']} \n"}
        for i, row in enumerate(quiz[:6])
    ]
    wikitext = ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1")
    sets = {
        (*wikitext, "test"): [{"page": page} for page in PAGES],
        ("EleutherAI/lambada_openai", "default", "test"): [{"text": text} for text in LAMBADA],
        ("allenai/ai2_arc", "ARC-Easy", "test"): ARC,
        ("allenai/ai2_arc", "ARC-Easy", "validation"): ARC[:1],
        ("hazyresearch/based-squad", "default", "validation"): recall,
    }
    return write_mirror(tmp_path_factory.mktemp("mirror"), sets)


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


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The addresses that anything asked for; none can be reached, and no variable says so beforehand."""
    asked: list[object] = []

    def refuse(*address: object, **options: object) -> None:
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    return asked


def suite(tasks: list[str], **settings: object) -> SuiteConfig:
    return SuiteConfig(name="paper", tasks=tasks, batch_size="auto", **settings)


@torch.no_grad()
def log_likelihood(model, tokenizer, context: str, text: str) -> tuple[float, bool]:
    """Of `text` after `context` (or the token between documents); and whether it is the greedy choice."""
    head = tokenizer.encode(context, add_special_tokens=False) or [tokenizer.eos_token_id]
    tail = tokenizer.encode(text, add_special_tokens=False)
    greedy = model(torch.tensor([head + tail])).logits[0, len(head) - 1 : -1].argmax(-1).tolist()
    return -token_losses(model, head + tail)[-len(tail) :].sum(), greedy == tail


def test_scores_equal_a_direct_computation(mirror, checkpoint, scholar, tokenizer, tmp_path, network):
    config = EvalConfig(str(checkpoint), str(tmp_path / "out"), str(mirror), suite=suite(TASKS))
    _, result = evaluate(config, progress=False)
    assert not result.errors and paper_row(result) == {} and not network

    values = [log_likelihood(scholar, tokenizer, "", text)[0] for text in DETOKENIZED]
    words = sum(len(page.strip().split()) + 2 for page in PAGES)  # the blanks at both ends count, upstream
    score = result.find("tasks", "wikitext", "word_perplexity")
    assert score.value == pytest.approx(math.exp(-sum(values) / words), rel=1e-4)
    # lm-eval gives no standard error for this one and the next.
    assert math.exp(sum(score.by_document) / 2) == pytest.approx(score.value)
    assert score.stderr == pytest.approx(score.value * abs(score.by_document[0] - score.by_document[1]) / 2)
    score = result.find("tasks", "squad_completion", "contains")
    assert score.value == 0.5 and score.by_document == [1, 0, 1, 0, 1, 0]  # every second label is wrong
    assert score.stderr == pytest.approx(0.5 / math.sqrt(5)) and score.chance == 0.0

    pairs = [text.rpartition(" ") for text in LAMBADA]
    found = [log_likelihood(scholar, tokenizer, head, " " + tail) for head, _, tail in pairs]
    expected = math.exp(-sum(value for value, _ in found) / len(found))
    assert value(result, "lambada_openai", "perplexity") == pytest.approx(expected, rel=1e-4)
    assert value(result, "lambada_openai", "acc") == sum(greedy for _, greedy in found) / len(found)

    right = normed = 0
    for row in ARC:
        prompt, texts = f"Question: {row['question']}\nAnswer:", row["choices"]["text"]
        values = [log_likelihood(scholar, tokenizer, prompt, f" {text}")[0] for text in texts]
        per_character = [value / len(text) for value, text in zip(values, texts, strict=True)]
        answer = row["choices"]["label"].index(row["answerKey"])
        right += values.index(max(values)) == answer
        normed += per_character.index(max(per_character)) == answer
    assert value(result, "arc_easy", "acc") == right / 3
    assert value(result, "arc_easy", "acc_norm") == normed / 3


def test_a_missing_data_set_costs_its_task_only(mirror, scholar, tokenizer, run_tasks, network: list) -> None:
    """The Hub is not asked, and the line says how to get the data. Few-shot prompts need training rows."""
    lm, load_dataset = FlaTrainLM(scholar, tokenizer), datasets.load_dataset
    (mirror / "allenai").rename(mirror / "away")
    result = run_tasks(lm, ["arc_easy", "lambada_openai"], mirror=mirror, limit=1)
    (mirror / "away").rename(mirror / "allenai")
    assert result.errors.keys() == {"arc_easy"} and result.find("tasks", "lambada_openai", "acc")
    assert "allenai/ai2_arc" in result.errors["arc_easy"] and "hf download" in result.errors["arc_easy"]
    result = run_tasks(lm, ["arc_easy"], mirror=mirror, num_fewshot=1, limit=1)
    assert "no documents available for sampling" in result.errors["arc_easy"]
    assert datasets.load_dataset is load_dataset and not datasets.config.HF_HUB_OFFLINE and not network


def test_what_the_cache_of_the_hub_holds_needs_no_network(tmp_path: Path, monkeypatch) -> None:
    """A cache as a set of the Hub leaves it, made from that of a folder, which differs in its name only."""
    write_mirror(tmp_path, {("rows", "default", "test"): ARC})
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    datasets.load_dataset(str(tmp_path / "rows"))
    (file,) = cache.rglob("dataset_info.json")
    info = json.loads(file.read_text())
    place = cache / "someone___riddles/default/0.0.0" / ("0" * 40)
    place.mkdir(parents=True)
    for shard in file.parent.glob("*.arrow"):
        shard.rename(place / shard.name.replace(info["dataset_name"], "riddles"))
    (place / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": "riddles"}))
    for mirror, offline in ((None, True), (tmp_path, False)):
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
        with local_datasets(mirror):
            for streaming in (False, True):  # tasks do not stream, the sets of documents do
                rows = datasets.load_dataset("someone/riddles", split="test", streaming=streaming)
                assert list(rows) == ARC


def test_two_mirrors_and_changed_files_are_told_apart(tmp_path: Path) -> None:
    """`datasets` alone would not: whatever the files, a named config has the rows that it had first."""

    def rows(mirror: str, *found: dict) -> list[dict]:
        if found:
            write_mirror(tmp_path / mirror, {("someone/riddles", "old", "test"): found})
        with local_datasets(tmp_path / mirror):
            return list(datasets.load_dataset("someone/riddles", "old", split="test"))

    assert rows("first", *ARC) == ARC
    assert rows("second", *ARC[:1]) == ARC[:1]
    assert rows("first") == ARC
    assert rows("first", *ARC[1:]) == ARC[1:]


@pytest.mark.parametrize("name", ["../away/riddles", "json", "a/../b"])
def test_a_name_does_not_lead_out_of_the_mirror(name: str, tmp_path: Path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(datasets, "load_dataset", lambda path, *a, **k: seen.append(path))
    for folder in ("away/riddles", "mirror/json", "mirror/a", "mirror/b"):
        (tmp_path / folder).mkdir(parents=True)
    with local_datasets(tmp_path / "mirror"):
        datasets.load_dataset(name)
    assert seen == [name]


@pytest.mark.parametrize("name", ["zero_shot", "recall", "paper"])
def test_suites_hold_the_columns_of_the_table(name: str) -> None:
    register()
    config = OmegaConf.to_object(compose("eval", [f"suite={name}"])).suite
    columns = {"zero_shot": ZERO_SHOT, "recall": RECALL, "paper": ZERO_SHOT + RECALL}[name]
    assert list(config.tasks) == list(dict.fromkeys(column.task for column in columns))
    assert config.name == name and not find_errors(config, "suite.")


def scored(columns: tuple, without: str = "") -> EvalResult:
    """Distinct values for every task, each with metrics that the table must not take."""
    names = list(dict.fromkeys(column.task for column in columns))
    values = {"word_perplexity": 20.0, "perplexity": 30.0, "acc": 0.10, "acc_norm": 0.20, "contains": 0.30}
    scores = [
        Score("tasks", name, metric, number + i / 100)
        for i, name in enumerate(names)
        for metric, number in values.items()
        if name != without
    ]
    return EvalResult(scores, name="ours", suite={"name": "paper", "tasks": names})


def test_a_task_that_could_not_run_leaves_a_dash_and_no_average() -> None:
    row = paper_row(scored(ZERO_SHOT + RECALL, without="piqa"))
    assert row["PIQA acc ↑"] is None and row[AVERAGE] is None and row["ARC-e acc ↑"] == pytest.approx(15.0)
    assert list(paper_row(scored(RECALL))) == [column.head for column in RECALL]
    assert paper_table([scored(ZERO_SHOT[3:5])]) is None
