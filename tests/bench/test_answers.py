"""`fla-bench evaluation`: the answers that are compared are those of every kind of request, in order."""

from fla_train.bench.evaluation import time_answers


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
