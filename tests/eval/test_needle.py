"""Needles in haystacks: the prompts against lm-eval's generator, the answers against a loop of forwards."""

import json
import re
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from fla_train.data.tokenizers import encode
from fla_train.eval import needle, report
from fla_train.eval.compare import comparison
from fla_train.eval.config import (
    NEEDLE_PROMPTS,
    NEEDLE_TASKS,
    EvalConfig,
    NeedleConfig,
    SuiteConfig,
)
from fla_train.eval.haystack import NOISE, PROMPTS, TASKS, Haystack, load_haystack, make_samples
from fla_train.eval.intervals import proportion_interval
from fla_train.eval.parallel import Ranks
from fla_train.eval.report import write_comparison
from fla_train.eval.result_cache import ResultCache
from fla_train.eval.run import evaluate
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.hub.load import document_prefix
from fla_train.utils.keys import find_errors
from tests.eval.conftest import short_of_memory, train

SETTINGS = {"prompt": "ruler", "length": 700, "answer_tokens": 60, "depths": [0, 50, 100], "seed": 0}


@pytest.fixture(scope="module")
def haystacks(tokenizer) -> dict[str, Haystack]:
    """By task; the two of essays have one."""
    noise, essays = (load_haystack(TASKS[f"niah_single_{i}"], None, "text", tokenizer) for i in (1, 2))
    return {"niah_single_1": noise, "niah_single_2": essays, "niah_single_3": essays}


def of_lm_eval(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, str]:
    """lm-eval's generator and template, without the word list and the download that their import asks for."""
    import nltk

    words = SimpleNamespace(_categories={"nouns": ["kite"], "adjectives": ["wry"], "verbs": []})
    monkeypatch.setitem(sys.modules, "wonderwords", SimpleNamespace(RandomWord=lambda: words))
    monkeypatch.setattr(nltk.data, "find", lambda name: name)
    from lm_eval.tasks.ruler import niah_utils, prepare_niah

    return prepare_niah, niah_utils.TEMPLATE


@pytest.mark.parametrize("kind", ["number", "uuid"])
def test_prompts_are_those_of_lm_eval(kind: str, monkeypatch: pytest.MonkeyPatch, tokenizer) -> None:
    generator, template = of_lm_eval(monkeypatch)
    settings = {"type_haystack": "repeat", "type_needle_k": "words", "type_needle_v": f"{kind}s"}
    counts = {"num_needle_k": 1, "num_needle_v": 1, "num_needle_q": 1, "template": template}
    text = generator.get_haystack("repeat")
    theirs, (value,), key = generator.generate_input_output(20, text, **settings, **counts)
    found = re.search(r"One of the special magic \w+ for wry-kite is: (\S+)\.", theirs)
    assert found[1] == value and text == NOISE
    before = theirs[: found.start()].count(NOISE)
    haystack = Haystack.of([NOISE], "\n", tokenizer)
    written = haystack.text(0, 20, found[0], 100 * before / 20)
    ours = PROMPTS["question"].format(kind=kind, key=key, text=written)
    assert ours == theirs
    prefix = f"The special magic {kind} for wry-kite mentioned in the provided text is"  # its `gen_prefix`
    assert PROMPTS["ruler"].format(kind=kind, key=key, text=written) == f"{theirs} {prefix}"


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_samples_fit_and_can_be_answered(name: str, prompt: str, haystacks, tokenizer) -> None:
    task, haystack = TASKS[name], haystacks[name]
    settings = SETTINGS | {"prompt": prompt}
    samples = make_samples(name, haystack, tokenizer, numbers=range(6), prefix=[2], **settings)
    again = make_samples(name, haystack, tokenizer, numbers=[4], prefix=[2], **settings)
    assert samples[4] == again[0]  # whatever other samples a rank has
    assert len({sample.value for sample in samples}) == 6
    unit = len(NOISE) if task.noise else 40  # a word of the essays and some more: costs are estimates
    for sample, depth in zip(samples, [0, 50, 100, 0, 50, 100], strict=True):
        assert 640 - unit - 1 <= len(sample.tokens) <= 640
        assert sample.tokens == (2, *encode(tokenizer, [sample.prompt])[0])
        found = re.search(
            rf"One of the special magic {task.kind}s for (\w+-\w+) is: (\S+)\.(?!\w)", sample.prompt
        )
        key, value = found.groups()
        assert value == sample.value and sample.prompt.count(value) == 1 and sample.depth == depth
        if task.kind == "uuid":
            assert str(uuid.UUID(value)) == value and uuid.UUID(value).version == 4
        else:
            assert re.fullmatch(r"[1-9]\d{6}", value)
        if prompt == "continuation":
            assert found.string.endswith(f"\n{found[0].removesuffix(f' {value}.')}")
        else:
            assert f"What is the special magic {task.kind} for {key} mentioned" in sample.prompt
        body = re.sub(r"^A special .* afterwards\.\n|\n(What is|One of) .*$", "", sample.prompt)
        place = body.index(found[0]) / (len(body) - len(found[0]))
        assert place == pytest.approx(depth / 100, abs=0.35 if depth == 50 else 0.01)
    other = make_samples(name, haystack, tokenizer, numbers=[4], prefix=[2], **(settings | {"seed": 1}))
    assert other[0].value != samples[4].value


def test_an_endless_text_and_ends_of_sentences(tokenizer) -> None:
    haystack = Haystack.of(["One", "two.", 'Three?"', "four"], " ", tokenizer)
    assert haystack.text(2, 5, "HERE.", 0) == 'HERE. Three?" four One two. Three?"'
    assert haystack.text(2, 5, "HERE.", 55) == 'Three?" four One two. HERE. Three?"'
    assert haystack.text(2, 5, "HERE.", 30) == 'Three?" HERE. four One two. Three?"'
    whole = len(encode(tokenizer, [' One two. Three?" four'])[0])
    assert haystack.holding(1, 3 * whole) in (11, 12) and haystack.holding(1, 0.1) == 0


def test_no_room_for_a_text(haystacks, tokenizer) -> None:
    haystack = haystacks["niah_single_1"]
    with pytest.raises(ValueError, match=r"raise suite\.needle\.lengths to at least \d+") as failure:
        make_samples("niah_single_1", haystack, tokenizer, numbers=[0], **(SETTINGS | {"length": 200}))
    least = int(re.search(r"at least (\d+)", str(failure.value))[1])
    assert make_samples("niah_single_1", haystack, tokenizer, numbers=[0], **(SETTINGS | {"length": least}))


def test_answers_are_those_of_a_greedy_loop(model, haystacks, tokenizer, monkeypatch) -> None:
    """Prompts of different lengths in a batch, which once exceeds the memory."""
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    config = NeedleConfig(answer_tokens=3, batch_size=3)
    haystack = haystacks["niah_single_2"]
    samples = [
        make_samples("niah_single_2", haystack, tokenizer, numbers=[i], **(SETTINGS | {"length": n}))[0]
        for i, n in enumerate([500, 450, 480, 520])
    ]
    sizes = short_of_memory(monkeypatch, needle, "continue_tokens", 2)
    model.double()
    found = needle._answers(model, tokenizer, samples, config, needle.tqdm(disable=True))
    assert sizes == [3, 1, 2, 1]
    for sample, answer in zip(samples, found, strict=True):
        ids = list(sample.tokens)
        for _ in range(3):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert answer == tokenizer.decode(ids[-3:], skip_special_tokens=True)


def test_a_model_that_has_seen_the_answers(build_model, haystacks, tokenizer, tmp_path: Path) -> None:
    """It scores 1 on these samples and 0 on those of another seed."""
    torch.manual_seed(0)
    model, settings = (
        build_model(num_householder=1),
        {"length": 256, "answer_tokens": 12, "depths": [0.0, 50.0]},
    )
    samples = make_samples(
        *("niah_single_2", haystacks["niah_single_2"], tokenizer),
        **(SETTINGS | settings | {"prompt": "continuation"}),
        numbers=range(3),
        prefix=document_prefix(model, tokenizer),
    )
    rows = [[*sample.tokens, *encode(tokenizer, [f" {sample.value}"])[0]] for sample in samples]
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    labels = torch.full_like(ids, -100)
    for row, label in zip(rows, labels, strict=True):
        label[len(row) - 8 : len(row)] = torch.tensor(row[-8:])
    train(model, ids, labels, steps=60)
    settings |= {"tasks": ["niah_single_2"], "prompts": ["continuation"], "samples": 3, "batch_size": 2}
    settings["lengths"] = [settings.pop("length")]
    for seed, expected in ((0, 1.0), (1, 0.0)):
        config, cache = NeedleConfig(**settings, seed=seed), ResultCache(tmp_path / "parts", {})
        result = needle.run_needle(model, tokenizer, config, cache=cache, progress=False)
        assert result["niah_single_2"]["continuation"][0]["accuracy"] == expected


def test_scores_are_rulers() -> None:
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    cases = [
        (" 1234567.", "1234567"),
        ("123456", "1234567"),
        ("", "7"),
        (" AB-c1 ", "ab-C1"),
        ("a\x00b 7", "7"),
    ]
    for answer, value in cases:
        assert needle.is_right(answer, value) == string_match_all(postprocess_pred([answer]), [[value]])


def test_interval_of_a_proportion() -> None:
    """Wilson (1927) by hand: z^2 / (n + z^2) for no success; symmetric."""
    square = 1.959963984540054**2
    assert proportion_interval(0, 10) == pytest.approx((0.0, square / (10 + square)))
    assert proportion_interval(10, 10) == pytest.approx((10 / (10 + square), 1.0))
    low, high = proportion_interval(5, 10)
    assert low + high == pytest.approx(1.0) and high - 0.5 == pytest.approx(
        0.5 * (square / (10 + square)) ** 0.5
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tokenizer) -> Callable[[list[int]], list[str]]:
    """In place of a model one that finds needles in the first half only, by search; returns its prompts."""
    prompts: list[str] = []

    def search(
        model: object, tokenizer_of_export: object, rows: list, max_new_tokens: int
    ) -> list[list[int]]:
        answers = []
        for row in rows:
            prompts.append(tokenizer.decode(row, skip_special_tokens=True))
            found = re.search(r" is: (\S+)\.(?!\w)", prompts[-1])
            known = found and found.start() < len(prompts[-1]) / 2
            answers.append(encode(tokenizer, [f" {found[1]}, it says" if known else " I forgot"])[0])
        return answers

    monkeypatch.setattr(needle, "continue_tokens", search)
    monkeypatch.setattr(report, "draw_figures", lambda folder, records: [])  # takes seconds
    return prompts


def test_the_suite(asked: list[str], build_model, tokenizer, tmp_path: Path) -> None:
    """Accuracies by depth, of what is asked for later only that is asked, and what is compared."""
    checkpoint = export_model(
        build_model(), tokenizer, tmp_path / "model", CardInfo(seq_len=64), validate=False
    )
    settings = {"prompts": ["continuation"], "lengths": [1500], "samples": 7, "answer_tokens": 60}
    settings |= {"essays": str(tmp_path / "absent.jsonl"), "depths": [10.0, 80.0]}

    def run(output: str, **changed: object) -> dict:
        suite = SuiteConfig(name="needle", needle=NeedleConfig(**(settings | changed)))
        config = EvalConfig(str(checkpoint), str(tmp_path / output), device="cpu", suite=suite)
        return evaluate(config, progress=False)[1]

    lost = run("lost", tasks=["niah_single_2"])
    assert lost["needle"]["niah_single_2"].keys() == {"error"}
    assert "|" not in (tmp_path / "lost/table.md").read_text()  # no table without rows
    one = run("one")
    assert {"error"} == one["needle"]["niah_single_2"].keys() == one["needle"]["niah_single_3"].keys()
    assert "suite.needle.essays" in one["needle"]["niah_single_2"]["error"]
    assert "absent.jsonl" in one["needle"]["niah_single_2"]["error"]
    (row,) = one["needle"]["niah_single_1"]["continuation"]
    assert row["correct"] == [1, 0, 1, 0, 1, 0, 1] and row["accuracy"] == pytest.approx(4 / 7)
    assert row["depths"] == {"10": 1.0, "80": 0.0} and row["samples"] == len(asked) == 7
    assert (row["low"], row["high"]) == proportion_interval(4, 7)
    assert 1300 < row["prompt_tokens"] <= 1440
    assert row["example"]["answer"] == f" {row['example']['value']}, it says"
    assert one["metrics"] == {"eval/niah_single_1/continuation_1500": row["accuracy"]}
    essays = tmp_path / "essays.jsonl"
    essays.write_text(json.dumps({"text": "It rained. We stayed at home and read. " * 30}) + "\n")
    one = run("one", essays=str(essays), lengths=[1500, 1000])
    assert len(asked) == 6 * 7  # the noise at the first length has been asked before
    asked.clear()
    assert run("one", essays=str(essays), lengths=[1000, 1500])["needle"] == one["needle"] and not asked
    assert "We stayed at home" in "".join(run("two", essays=str(essays), seed=1) and asked)
    records = write_comparison(tmp_path / "both", [tmp_path / "one", tmp_path / "two"])
    rows = {(row.group, row.label): row.cells for row in comparison(records)}
    assert len(rows) == 6 and all(cells[0].value == pytest.approx(4 / 7) for cells in rows.values())
    cells = rows["niah_single_3, continuation", "accuracy, 1,000 tokens"]
    assert cells[1].value is None
    text = (tmp_path / "one/table.md").read_text()
    assert "| niah_single_3 | continuation | 57.1 (" in text


def test_two_ranks_find_what_one_finds(asked, build_model, tokenizer, tmp_path: Path, monkeypatch) -> None:
    """An odd number of samples, and essays that are missing; the ranks are threads."""
    barrier, slots, model = threading.Barrier(2), [None] * 2, build_model()

    def all_gather_object(values: list, value: object) -> None:
        slots[int(threading.current_thread().name)] = value
        barrier.wait(60)
        values[:] = slots
        barrier.wait(60)

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    config = NeedleConfig(prompts=["ruler"], lengths=[900], samples=5, essays=str(tmp_path / "absent"))
    found: dict[tuple[int, int], dict] = {}

    def run(rank: int, world: int) -> None:
        cache = ResultCache(tmp_path / f"parts-{world}", {}, Ranks(rank, world))
        found[rank, world] = needle.run_needle(model, tokenizer, config, cache=cache, progress=False)

    run(0, 1)
    assert len(asked) == 5
    threads = [threading.Thread(target=run, args=(rank, 2), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 10 and set(asked[:5]) == set(asked[5:])
    one, *both = ([result.pop("niah_single_1"), result] for result in (found[0, 1], found[0, 2], found[1, 2]))
    assert all(scores == one[0] for scores, _ in both)
    assert all("absent" in lost["error"] for _, others in (one, *both) for lost in others.values())
    assert one[0]["ruler"][0]["correct"] == [1, 1, 0, 0, 0]


def test_settings_that_cannot_work() -> None:
    def errors(**settings: object) -> list[str]:
        return find_errors(SuiteConfig(name="needle", needle=NeedleConfig(**settings)), "suite.")

    assert errors() == [] and tuple(TASKS) == NEEDLE_TASKS and tuple(PROMPTS) == NEEDLE_PROMPTS
    wrong = {"tasks": ["niah_multikey_1"], "prompts": ["x"], "lengths": [0], "depths": [101], "samples": 0}
    assert [re.search(r"suite\.needle\.(\w+)", line)[1] for line in errors(**wrong)] == [
        "tasks", "prompts", "lengths", "samples", "depths"
    ]  # fmt: skip
