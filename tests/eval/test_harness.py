"""The lm-eval bridge against plain HFLM, against direct computations, and on tasks with known scores."""

import copy
import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing

from fla_train.eval.harness import FlaTrainLM
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from tests.eval.conftest import CHOICES, RECITE, ROLLING, short_of_memory, token_losses, value

PAIRS = [
    ("The sky is", " blue"),
    ("", "no context at all"),
    ("a much longer context that goes on, and on, for a while", " x"),
    ("short", " and here a long continuation, longer than its context"),
    ("naïve", " 日本"),
]
PROMPTS = ["The sky is", "a", "a much longer prompt that goes on, and on, for a while", "x y"]


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def all_answers(lm: HFLM) -> list[list]:
    until = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    return [
        lm.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True),
        lm.loglikelihood_rolling(
            requests("loglikelihood_rolling", [(c,) for c, _ in PAIRS[2:]]), disable_tqdm=True
        ),
        lm.generate_until(requests("generate_until", [(p, until) for p in PROMPTS]), disable_tqdm=True),
    ]


def test_equal_to_plain_hflm(model, tokenizer) -> None:
    plain = HFLM(
        model, tokenizer=tokenizer, backend="causal", batch_size=2, max_length=60, softmax_dtype="float32"
    )
    expected = all_answers(plain)
    answers = all_answers(FlaTrainLM(model, tokenizer, batch_size=2, max_length=60))
    assert answers[2] == expected[2]
    if model.config.model_type == "delta_product":  # other additions, so other last digits
        assert [greedy for _, greedy in answers[0]] == [greedy for _, greedy in expected[0]]
        for found, plain in zip(answers[:2], expected[:2], strict=True):
            assert np.array(found) == pytest.approx(np.array(plain), rel=1e-5)
    else:
        assert answers == expected


def test_generation_in_halves_when_memory_is_short(model, tokenizer, monkeypatch) -> None:
    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    asked = requests("generate_until", [(p, options) for p in PROMPTS])
    lm = FlaTrainLM(model, tokenizer, batch_size=len(PROMPTS), max_length=100)
    expected = lm.generate_until(asked, disable_tqdm=True)
    sizes = short_of_memory(monkeypatch, model, "generate", most=1)
    assert lm.generate_until(asked, disable_tqdm=True) == expected and sizes == [4, 2, 1, 1, 2, 1, 1]
    short_of_memory(monkeypatch, model, "generate", most=0)
    with pytest.raises(torch.OutOfMemoryError):
        lm.generate_until(asked, disable_tqdm=True)


def test_defaults_are_those_the_checkpoint_was_trained_with(tokenizer, scholar, tmp_path) -> None:
    tokenizer = copy.deepcopy(tokenizer)  # adds a BOS, as Llama's does
    bos = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos[0]} $A", special_tokens=[bos]
    )
    assert tokenizer.encode("ab")[0] == bos[1]
    folder = export_model(scholar, tokenizer, tmp_path / "run/hf/step-0000001", CardInfo(seq_len=48))
    lm = get_model("fla_train")(pretrained=str(tmp_path / "run"), device="cpu")
    assert isinstance(lm, FlaTrainLM) and lm.model.config.name_or_path == str(folder)
    assert HFLM(str(folder), backend="causal", device="cpu").max_length == lm.max_length == 48
    assert lm.softmax_dtype == torch.float32
    assert lm.prefix_token_id == tokenizer.eos_token_id
    assert lm.tok_encode("ab") == tokenizer.encode("ab", add_special_tokens=False)
    assert FlaTrainLM(scholar, tokenizer).prefix_token_id == tokenizer.bos_token_id


def test_scores_of_a_model_that_knows_the_answers(write_task, quiz, scholar, tokenizer, run_tasks) -> None:
    draw = random.Random(1)
    shuffled = [row | {"answer": draw.randrange(4)} for row in quiz]
    write_task("quiz", quiz, **CHOICES)
    write_task("shuffled", shuffled, **CHOICES)
    texts = [{"text": f"{row['question']} {row['choices'][row['answer']]}"} for row in quiz]
    write_task("texts", texts, **ROLLING)
    folder = write_task("recite", quiz, **RECITE)
    lm = FlaTrainLM(scholar, tokenizer, batch_size=3)
    result = run_tasks(lm, ["quiz", "shuffled", "texts", "recite"], include_path=folder)
    assert not result.errors and value(result, "quiz", "acc") == 1.0
    score = result.find("tasks", "quiz", "acc")
    assert score.documents == len(quiz) and score.chance == 0.25 and score.higher_is_better
    pairs = zip(quiz, shuffled, strict=True)
    agree = sum(row["answer"] == other["answer"] for row, other in pairs) / len(quiz)
    assert agree < 0.5 and value(result, "shuffled", "acc") == agree

    ids = [[lm.prefix_token_id, *tokenizer.encode(row["text"], add_special_tokens=False)] for row in texts]
    loss = sum(token_losses(scholar, row).sum() for row in ids)
    words = sum(len(row["text"].split()) for row in texts)
    assert value(result, "texts", "word_perplexity") == pytest.approx(math.exp(loss / words), rel=1e-3)

    # "green" and "pink" are cut at the stop string, "n": the score says that stopping works.
    wrong = sum("n" in row["choices"][row["answer"]] for row in quiz) / len(quiz)
    recited = result.find("tasks", "recite", "exact_match_word")
    assert recited.value == 1 - wrong and recited.chance == 0.0
    assert recited.stderr == pytest.approx(math.sqrt(wrong * (1 - wrong) / (len(quiz) - 1)))


@pytest.mark.usefixtures("unwatched")
@pytest.mark.long
def test_the_command_line_of_lm_eval(write_task, quiz, scholar, tokenizer, tmp_path) -> None:
    """Its old form without `run`; data from a mirror without training rows."""
    export_model(scholar, tokenizer, tmp_path / "run/hf/step-0000001", CardInfo(seq_len=48))
    folder = write_task("quiz", quiz, **CHOICES, dataset_path="someone/quiz", dataset_kwargs={})
    mirror = tmp_path / "mirror/someone/quiz"
    mirror.mkdir(parents=True)
    (folder / "quiz.jsonl").rename(mirror / "test.jsonl")
    command = [
        *(sys.executable, "-m", "fla_train.eval", "--model", "fla_train", "--tasks", "quiz"),
        *("--model_args", f"pretrained={tmp_path / 'run'}", "--device", "cpu"),
        *("--include_path", str(folder), "--output_path", str(tmp_path / "results"), "--batch_size", "4"),
    ]

    environment = os.environ | {"FLA_TRAIN_MIRROR": str(tmp_path / "mirror")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "results").rglob("results_*.json")
    assert json.loads(file.read_text())["results"]["quiz"]["acc,none"] == 1.0
