"""Each baseline builds at the asked sizes, is causal, and its loss is the summed cross entropy we ask for."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from fla_train.models.zoo.build import (
    KINDS,
    BaselineConfig,
    baseline_errors,
    build_baseline,
    ignored_overrides,
)

SIZES = {"vocab_size": 11, "hidden_size": 32, "num_hidden_layers": 2}
OF_FLA = ("gla", "retnet", "rwkv7")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OF_FLA])
def test_it_trains_as_the_engine_wants(kind: str) -> None:
    torch.manual_seed(0)
    model = build_baseline(BaselineConfig(kind, num_heads=4), SIZES).train()
    assert model.config.num_hidden_layers == 2 and model.config.vocab_size == 11
    ids = torch.randint(11, (2, 21))
    labels = torch.where(torch.rand(2, 21) < 0.5, ids, -100)
    out = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(3.0), use_cache=False)
    targets = labels[:, 1:].flatten()
    expected = cross_entropy(out.logits[:, :-1].flatten(0, 1), targets, reduction="sum") / 3
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)

    model.eval()
    changed = ids.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 11
    with torch.no_grad():
        difference = (
            model(input_ids=ids, use_cache=False).logits - model(input_ids=changed, use_cache=False).logits
        )
    assert difference[:, :15].abs().max() < 1e-5 < difference[:, 15:].abs().max()


@pytest.mark.parametrize("kind", OF_FLA)
def test_a_missing_package_is_named(kind: str) -> None:
    if importlib.util.find_spec("fla"):
        pytest.skip("flash-linear-attention is installed")
    with pytest.raises(ValueError, match="pip install flash-linear-attention"):
        build_baseline(BaselineConfig(kind, num_heads=4), SIZES)


@pytest.mark.parametrize("kind", OF_FLA)
def test_the_package_builds_it_at_the_asked_sizes(kind: str) -> None:
    pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
    model = build_baseline(BaselineConfig(kind, num_heads=4), SIZES)
    assert model.config.model_type == kind and model.config.num_hidden_layers == 2
    assert model.get_input_embeddings().weight.shape == (11, 32)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("import a_part_of_it", "ModuleNotFoundError: No module named 'a_part_of_it'"),
        ("import torch; torch.gone", "AttributeError: module 'torch' has no attribute 'gone'"),
    ],
)
def test_a_package_that_does_not_work_is_not_called_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, cause: str
) -> None:
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text(content + "\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"is installed and can't be imported .{re.escape(cause)}"):
        build_baseline(BaselineConfig("gla", num_heads=4), SIZES)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (BaselineConfig("gru", 4), "is none of llama"),
        (BaselineConfig("llama", 4, allow_neg_eigval=True), "only on mamba"),
        (BaselineConfig("llama", 3), "num_heads=3"),
    ],
)
def test_errors(config: BaselineConfig, error: str) -> None:
    (found,) = baseline_errors(config, SIZES)
    assert error in found
    assert baseline_errors(BaselineConfig("mamba", 4, allow_neg_eigval=True), SIZES) == []


def test_overrides_of_the_model_that_no_baseline_reads() -> None:
    read = ["model.hidden_size=64", "model.num_hidden_layers=2", "model.head_dim=32", "+model.vocab_size=9"]
    others = ["experiment=formal/parity_fast", "model=delta_net/tiny", "baseline.num_heads=2", "seed=0"]
    assert ignored_overrides([*read, *others]) == []
    ignored = ["model.num_householder=3", "++model.allow_neg_eigval=true", "~model.attn"]
    assert ignored_overrides([*read, *ignored]) == [
        "model.num_householder",
        "model.allow_neg_eigval",
        "model.attn",
    ]
