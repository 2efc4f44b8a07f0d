"""Custom mixers: docs/examples from another folder, the contract, and permission to import."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_models import carried_passes, small_config
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from fla_train.hub.export import export_model
from fla_train.hub.load import load_model
from fla_train.kernels.delta_product import delta_product
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.mixers.contract import contract_checks, difference
from fla_train.models.modeling import DeltaProductForCausalLM

OWN = {
    "linear_attention": {"mixer": "linear_attention:LinearAttention", "mixer_options": {"chunk": 4}},
    "longhorn": {"mixer": "longhorn:Longhorn"},
    "exact": {"mixer": "longhorn:Longhorn", "mixer_options": {"exact": True}, "use_output_gate": True},
    "initial_beta": {"mixer": "initial_beta:InitialBeta", "num_householder": 3},
    "hybrid": {"mixer": "longhorn:Longhorn", "layer_types": ["linear_attention", "full_attention"]},
    "feature_map": {"mixer": "feature_map:FeatureMap", "mixer_options": {"phi": "elu", "norm": 1}},
    "slstm": {"mixer": "recurrences:SLSTM"},
    "full_matrix": {"mixer": "recurrences:FullMatrix", "mixer_options": {"size": 4}},
}
every_example = pytest.mark.parametrize("example", OWN)
PLAIN = """
from dataclasses import replace
from linear_attention import LinearAttention
from torch import nn
class Mean(nn.Module):  # of all tokens so far; it keeps no states
    def __init__(self, config, layer_index, scale=1.0):
        super().__init__()
        self.scale, self.proj = scale, nn.Linear(config.hidden_size, config.hidden_size)
    def forward(self, x, context=None):
        assert context is None or context.padding_mask is None or context.padding_mask.all()
        return self.proj(x.cumsum(1) / (1 + x.new_ones(x.shape[1]).cumsum(0)[:, None])) * self.scale
class Acausal(LinearAttention):
    def forward(self, x, context=None, cache=None):
        return super().forward(x, context, cache) + x.roll(-1, dims=1)
class Joined(LinearAttention):
    def forward(self, x, context=None, cache=None):
        return super().forward(x, replace(context, position_in_document=None), cache)
class Forgetful(LinearAttention):
    def forward(self, x, context=None, cache=None):
        return super().forward(x, context)
class Infinite(LinearAttention):
    def forward(self, x, context=None, cache=None):
        return super().forward(x, context, cache) + (self.temperature - self.temperature).sqrt().sum()
class Last(Mean):  # broadcast over the residual stream it would train on
    def forward(self, x, context=None):
        return super().forward(x)[:, -1:]
"""


@pytest.fixture(autouse=True)
def mixers(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples, `plain` and `broken`, on sys.path."""
    (elsewhere / "plain.py").write_text(PLAIN)
    (elsewhere / "broken.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(elsewhere))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@every_example
@torch.no_grad()
def test_an_example_meets_the_contract(build: Callable, tokens: Tensor, example: str) -> None:
    model = build(**OWN[example])
    for check in contract_checks(model):
        with torch.enable_grad():
            assert difference(check()) < 1e-6, check.__doc__

    cache = StaticCache(config=model.config, max_cache_len=19)
    parts = [model(part, past_key_values=cache).logits for part in tokens.split([1, 9, 2, 1, 6], dim=1)]
    close(torch.cat(parts, 1), model(tokens).logits)

    mask = torch.arange(6) >= torch.tensor([[0], [2], [5]])
    beams = {"num_beams": 2, "max_new_tokens": 5, "pad_token_id": 0, "do_sample": False}
    found, again = (
        model.generate(tokens[:, :6], attention_mask=mask.long(), use_cache=use_cache, **beams)
        for use_cache in (True, False)
    )
    assert torch.equal(found, again)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("Acausal", {"later token", "padding", "documents", "pieces"}),
        ("Joined", {"documents"}),
        ("Forgetful", {"pieces"}),
        ("Infinite", {"gradients"}),
    ],
)
def test_the_doctor_finds_what_a_mixer_breaks(run_command: Callable, name: str, broken: set[str]) -> None:
    options = ["--mixer-options", '{"chunk": 4}']
    code, out, _ = run_command("fla-doctor", "--mixer", f"plain:{name}", *options)
    failed = [line for line in out.splitlines() if "FAILED" in line]
    assert code == 1 and len(failed) == len(broken), out
    assert all(any(word in line for line in failed) for word in broken), out


@pytest.mark.parametrize("example", ["linear_attention", "longhorn", "slstm", "full_matrix"])
@torch.no_grad()
def test_an_example_carries_its_states_over_training_passes(build, tokens, example):
    """Its code is unchanged: the states are where a cache would be."""
    model = build(**OWN[example])
    close(torch.cat(carried_passes(model, tokens.split([8, 2, 9], dim=1)), 1), model(tokens).logits)


@pytest.mark.parametrize("exact", [False, True])
@torch.no_grad()
def test_longhorn_solves_its_equation(exact: bool) -> None:
    """Each step solves S' = S + beta k (v - S'^T k)^T, or dS/ds = k (v - S^T k)^T over a time beta."""
    from longhorn import Longhorn

    mixer = Longhorn(small_config(num_householder=1), exact=exact)
    q, k, v = (torch.randn(1, 7, 2, 4).double() for _ in range(3))
    k *= torch.tensor([1e-4, 0.1, 1.0, 3.0, 10.0, 0.5, 2.0]).double()[:, None, None]
    beta = 2 * torch.rand(1, 7, 2).double()
    beta[0, 3] = 0  # padding
    g = -torch.rand(1, 7, 2).double()
    inputs = mixer.operator_inputs(q, k[:, :, None], v[:, :, None], beta[:, :, None], g)
    _, found = delta_product(*inputs, qk_l2norm=True, output_final_state=True)
    state = torch.zeros(2, 4, 4).double()
    for t in range(7):
        key, value, size = k[0, t, :, :, None], v[0, t, :, None, :], beta[0, t, :, None, None]
        state, decay, write = g[0, t].exp()[:, None, None] * state, size * key @ key.mT, size * key @ value
        if exact:
            system = torch.cat([torch.cat([-decay, write], dim=2), torch.zeros(2, 4, 8)], dim=1)
            transition, written = torch.linalg.matrix_exp(system)[:, :4].split(4, dim=2)
            state = transition @ state + written
        else:
            state = torch.linalg.solve(torch.eye(4).double() + decay, state + write)
    torch.testing.assert_close(found[0], state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("phi", "activation"),
    [("silu", F.silu), ("relu", torch.relu), ("elu", lambda y: torch.where(y > 0, y + 1, y.exp()))],
)
@pytest.mark.parametrize("norm", [1, 2])
@torch.no_grad()
def test_feature_maps_and_norms(phi: str, activation: Callable, norm: int) -> None:
    """From inputs to outputs as the paper writes it: keys of either norm in the recurrence itself."""
    from feature_map import FeatureMap

    mixer = FeatureMap(small_config(use_output_gate=False, norm_eps=1e-20), phi=phi, norm=norm).double()
    for parameter in mixer.parameters():
        parameter.copy_(torch.rand_like(parameter) - 0.5)
    x = torch.randn(2, 9, 16).double()
    convolved = []
    for name in "qkv":
        weight = mixer.get_parameter(f"{name}_conv1d.weight")
        y = F.pad(mixer.get_submodule(f"{name}_proj")(x).mT, (3, 0))
        convolved.append(torch.conv1d(y, weight, groups=len(weight)).mT.unflatten(-1, (-1, 2, 8)))
    q, k = (activation(y) for y in convolved[:2])
    q, k = (y / (y.norm(p=norm, dim=-1, keepdim=True).square() + 1e-6).sqrt() for y in (q, k))
    v = F.silu(convolved[2]).reshape(2, 9, 2, 2, 16)
    beta = 2 * mixer.b_proj(x).sigmoid().unflatten(-1, (2, 2))
    g = -mixer.A_log.exp() * F.softplus(mixer.a_proj(x) + mixer.dt_bias)
    o, _ = delta_product(q[:, :, 0], k, v, beta, g)
    close(mixer(x), mixer.o_proj(mixer.o_norm(o).flatten(2)))


@torch.no_grad()
def test_recurrences_follow_their_formulas() -> None:
    """sLSTM without a stabilizer, by plain exponentials, and the full matrix as a product of matrices."""
    from recurrences import SLSTM, FullMatrix

    lstm, matrix = SLSTM(small_config()).double(), FullMatrix(small_config(), size=8).double()
    inputs = torch.randn(7, 1, 64).double()
    h, c, n = torch.zeros(3, 2, 8).double()
    state, product, full = (
        torch.zeros(1, 4, 2, 8).double(),
        torch.eye(8).double(),
        torch.zeros(1, 8, 8).double(),
    )
    for x in inputs:
        state, full = lstm.step(state, x), matrix.step(full, x)
        i, f, z, o = (x.view(2, 32) + (h[:, None] @ lstm.recurrent)[:, 0]).split(8, dim=-1)
        c, n = f.sigmoid() * c + i.exp() * z.tanh(), f.sigmoid() * n + i.exp()
        h = o.sigmoid() * c / n
        close(state[0, 0], h)
        product = (torch.eye(8).double() + x.view(8, 8) / 8**0.5) @ product
        close(matrix.read(full)[0], product.flatten() / max(1, product.norm()))


@torch.no_grad()
def test_a_mixer_without_states_generates_by_whole_passes(build, tokens, caplog):
    model = build(mixer="plain:Mean", mixer_options={"scale": 2.0})
    lengths = []
    model.model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    found = model.generate(tokens[:, :6], do_sample=False, max_new_tokens=4, pad_token_id=0)
    assert lengths == [6, 7, 8, 9]
    assert "plain:Mean keeps no states" in caplog.text
    expected = tokens[:, :6]
    for _ in range(4):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="past_key_values"):
        model(tokens, past_key_values=StaticCache(config=model.config, max_cache_len=20))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("plain", "package.module:Class"),
        ("no_such.module:Mixer", "No module named 'no_such'"),
        ("broken:Mixer", "no_such_package"),
        ("plain:Other", "has no Other"),
        ("linear_attention:LinearAttention", "'scale'"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_line(path: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        DeltaProductForCausalLM(small_config(mixer=path, mixer_options={"scale": 1.0}))
    assert "\n" not in str(caught.value)


def test_a_file_does_not_choose_what_is_imported(build: Callable, tmp_path: Path, tokens: Tensor) -> None:
    """Refused from a config, a folder and by our loader whatever the file says; permitted by name or flag."""
    model = build(**OWN["longhorn"]).float()
    folder = export_model(model, None, tmp_path / "export")
    sys.modules.pop("longhorn")
    file = folder / "config.json"
    content = json.loads(file.read_text())
    assert "mixer_permitted" not in content
    (folder / "checksums.json").unlink()
    file.write_text(json.dumps(content | {"mixer_permitted": True}))
    for build_it in (
        lambda: AutoModelForCausalLM.from_pretrained(folder),
        lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)),
        lambda: DeltaProductForCausalLM(DeltaProductConfig.from_dict(content)),
        lambda: load_model(folder),
    ):
        with pytest.raises(ValueError, match=r"mixer=longhorn:Longhorn.*trust_remote_code=true"):
            build_it()
        assert "longhorn" not in sys.modules
    for permission in ({"mixer": "longhorn:Longhorn"}, {"trust_remote_code": True}):
        for loader in (AutoModelForCausalLM, DeltaProductForCausalLM):
            loaded = loader.from_pretrained(folder, **permission)
            logits = loaded.eval()(tokens).logits
            torch.testing.assert_close(logits, model(tokens).logits, rtol=0, atol=5e-5)
            assert type(loaded.model.layers[1].attn).__name__ == "Longhorn"
