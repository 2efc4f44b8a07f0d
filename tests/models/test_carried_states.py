"""States carried over training passes, compared with one long pass and with a cache."""

from itertools import pairwise

import pytest
import torch
from small_models import carried_passes, zero_states
from torch import Tensor
from transformers import DynamicCache

from fla_train.models.carried_states import RECURRENT, CarriedStates

LINEAR = ["delta_net", "gated_delta_product", "without_conv"]
EXACT = {"rtol": 1e-9, "atol": 1e-9}
ROWS, LENGTH = 3, 8


@pytest.fixture
def text() -> Tensor:
    """Three rows of four times LENGTH random tokens."""
    return torch.randint(1, 31, (ROWS, 4 * LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("variant", LINEAR)
@torch.no_grad()
def test_passes_are_one_long_pass(build, text: Tensor, variant: str):
    model = build(variant, backend="chunk")
    found = carried_passes(model, text.split(LENGTH, dim=1))
    torch.testing.assert_close(torch.cat(found, dim=1), model(text).logits, **EXACT)


@pytest.mark.parametrize("variant", LINEAR)
@torch.no_grad()
def test_packed_documents_continue_over_passes(build, text: Tensor, variant: str):
    """The expected logits are those of each document in a separate pass, without rows and bounds."""
    model = build(variant, backend="chunk")
    bounds = [  # of documents over the row's whole text: a row ends in, at and just behind a document's bound
        [0, 3, 20, 32],
        [0, 8, 9, 30, 32],
        [0, 15, 16, 17, 32],
    ]
    expected = [
        torch.cat([model(row[None, a:b]).logits[0] for a, b in pairwise(cut)])
        for row, cut in zip(text, bounds, strict=True)
    ]
    logits, start = [], zero_states(model, ROWS)
    for first in range(0, 4 * LENGTH, LENGTH):
        last = first + LENGTH
        inner = [[b - first for b in cut if first < b < last] for cut in bounds]
        line = [row * LENGTH + b for row, cut in enumerate(inner) for b in [0, *cut]] + [ROWS * LENGTH]
        for row, cut in enumerate(bounds):
            if first in cut:
                for state in start.values():
                    state[row] = 0
        end = {key: torch.full_like(state, torch.nan) for key, state in start.items()}
        states = CarriedStates(start, end, model.config.num_hidden_layers)
        ids = text[:, first:last].reshape(1, -1)
        found = model(ids, cu_seqlens=torch.tensor(line), states=states).logits
        logits.append(found.view(ROWS, LENGTH, -1))
        start = end
    torch.testing.assert_close(torch.cat(logits, dim=1), torch.stack(expected), **EXACT)
    # Without inputs of convolutions, zero states change nothing: no row reads the end of the one before.
    zero = {key: state for key, state in zero_states(model, ROWS).items() if key.kind == RECURRENT}
    states = CarriedStates(zero, {key: torch.empty_like(state) for key, state in zero.items()}, 2)
    found, alone = (model(ids, cu_seqlens=torch.tensor(line), states=x).logits for x in (states, None))
    torch.testing.assert_close(found, alone, **EXACT)


@torch.no_grad()
def test_attention_layers_carry_nothing(build, text: Tensor):
    """In a hybrid's second pass the linear layer continues, and the attention layer sees only the pass."""
    model = build("hybrid_full_attention")
    found = carried_passes(model, text[:, : 2 * LENGTH].split(LENGTH, dim=1))[1]
    hidden = model.model(text[:, : 2 * LENGTH], output_hidden_states=[1]).hidden_states[1][:, LENGTH:]
    alone = model(text[:, LENGTH : 2 * LENGTH]).logits
    assert not torch.allclose(found, alone)
    model.model.layers[0].forward = lambda *_, **__: (hidden, torch.zeros_like(hidden))
    torch.testing.assert_close(model(text[:, LENGTH : 2 * LENGTH]).logits, found, **EXACT)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_a_constant_state(build, text: Tensor, checkpointing: bool):
    """Against a cache filled by a pass without gradients; a layer that runs twice changes nothing."""
    model = build(backend="chunk").train()
    first, second = text[:, :LENGTH], text[:, LENGTH : 2 * LENGTH]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(first, past_key_values=cache)
    start = {}
    for key in zero_states(model, ROWS):
        layer = cache.layers[key.layer]
        held = layer.recurrent_states if key.kind == RECURRENT else layer.conv_states
        start[key] = held[key.index].clone()
    # An update in place would invalidate the graph.
    cache.update_recurrent_state = cache.update_conv_state = lambda *_, **__: None
    logits = model(second, past_key_values=cache).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), second[:, 1:].flatten())
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    if checkpointing:
        model.gradient_checkpointing_enable()
    kept = {key: state.clone() for key, state in start.items()}
    end = {key: torch.full_like(state, torch.nan) for key, state in start.items()}
    found = model(
        second, labels=second, states=CarriedStates(start, end, model.config.num_hidden_layers)
    ).loss
    after_forward = {key: state.clone() for key, state in end.items()}
    found.backward()
    torch.testing.assert_close(found, loss, **EXACT)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], **EXACT)
    for key in start:
        assert torch.equal(start[key], kept[key]) and torch.equal(end[key], after_forward[key])
        assert not end[key].requires_grad and end[key].isfinite().all()
