"""Two processes on one evaluation find what one finds."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fla_train.eval.parallel import ALONE, Ranks, launched_ranks
from fla_train.hub import CardInfo, export_model


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with launched_ranks() as ranks:
        assert ranks is ALONE and ranks.share(3) == 3 and ranks.gather(3) == [3]
        assert ranks.device("auto") == "auto"


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    second = Ranks(rank=5, world=8, local_rank=1)
    assert second.device("auto") == second.device("cuda") == "cuda:1" and second.device("cpu") == "cpu"


def start(arguments: list[str], ranks: int) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "fla_train.cli.eval", *arguments],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


@pytest.mark.slow
def test_two_ranks_find_what_one_finds(scholar, tokenizer, write_task, quiz, tmp_path: Path) -> None:
    choices = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    # Half of the labels are wrong, and the number of documents is odd.
    rows = [row | {"answer": (row["answer"] + i % 2) % 4} for i, row in enumerate(quiz[:13])]
    folder = write_task(
        "quiz", rows, output_type="multiple_choice", metric_list=[{"metric": "acc"}], **choices
    )
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}"}
    write_task("texts", rows[:5], **rolling, metric_list=[{"metric": "word_perplexity"}])
    checkpoint = export_model(scholar, tokenizer, tmp_path / "model", CardInfo(seq_len=64))
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "red and blue " * n}) + "\n" for n in (3, 9, 5, 7, 1)))
    request = [
        f"checkpoint={checkpoint}", "device=cpu", "suite=demo", f"suite.perplexity.sets=[{file}]",
        "suite.perplexity.lengths=[8,64]", "suite.perplexity.bucket=8", "suite.perplexity.state_documents=1",
        "suite.tasks=[quiz,texts]", f"suite.include_path={folder}",
    ]  # fmt: skip
    records = []
    for ranks in (1, 2):
        output = tmp_path / f"out{ranks}"
        processes = start([*request, f"output={output}"], ranks)
        ended = [(*process.communicate(timeout=300), process.returncode) for process in processes]
        assert [code for *_, code in ended] == [0] * ranks, ended[-1][1][-2000:]
        assert str(output / "table.md") in ended[0][0]
        assert all(not out for out, *_ in ended[1:])  # the console is rank 0's
        records.append(json.loads((output / "results.json").read_text()))
    one, two = records
    assert two["perplexity"]["texts"]["data"] == one["perplexity"]["texts"]["data"]
    assert two["perplexity"]["texts"]["lengths"][0]["documents"] == 5
    scores = [record["tasks"]["quiz"]["scores"]["quiz"] for record in records]
    assert (
        scores[0] == scores[1] and scores[0]["acc"] == pytest.approx(7 / 13) and scores[0]["examples"] == 13
    )
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
