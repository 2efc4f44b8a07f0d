"""Weight decay: which parameters get it, and that a step applies it to no others; flat weights."""

from dataclasses import replace

import pytest
import torch

from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.models.zoo.mamba import SignedMambaConfig, SignedMambaForCausalLM
from fla_train.training.config import OptimizerConfig
from fla_train.training.optimizer import build_optimizer, parameter_groups
from tests.models.small_models import small_config

SETTINGS = OptimizerConfig(
    "adamw", 1e-2, weight_decay=0.5, beta1=0.9, beta2=0.95, eps=1e-8, max_grad_norm=1.0
)


@pytest.fixture
def model() -> DeltaProductForCausalLM:
    return DeltaProductForCausalLM(small_config())


def test_matrices_are_decayed_and_the_rest_is_not(model: DeltaProductForCausalLM):
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, undecayed = ({names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.5))
    assert decayed | undecayed == set(names.values())
    assert not decayed & undecayed
    assert "lm_head.weight" in decayed
    assert "model.embeddings.weight" in undecayed
    for name in decayed:
        assert name.endswith("weight") and not name.endswith("norm.weight")
    for ending in ("A_log", "dt_bias"):
        assert any(name.endswith(ending) for name in undecayed)


def test_marked_matrices_are_not_decayed():
    model = SignedMambaForCausalLM(SignedMambaConfig(hidden_size=16, num_hidden_layers=1))
    mixer = model.backbone.layers[0].mixer
    decayed, undecayed = ({id(p) for p in group["params"]} for group in parameter_groups(model, 0.5))
    assert mixer.A_log.ndim == 2 and id(mixer.A_log) in undecayed
    assert id(mixer.x_proj.weight) in decayed


def test_a_step_without_gradient_decays_exactly_the_decayed(model: DeltaProductForCausalLM):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, SETTINGS)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(model.named_parameters())
    torch.testing.assert_close(after["lm_head.weight"], before["lm_head.weight"] * (1 - 1e-2 * 0.5))
    for name, value in after.items():
        if name.endswith(("A_log", "dt_bias", "norm.weight", "embeddings.weight")):
            assert torch.equal(value, before[name]), name


def test_a_custom_optimizer_divides_the_gradient_by_its_scale_or_skips_the_step():
    layer = torch.nn.Linear(3, 2, bias=False)
    optimizer = build_optimizer(layer, replace(SETTINGS, name="torch.optim:SGD"))
    layer.weight.grad, expected = torch.full((2, 3), 8.0), layer.weight.detach() * (1 - 1e-2 * 0.5) - 1e-2 * 2
    for skip in (0.0, 1.0):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(skip)
        optimizer.step()
        torch.testing.assert_close(layer.weight.detach(), expected)


def test_frozen_weights_are_in_no_group(model: DeltaProductForCausalLM):
    model.lm_head.requires_grad_(False)
    groups = parameter_groups(model, 0.5)
    assert all(p is not model.lm_head.weight for group in groups for p in group["params"])


def test_a_tied_head_is_an_embedding():
    model = DeltaProductForCausalLM(small_config(tie_word_embeddings=True))
    decayed, undecayed = parameter_groups(model, 0.5)
    assert all(p is not model.lm_head.weight for p in decayed["params"])
    assert sum(p is model.lm_head.weight for p in undecayed["params"]) == 1
