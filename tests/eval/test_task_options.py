"""Options of lm-eval's tasks, what is said of prompts that do not fit, and groups of tasks."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from fla_train.cli.app import compose
from fla_train.cli.eval import register
from fla_train.eval.compare import comparison
from fla_train.eval.config import EvalConfig, SuiteConfig
from fla_train.eval.harness import FlaTrainLM, run_tasks
from fla_train.eval.report import output_lock
from fla_train.eval.run import evaluate
from fla_train.eval.tables import data_notes, markdown
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.utils.keys import find_errors
from tests.eval.conftest import CHOICES
from tests.eval.conftest import RECITE as TO_A_STOP

RECITE = TO_A_STOP | {"generation_kwargs": TO_A_STOP["generation_kwargs"] | {"until": ["\n"]}}


@pytest.fixture
def tasks(write_task, quiz) -> Path:
    """`quiz` and `recite` with two questions of 16 too long for 20 tokens, `few` with 4 of them."""
    rows = [row | {"question": "so " * 9 * (i in (3, 7)) + row["question"]} for i, row in enumerate(quiz)]
    write_task("quiz", rows, **CHOICES)
    write_task("recite", rows, **RECITE)
    return write_task("few", rows[:4], **CHOICES)


def group(folder: Path, name: str, members: list[str], **settings: object) -> None:
    metrics = [{"metric": "acc", "aggregation": "mean", **settings}]
    definition = {"group": name, "task": members, "aggregate_metric_list": metrics}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(definition))


@pytest.fixture
def checkpoint(scholar, tokenizer, tmp_path: Path) -> Callable[[int], Path]:
    def export(length: int) -> Path:
        return export_model(scholar, tokenizer, tmp_path / f"model-{length}", CardInfo(seq_len=length))

    return export


@pytest.mark.parametrize("share_contexts", [True, False])
def test_prompts_that_lose_their_beginning_are_counted(tasks, scholar, tokenizer, share_contexts) -> None:
    """Once per example, though four answers stand behind each prompt."""
    lm = FlaTrainLM(scholar, tokenizer, batch_size=4, max_length=20, share_contexts=share_contexts)
    found = run_tasks(lm, ["quiz", "recite", "few"], include_path=tasks, bootstrap_iters=0)
    assert [found[name]["scores"][name]["truncated"] for name in ("quiz", "recite", "few")] == [2, 2, 1]
    lm = FlaTrainLM(scholar, tokenizer, batch_size=4, max_length=60, share_contexts=share_contexts)
    found = run_tasks(lm, ["quiz", "recite"], include_path=tasks, bootstrap_iters=0)
    assert [found[name]["scores"][name]["truncated"] for name in ("quiz", "recite")] == [0, 0]


def test_truncated_prompts_stand_in_every_view(tasks, checkpoint, tmp_path: Path) -> None:
    suite = SuiteConfig("tasks", tasks=["quiz", "few"], include_path=str(tasks))
    folder, record = evaluate(EvalConfig(str(checkpoint(20)), str(tmp_path / "out"), suite=suite), False)
    text = markdown([record])
    assert "| quiz | acc |" in text and "| 16 | 2 | 0 |" in text and "| 4 | 1 | 0 |" in text
    (line,) = data_notes([record])
    assert "2 of 16 of quiz, 1 of 4 of few" in line and "20 tokens" in line and "suite.max_length" in line
    assert all(line in (folder / name).read_text() for name in ("table.md", "index.html"))


def test_a_window_without_room_for_an_answer(tasks, scholar, tokenizer) -> None:
    lm = FlaTrainLM(scholar, tokenizer, batch_size=4, max_length=10)
    found = run_tasks(lm, ["recite", "quiz"], include_path=tasks, bootstrap_iters=0)
    longest = len(tokenizer.encode("so " * 9 + "km:"))
    assert f"suite.max_length={10 + longest}" in found["recite"]["error"]
    assert "\n" not in found["recite"]["error"] and "scores" in found["quiz"]


@pytest.mark.parametrize("by_size", [True, False])
def test_groups_have_counts_directions_and_scores_by_document(tasks, scholar, tokenizer, by_size) -> None:
    """Also a group of groups, whose direction lm-eval does not hand on."""
    group(tasks, "inner", ["quiz", "few"], weight_by_size=by_size)
    group(tasks, "outer", ["inner"], weight_by_size=by_size)
    lm = FlaTrainLM(scholar, tokenizer, batch_size=4, max_length=20)
    scores = run_tasks(lm, ["outer"], include_path=tasks, bootstrap_iters=9)["outer"]["scores"]
    right = [scores[name]["by_document"]["acc"] for name in ("quiz", "few")]
    for name in ("inner", "outer"):
        found = scores[name]
        assert (found["examples"], found["truncated"], found["num_fewshot"]) == (20, 3, 0)
        assert found["higher_is_better"] == {"acc": True}
        means = [sum(values) / len(values) for values in right]
        expected = (sum(right[0]) + sum(right[1])) / 20 if by_size else sum(means) / 2
        assert found["acc"] == pytest.approx(expected) and expected < 1
        values = found["by_document"]["acc"]
        assert len(values) == 20 and sum(values) / 20 == pytest.approx(expected)
        # The variance of a mean over strata, from each one's own.
        weights = (16 / 20, 4 / 20) if by_size else (0.5, 0.5)
        variances = [sum((x - m) ** 2 for x in v) / len(v) ** 2 for v, m in zip(right, means, strict=True)]
        error = math.sqrt(sum(w**2 * variance for w, variance in zip(weights, variances, strict=True)))
        spread = math.sqrt(sum((value - expected) ** 2 for value in values)) / 20
        assert spread == pytest.approx(error)


def test_groups_are_marked_side_by_side(tasks, scholar, tokenizer, build_model) -> None:
    group(tasks, "inner", ["quiz", "few"])
    records = []
    for name, model in (("scholar", scholar), ("random", build_model(initializer_range=0.3).eval())):
        lm = FlaTrainLM(model, tokenizer, batch_size=4, max_length=60)
        found = run_tasks(lm, ["inner"], include_path=tasks, bootstrap_iters=9)
        records.append({"name": name, "perplexity": {}, "tasks": found})
    rows = {row.group: row for row in comparison(records)}
    assert (
        rows["inner"].label == "acc" and rows["inner"].cells[1].mark == "▼" and rows["inner"].chance == 0.25
    )


def test_options_of_lm_eval(tasks, checkpoint, tmp_path: Path) -> None:
    """What was asked and answered, with other settings of generation, on a part of the examples."""
    suite = SuiteConfig("tasks", tasks=["recite"], include_path=str(tasks), limit=0.25, save_samples=True)
    config = EvalConfig(str(checkpoint(60)), str(tmp_path / "out"), suite=suite)
    folder, record = evaluate(config, progress=False)
    assert record["tasks"]["recite"]["scores"]["recite"]["examples"] == 4
    assert "Only the first 25% of the examples of each task" in (folder / "table.md").read_text()
    rows = [json.loads(line) for line in (folder / "samples/recite.jsonl").read_text().splitlines()]
    assert [row["doc_id"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["arguments"][0][0] == rows[0]["doc"]["question"]
    assert rows[0]["resps"][0][0].startswith("red") or " red" in rows[0]["resps"][0][0]
    suite.gen_kwargs = {"max_gen_toks": 2}
    suite.system_instruction = "Answer."
    evaluate(config, progress=False)
    changed = [json.loads(line) for line in (folder / "samples/recite.jsonl").read_text().splitlines()]
    assert all(row["arguments"][0][0].startswith("Answer.") for row in changed)
    assert max(len(row["resps"][0][0]) for row in changed) <= 2 < len(rows[0]["resps"][0][0])


def test_the_seed_draws_the_examples_of_a_prompt(write_task, quiz, scholar, tokenizer, tmp_path) -> None:
    folder = write_task("quiz", quiz, **CHOICES, fewshot_split="test")
    lm = FlaTrainLM(scholar, tokenizer, batch_size=8, max_length=200)
    prints = [
        run_tasks(lm, ["quiz"], include_path=folder, limit=4, num_fewshot=3, seed=seed, bootstrap_iters=0)
        for seed in (1, 1, 2)
    ]
    first, same, other = (found["quiz"]["scores"]["quiz"]["fingerprint"] for found in prints)
    assert first == same != other


def test_the_chat_template(tasks, scholar, tokenizer, monkeypatch, tmp_path: Path) -> None:
    lm = FlaTrainLM(scholar, tokenizer, batch_size=4, max_length=60)
    options = {"include_path": tasks, "limit": 2, "bootstrap_iters": 0, "apply_chat_template": True}
    with pytest.raises(ValueError, match="no chat template"):
        run_tasks(lm, ["quiz"], **options)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    run_tasks(lm, ["quiz"], **options, samples=tmp_path / "samples")
    row = json.loads((tmp_path / "samples/quiz.jsonl").read_text().splitlines()[0])
    assert row["arguments"][0][0] == f"<user>{row['doc']['question']}<assistant>"


def test_a_split_that_the_data_lack(write_task, quiz, scholar, tokenizer) -> None:
    folder = write_task("quiz", quiz, **CHOICES)
    definition = yaml.safe_load((folder / "quiz.yaml").read_text())
    (folder / "quiz.yaml").write_text(yaml.safe_dump(definition | {"test_split": "final"}))
    found = run_tasks(FlaTrainLM(scholar, tokenizer), ["quiz"], include_path=folder, bootstrap_iters=0)
    assert "has no split 'final' (it has test)" in found["quiz"]["error"]


def test_the_command_takes_them() -> None:
    register()
    overrides = ["suite=tasks", "suite.tasks=[piqa]", "suite.limit=0.1", "suite.seed=7"]
    overrides += ["suite.gen_kwargs={max_gen_toks:4,temperature:0.5}", "suite.apply_chat_template=named"]
    suite = OmegaConf.to_object(compose("eval", overrides)).suite
    assert suite.gen_kwargs == {"max_gen_toks": 4, "temperature": 0.5} and suite.limit == 0.1
    assert suite.apply_chat_template == "named" and suite.seed == 7 and not find_errors(suite, "suite.")
    suite = OmegaConf.to_object(compose("eval", ["suite=tasks", "suite.limit=20"])).suite
    assert suite.limit == 20 and isinstance(suite.limit, int) and suite.apply_chat_template is False
    for limit in (0, -1, 2.5):
        assert any(
            "suite.limit" in line
            for line in find_errors(SuiteConfig("t", tasks=["a"], limit=limit), "suite.")
        )
    assert "suite.gen_kwargs" in find_errors(SuiteConfig("t", tasks=["a"], gen_kwargs="many"), "suite.")[0]


def test_an_output_folder_belongs_to_one_evaluation(tasks, checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    suite = SuiteConfig("tasks", tasks=["few"], include_path=str(tasks))
    config = EvalConfig(str(checkpoint(60)), str(out), suite=suite)
    with output_lock(out), pytest.raises(ValueError, match=f"another evaluation writes {out}"):
        evaluate(config, progress=False)
    assert not (out / "results.json").exists()
    evaluate(config, progress=False)
    assert (out / "results.json").is_file()
