"""Batched log-likelihoods with shared contexts against one forward pass per request, in fp64."""

import random

import pytest
import torch

from fla_train.eval.likelihood import log_likelihoods
from tests.eval.conftest import short_of_memory

Request = tuple[list[int], list[int]]
GLOBAL = {"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2}
WINDOW = {
    "layer_types": ["linear_attention", "sliding_attention"],
    "num_attention_heads": 2,
    "sliding_window": 5,
}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """200 requests: questions with 2 to 5 choices, lone ones, contexts that are cut, and equal requests."""
    draw = random.Random(0)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(320) for _ in range(draw.randint(low, high))]

    found: list[Request] = []
    while len(found) < 120:
        context = tokens(1, 90)
        found += [(context, tokens(1, 12)) for _ in range(draw.randint(2, 5))]
    found += [(tokens(1, 90), tokens(1, 40)) for _ in range(200 - len(found) - 4)]
    found += [found[0]] * 2 + [(tokens(100, 120), tokens(3, 3)), (tokens(1, 1), tokens(40, 40))]
    draw.shuffle(found)
    assert len(found) == 200
    return found


@torch.no_grad()
def direct(model, requests: list[Request], max_length: int) -> list[tuple[float, bool]]:
    answers = []
    for context, continuation in requests:
        ids = [*context, *continuation][-(max_length + 1) :]
        logits = model(torch.tensor([ids])).logits[0, -len(continuation) - 1 : -1]  # [continuation, V]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])
        answers.append((chosen.sum().item(), logits.argmax(-1).tolist() == continuation))
    return answers


@pytest.mark.parametrize("kind", ["recurrent", "no convolution", "global attention", "window"])
def test_200_requests_equal_a_direct_computation(kind, build_model, requests) -> None:
    settings = {
        "recurrent": {},
        "no convolution": {"use_short_conv": False, "use_forget_gate": False},
        "global attention": GLOBAL,
        "window": WINDOW,
    }[kind]
    model = build_model(**({"initializer_range": 0.3} | settings)).double().eval()
    few = requests if kind == "recurrent" else requests[:60]
    expected = direct(model, few, max_length=60)
    # Padding on the left shifts the angles of RoPE, which are fp32.
    digits = 1e-5 if model.config.attention_layers else 1e-9
    for batch_tokens in (1, 300, 5000):
        found = log_likelihoods(model, few, max_length=60, batch_tokens=batch_tokens)
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=digits)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_a_shared_context_is_read_once(build_model, monkeypatch) -> None:
    model = build_model().eval()
    read, forward = [], model.model.forward
    monkeypatch.setattr(
        model.model, "forward", lambda ids, **k: read.append(tuple(ids.shape)) or forward(ids, **k)
    )
    questions = [list(range(length)) for length in (41, 31)]
    requests = [(question, [choice]) for question in questions for choice in (1, 2, 3)]
    log_likelihoods(model, requests, max_length=60, batch_tokens=2000)
    assert read == [(2, 41)]  # what follows the contexts is one token: they predict it themselves
    read.clear()
    requests = [(question, [choice] * (choice + 1)) for question in questions for choice in (1, 2, 9)]
    log_likelihoods(model, requests, max_length=60, batch_tokens=2000)
    assert read == [(2, 41), (6, 9)]  # two contexts, then six continuations but for their last tokens
    read.clear()
    log_likelihoods(model, [([5] * n, [1, 2]) for n in (9, 30, 10, 31)], max_length=60, batch_tokens=64)
    # Sorted by length, so hardly padded; the second tokens follow.
    assert read == [(2, 31), (2, 1), (2, 10), (2, 1)]


def test_batches_are_halved_when_memory_is_short(build_model, requests, monkeypatch) -> None:
    """In each of the three passes, which stop at 4 sequences here; a single one too many is the end."""
    model = build_model().double().eval()
    expected = log_likelihoods(model, requests, max_length=60, batch_tokens=5000)
    sizes = short_of_memory(monkeypatch, model.model, "forward", most=4)
    found = log_likelihoods(model, requests, max_length=60, batch_tokens=5000)
    assert [v for v, _ in found] == pytest.approx([v for v, _ in expected], abs=1e-9)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert max(sizes) > 16 and sum(size <= 4 for size in sizes) > 40
    short_of_memory(monkeypatch, model.model, "forward", most=0)
    with pytest.raises(torch.OutOfMemoryError):
        log_likelihoods(model, requests, max_length=60, batch_tokens=5000)


def test_a_continuation_longer_than_the_window(build_model) -> None:
    requests = [([1], [1]), ([1], [1] * 61), ([1], [1] * 65)]
    with pytest.raises(ValueError, match=r"request 1 has 61 tokens, .*suite.max_length"):
        log_likelihoods(build_model().eval(), requests, max_length=60, batch_tokens=100)
    with pytest.raises(ValueError, match="request 1 has no token of context"):  # of spaces alone
        log_likelihoods(build_model().eval(), [([1], [1]), ([], [1])], max_length=60, batch_tokens=100)
    assert log_likelihoods(build_model().eval(), [], max_length=60, batch_tokens=100) == []
