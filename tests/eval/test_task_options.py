"""Options of lm-eval's tasks, notes on prompts that do not fit, and groups of tasks."""

import json
import math
from pathlib import Path

import pytest
import yaml

from fla_train.eval.harness import FlaTrainLM
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


def test_prompts_that_lose_their_beginning_are_counted(tasks, scholar, tokenizer, run_tasks, monkeypatch):
    """Once, though four answers share a prompt."""
    monkeypatch.setenv("HOME", str(tasks.parent))
    for length, counts in ((20, {"quiz": 2, "recite": 2, "few": 1}), (60, {})):
        lm = FlaTrainLM(scholar, tokenizer, batch_size=4, max_length=length)
        notes = run_tasks(lm, ["quiz", "recite", "few"], include_path=f"~/{tasks.name}").notes
        window = "prompts are cut to 20 tokens"
        assert [note.partition(" are")[0] for note in notes if window in note] == [
            f"{name}: {count} prompts" for name, count in counts.items()
        ]


@pytest.mark.parametrize("by_size", [True, False])
def test_groups_have_directions_and_scores_by_document(tasks, scholar, tokenizer, run_tasks, by_size) -> None:
    """Also a group of groups, whose direction lm-eval does not hand on."""
    group(tasks, "inner", ["quiz", "few"], weight_by_size=by_size)
    group(tasks, "outer", ["inner"], weight_by_size=by_size)
    lm = FlaTrainLM(scholar, tokenizer, batch_size=4, max_length=20)
    result = run_tasks(lm, ["outer"], include_path=tasks)
    assert not result.errors
    right = [result.find("tasks", name, "acc").by_document for name in ("quiz", "few")]
    for name in ("inner", "outer"):
        score = result.find("tasks", name, "acc")
        assert (score.documents, score.higher_is_better, score.chance) == (20, True, 0.25)
        means = [sum(values) / len(values) for values in right]
        expected = (sum(right[0]) + sum(right[1])) / 20 if by_size else sum(means) / 2
        assert score.value == pytest.approx(expected) and expected < 1
        values = score.by_document
        assert len(values) == 20 and sum(values) / 20 == pytest.approx(expected)
        # The variance of a mean over strata, from that of each stratum.
        weights = (16 / 20, 4 / 20) if by_size else (0.5, 0.5)
        variances = [sum((x - m) ** 2 for x in v) / len(v) ** 2 for v, m in zip(right, means, strict=True)]
        error = math.sqrt(sum(w**2 * variance for w, variance in zip(weights, variances, strict=True)))
        spread = math.sqrt(sum((value - expected) ** 2 for value in values)) / 20
        assert spread == pytest.approx(error)


def test_options_of_lm_eval(tasks, scholar, tokenizer, run_tasks, tmp_path: Path, monkeypatch) -> None:
    """Prompts and answers, with other settings of generation and a chat template, of some examples."""
    lm = FlaTrainLM(scholar, tokenizer, batch_size=4, max_length=80)
    options = {"include_path": tasks, "limit": 0.25, "save_samples": True}

    def samples(**changed: object) -> list[dict]:
        result = run_tasks(lm, ["recite"], **options | changed)
        assert result.scores[0].documents == 4 and "suite.limit=0.25" in result.notes[0]
        return [json.loads(line) for line in (tmp_path / "samples/recite.jsonl").read_text().splitlines()]

    rows = samples()
    assert [row["doc_id"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["arguments"][0][0] == rows[0]["doc"]["question"] and "red" in rows[0]["resps"][0][0]
    changed = samples(gen_kwargs={"max_gen_toks": 2}, system_instruction="Answer.")
    assert all(row["arguments"][0][0].startswith("Answer.") for row in changed)
    assert max(len(row["resps"][0][0]) for row in changed) <= 2 < len(rows[0]["resps"][0][0])
    with pytest.raises(ValueError, match="no chat template"):
        samples(apply_chat_template=True)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    row = samples(apply_chat_template=True)[0]
    assert row["arguments"][0][0] == f"<user>{row['doc']['question']}<assistant>"
