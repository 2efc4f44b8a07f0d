"""Two processes on one evaluation find what one finds."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from fla_train.cli import eval as command
from fla_train.eval.parallel import ALONE, OtherRankFailed, Ranks, launched_ranks
from fla_train.eval.result import EvalResult
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from tests.eval.conftest import CHOICES, RECITE, ROLLING, value
from tests.ranks import fork_ranks


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with launched_ranks() as ranks:
        assert ranks is ALONE and ranks.share(3) == 3 and ranks.gather(3) == [3]
        assert ranks.device("auto") == "auto"


def fail(ranks: Ranks, rank: int, kind: type[Exception]) -> None:
    if ranks.rank == rank:
        raise kind(f"of {rank}")


def attempt(ranks: Ranks, *blocks: Callable[[], object]) -> None:
    try:
        with ranks.together():
            for block in blocks:
                block()
        print("fine", end=";")
    except Exception as failure:
        print(type(failure).__name__, failure, end=";")


def fail_in_turn() -> None:
    """Fail at an exchange, at the end of the block, and on both ranks at once; then one rank dies."""
    with launched_ranks() as ranks:
        meet = partial(ranks.gather, ranks.rank)
        attempt(ranks, meet, partial(fail, ranks, 1, TypeError), meet)
        attempt(ranks, meet, meet, partial(fail, ranks, 0, ValueError))
        attempt(ranks, partial(fail, ranks, 0, ValueError), partial(fail, ranks, 1, TypeError), meet)
        attempt(ranks, meet)
        print(ranks.share(ranks.rank), ranks.gather(ranks.rank), flush=True)
        if ranks.rank == 1:
            os._exit(3)
        with pytest.raises(OtherRankFailed):
            meet()
        print("noticed")


def test_a_rank_that_fails_takes_the_others_along(tmp_path: Path) -> None:
    ended = [out.split("\n") for _, out, _ in fork_ranks(fail_in_turn, 2, tmp_path)]
    kinds = [["OtherRankFailed on rank 1: TypeError: of 1", "ValueError of 0", "ValueError of 0", "fine"]]
    kinds += [["TypeError of 1", "OtherRankError on rank 0: of 0", "OtherRankError on rank 0: of 0", "fine"]]
    for lines, expected in zip(ended, kinds, strict=True):
        assert lines[0] == ";".join([*expected, "0 [0, 1]"])
    assert ended[0][1] == "noticed"


def test_two_ranks_find_what_one_finds(
    scholar, tokenizer, write_task, quiz, tmp_path: Path, run_command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of the labels are wrong, and the number of documents is odd.
    rows = [row | {"answer": (row["answer"] + i % 2) % 4} for i, row in enumerate(quiz[:13])]
    folder = write_task("quiz", rows, **CHOICES)
    # The second document, which the second of two ranks reads, has no choices.
    write_task("broken", [rows[0], rows[1] | {"choices": []}], **CHOICES)
    write_task("single", rows[:1], **CHOICES)
    write_task("texts", rows[:5], **ROLLING | {"doc_to_target": "{{question}}"})
    # An odd number of prompts, of different lengths. That of needles is odd, too.
    prompts = [row | {"question": "a " * (i % 3) + row["question"]} for i, row in enumerate(rows[:7])]
    write_task("recite", prompts, **RECITE)
    checkpoint = export_model(scholar, tokenizer, tmp_path / "model", CardInfo(seq_len=64))
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "red and blue " * n}) + "\n" for n in (3, 9, 5, 7, 1)))
    suite = {
        "name": "all", "tasks": ["quiz", "broken", "single", "texts", "recite"], "include_path": str(folder),
        "perplexity": {"sets": [str(file)], "lengths": [8, 64], "bucket": 8},
        "needle": {"tasks": ["niah_single_1"], "lengths": [500], "samples": 5, "answer_tokens": 4},
    }  # fmt: skip
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite/all.yaml").write_text(yaml.safe_dump(suite))
    request = [f"checkpoint={checkpoint}", "device=cpu", f"--config-dir={tmp_path}", "suite=all"]
    outputs = [tmp_path / "one", tmp_path / "two"]
    alone, *said = run_command("fla-eval", *request, f"output={outputs[0]}")
    monkeypatch.setattr(sys, "argv", ["fla-eval", *request, f"output={outputs[1]}"])
    (code, *first), (code_2, *second) = fork_ranks(command.main, 2, tmp_path)
    assert (alone, code, code_2) == (1, 1, 0), first[1][-2000:] + second[1][-2000:]
    for (out, err), output in zip((said, first), outputs, strict=True):
        assert err.count("error: ") == 1 and "could not run broken;" in err
        assert str(output / "table.md") in out
    assert not second[0]  # the console is rank 0's
    one, two = (EvalResult.load(output / "results.json") for output in outputs)
    assert one.errors.keys() == {"broken"} and "on rank 1: " in two.errors["broken"]
    assert (
        value(one, "quiz", "acc") == pytest.approx(7 / 13)
        and 0 < value(one, "recite", "exact_match_word") < 1
    )
    assert two.metrics() == pytest.approx(one.metrics(), rel=1e-5)
    for a, b in zip(one.scores, two.scores, strict=True):
        for field in ("key", "documents", "sequences", "fingerprint"):
            assert getattr(a, field) == getattr(b, field)
        if a.section != "perplexity" and a.data != "texts":
            assert a == b
