"""Needles in haystacks: prompts against the generator of lm-eval, and how answers are scored."""

import json
import re
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import nltk
import pytest
from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

from fla_train.data.tokenizers import encode
from fla_train.eval import needle
from fla_train.eval.config import NEEDLE_PROMPTS, NEEDLE_TASKS, NeedleConfig
from fla_train.eval.needle import NOISE, PROMPTS, Haystack, make_sample, needle_jobs
from fla_train.eval.result import EvalResult
from fla_train.eval.session import Session
from tests.eval.conftest import measure

CONFIG = NeedleConfig(answer_tokens=60, depths=[0, 50, 100])


@pytest.fixture(scope="module")
def haystacks(tokenizer) -> dict[str, Haystack]:
    noise, texts = Haystack.of([NOISE], "\n", tokenizer), needle.essays(None, "text", tokenizer)
    return dict(zip(NEEDLE_TASKS, (noise, texts, texts), strict=True))


@pytest.mark.parametrize("kind", ["number", "uuid"])
def test_prompts_are_those_of_lm_eval(kind: str, haystacks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its generator runs without the word list and the download that its import asks for."""
    words = SimpleNamespace(_categories={"nouns": ["kite"], "adjectives": ["wry"], "verbs": []})
    monkeypatch.setitem(sys.modules, "wonderwords", SimpleNamespace(RandomWord=lambda: words))
    monkeypatch.setattr(nltk.data, "find", lambda name: name)
    from lm_eval.tasks.ruler import niah_utils, prepare_niah

    counts = {"num_needle_k": 1, "num_needle_v": 1, "num_needle_q": 1, "template": niah_utils.TEMPLATE}
    settings = {"type_haystack": "repeat", "type_needle_k": "words", "type_needle_v": f"{kind}s"}
    text = prepare_niah.get_haystack("repeat")
    theirs, (answer,), key = prepare_niah.generate_input_output(20, text, **settings, **counts)
    found = re.search(r"One of the special magic \w+ for wry-kite is: (\S+)\.", theirs)
    assert found[1] == answer and text == NOISE
    before = theirs[: found.start()].count(NOISE)
    written = haystacks["niah_single_1"].text(0, 20, found[0], 100 * before / 20)
    prefix = f"The special magic {kind} for wry-kite mentioned in the provided text is"  # its `gen_prefix`
    assert PROMPTS["ruler"].format(kind=kind, key=key, text=written) == f"{theirs} {prefix}"


@pytest.mark.parametrize("task", NEEDLE_TASKS)
@pytest.mark.parametrize("prompt", NEEDLE_PROMPTS)
def test_samples_fit_and_can_be_answered(task: str, prompt: str, haystacks, tokenizer) -> None:
    kind = needle.KINDS[task]
    unit = len(NOISE) if task == "niah_single_1" else 40  # a word of the essays and some more
    values = set()
    for number, depth in enumerate([0, 50, 100, 0]):
        sample = make_sample(CONFIG, task, prompt, 700, number, haystacks[task], tokenizer, prefix=[2])
        assert 640 - unit - 1 <= len(sample.tokens) <= 640
        assert sample.tokens == (2, *encode(tokenizer, [sample.prompt])[0])
        pattern = rf"One of the special magic {kind}s for (\w+-\w+) is: (\S+)\.(?!\w)"
        found = re.search(pattern, sample.prompt)
        key, value = found.groups()
        assert value == sample.value and sample.prompt.count(value) == 1
        if kind == "uuid":
            assert str(uuid.UUID(value)) == value and uuid.UUID(value).version == 4
        else:
            assert re.fullmatch(r"[1-9]\d{6}", value)
        if prompt == "continuation":
            assert sample.prompt.endswith(f"\n{found[0].removesuffix(f' {value}.')}")
        else:
            assert f"What is the special magic {kind} for {key} mentioned" in sample.prompt
        body = re.sub(r"^A special .* afterwards\.\n|\n(What is|One of) .*$", "", sample.prompt)
        place = body.index(found[0]) / (len(body) - len(found[0]))
        assert place == pytest.approx(depth / 100, abs=0.35 if depth == 50 else 0.01)
        values.add(value)
    assert len(values) == 4
    with pytest.raises(ValueError, match=r"suite\.needle\.lengths"):
        make_sample(CONFIG, task, prompt, 120, 0, haystacks[task], tokenizer)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tokenizer) -> Callable[[list[int]], list[str]]:
    """Replace the model by a search that finds needles in the first half only; returns its prompts."""
    prompts: list[str] = []

    def search(model: object, of_export: object, rows: list, max_new_tokens: int) -> list[list[int]]:
        answers = []
        for row in rows:
            prompts.append(tokenizer.decode(row, skip_special_tokens=True))
            found = re.search(r" is: (\S+)\.(?!\w)", prompts[-1])
            known = found and found.start() < len(prompts[-1]) / 2
            text = f" {found[1].upper()}, it says" if known else " I forgot"
            assert known == bool(string_match_all(postprocess_pred([text]), [[found[1]]]))
            answers.append(encode(tokenizer, [text])[0])
        return answers

    monkeypatch.setattr(needle, "continue_tokens", search)
    return prompts


def test_what_has_been_asked_is_not_asked_again(asked, build_model, tokenizer, tmp_path: Path) -> None:
    model = build_model()
    settings = {"prompts": ["continuation"], "samples": 7, "answer_tokens": 60, "depths": [10.0, 80.0]}

    def run(lengths: list[int], folder: str = "parts", **changed: object) -> EvalResult:
        config = NeedleConfig(lengths=lengths, **settings | changed)
        return measure(needle_jobs(Session(model, tokenizer), config), tmp_path / folder)

    first = run([1500])
    assert len(asked) == 3 * 7 and [list(s.by_document) for s in first.scores] == [[1, 0] * 3 + [1]] * 3
    assert first.metrics()["eval/niah_single_1/continuation/accuracy_1500"] == pytest.approx(4 / 7)
    assert len(run([1500, 1000]).scores) == 6 and len(asked) == 6 * 7
    essays = tmp_path / "essays.jsonl"
    essays.write_text(json.dumps({"text": "It rained. We stayed at home and read. " * 30}) + "\n")
    other = run([1500], "other", essays=str(essays))
    assert "We stayed at home" in asked[-1]
    prints = [[score.fingerprint for score in result.scores] for result in (first, other)]
    assert prints[0][0] == prints[1][0] and not set(prints[0][1:]) & set(prints[1][1:])
    with pytest.raises(ValueError, match=r"suite\.needle\.essays.*absent"):
        run([1500], essays=str(tmp_path / "absent.jsonl"))
