"""`fla-bench evaluation`: the answers that are compared are those of every kind of request, in order."""

from pathlib import Path

import pytest

from fla_train.bench import evaluation
from fla_train.bench.evaluation import bench_evaluation, time_answers


class Model:
    def loglikelihood(self, requests: list, disable_tqdm: bool) -> list[tuple[float, bool]]:
        return [(-float(request), True) for request in requests]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool) -> list[float]:
        return [-10.0 * request for request in requests]


def test_answers_of_every_kind() -> None:
    asked = {"loglikelihood": [1, 2, 3], "loglikelihood_rolling": [4]}
    seconds, answers = time_answers(Model(), asked, "cpu")
    assert seconds >= 0 and answers.tolist() == [-1, -2, -3, -40]
    assert time_answers(Model(), asked, "cpu", 2)[1].tolist() == [-1, -2, -40]


def test_an_unknown_task_is_refused_before_anything_is_loaded(monkeypatch, tmp_path: Path) -> None:
    def refuse(names: list[str], include_path: None) -> None:
        raise ValueError(f"no task {names}")

    monkeypatch.setattr(evaluation, "task_manager", refuse)
    options = {"lengths": [8], "limit": None, "batch_size": "auto", "rounds": 1}
    with pytest.raises(ValueError, match="no task"):
        next(bench_evaluation({}, tmp_path, "no tokenizer", tasks=["x"], **options))
