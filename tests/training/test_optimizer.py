"""Weight decay: which parameters get it."""

import pytest

from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.models.zoo.mamba import SignedMambaConfig, SignedMambaForCausalLM
from fla_train.training.optimizer import parameter_groups
from tests.models.small_models import small_config


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


def test_a_tied_head_is_an_embedding():
    model = DeltaProductForCausalLM(small_config(tie_word_embeddings=True))
    decayed, undecayed = parameter_groups(model, 0.5)
    assert all(p is not model.lm_head.weight for p in decayed["params"])
    assert sum(p is model.lm_head.weight for p in undecayed["params"]) == 1
