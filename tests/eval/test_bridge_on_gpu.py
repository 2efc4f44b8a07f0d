"""Our bridge and plain `HFLM` on the same model, in the precisions of a GPU, compared with fp64 on the CPU.

On the CPU the same code runs in the same precisions.
"""

import copy
import random

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from fla_train.eval.harness import FlaTrainLM

WORDS = "the state of a linear recurrence forgets what its gate closes on and keeps what a key wrote".split()
GPU = pytest.mark.gpu


def questions(count: int) -> list[Instance]:
    """Return contexts of 5 to 300 bytes: three of four have four answers of 3 to 40 bytes, the others one."""
    draw, found = random.Random(0), []
    for number in range(count):
        context = " ".join(draw.choices(WORDS, k=draw.randint(1, 50)))
        for _ in range(4 if number % 4 else 1):
            answer = " " + " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))
            found.append(Instance("loglikelihood", {}, (context, answer), len(found)))
    return found


def distances(found: list[float], expected: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.float32, marks=GPU),  # products of three TF32 parts
        pytest.param("cuda", torch.bfloat16, marks=GPU),
    ],
)
def test_equal_to_plain_hflm_up_to_rounding(build_model, tokenizer, device: str, dtype: torch.dtype) -> None:
    """Sums of up to 40 log-probabilities of a nearly uniform model, -6 nats each.

    bf16 keeps 8 bits: each log-probability is off by some 1e-3, and a sum of 40 by less than 40 times that
    even if all are off the same way, which is what 0.05 and a thousandth of the sum allow.
    """
    model = build_model(hidden_size=128, head_dim=64).eval().to(device, dtype)
    asked = questions(80 if device == "cuda" else 16)
    options = {"tokenizer": tokenizer, "batch_size": 8, "max_length": 256}
    plain = HFLM(model, backend="causal", softmax_dtype="float32", **options)
    exact = FlaTrainLM(copy.deepcopy(model).double().cpu(), **options)
    expected, ours, truth = (
        lm.loglikelihood(asked, disable_tqdm=True) for lm in (plain, FlaTrainLM(model, **options), exact)
    )
    values = [[value for value, _ in answers] for answers in (expected, ours, truth)]
    if dtype == torch.float32:
        assert max(distances(values[1], values[0])) <= 1e-3
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]
    else:
        bounds = [0.05 + abs(value) / 1000 for value in values[0]]
        assert all(
            apart <= bound for apart, bound in zip(distances(values[1], values[0]), bounds, strict=True)
        )
    off = [sum(distances(found, values[2])) / len(asked) for found in values[:2]]
    assert off[1] <= 2 * off[0] + 1e-5, "our bridge is farther from fp64 than HFLM is"
