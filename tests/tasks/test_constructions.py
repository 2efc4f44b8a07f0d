"""The papers' existence proofs, run: hand-set weights solve word problems of any length, in our models."""

from collections.abc import Callable

import pytest
import torch

from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.tasks.group_words import GroupWords
from fla_train.tasks.task import Tally
from tests.tasks.constructions import cyclic, symmetric, two_layers

LENGTH = 10_000


def solved(model: DeltaProductForCausalLM, group: str, dtype: torch.dtype, seed: int = 0) -> Tally:
    batch = GroupWords(group, LENGTH, seed=seed).batch(range(2))
    with torch.no_grad():
        logits = model.to(dtype)(input_ids=batch.input_ids, use_cache=False).logits
    return Tally.of(logits.argmax(-1), batch.labels)


CASES: dict[str, Callable[[], DeltaProductForCausalLM]] = {
    "one layer, Z60": lambda: cyclic(60),
    "one layer, S4": lambda: symmetric(4),
    "two layers, Z5": lambda: two_layers("Z5"),
    "two layers, D3": lambda: two_layers("D3"),
    "two layers, D7": lambda: two_layers("D7"),
}


@pytest.mark.parametrize("case", CASES)
def test_hand_set_weights_make_no_error_in_ten_thousand_tokens(case: str) -> None:
    model = CASES[case]()
    assert model.config.num_householder <= 3 and model.config.num_hidden_layers <= 2
    assert solved(model, case.split()[-1], torch.float64).token_accuracy == 1.0


def test_the_proofs_hold_in_fp32() -> None:
    assert solved(symmetric(3), "S3", torch.float32).token_accuracy == 1.0
    assert solved(two_layers("D3"), "D3", torch.float32).token_accuracy == 1.0


def test_without_negative_eigenvalues_the_same_weights_fail() -> None:
    """The same construction with beta in [0, 1] projects instead of reflecting, and forgets."""
    model = symmetric(3)
    for block in model.model.layers:
        block.attn.beta_max = 1.0
    assert solved(model, "S3", torch.float64).token_accuracy < 0.5
