"""Our Mamba against transformers' (weights carried over) and, with signed transitions, against a loop."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from fla_train.models.zoo.mamba import (
    SignedMambaConfig,
    SignedMambaForCausalLM,
    SignedMambaMixer,
)


def test_with_eigenvalues_in_0_1_it_is_mamba() -> None:
    torch.manual_seed(0)
    config = SignedMambaConfig(vocab_size=17, hidden_size=32, num_hidden_layers=2)
    ours = SignedMambaForCausalLM(config).eval()
    theirs = MambaForCausalLM(
        MambaConfig(
            vocab_size=17, hidden_size=32, num_hidden_layers=2, state_size=16, expand=2, conv_kernel=4,
            use_bias=False, tie_word_embeddings=False, residual_in_fp32=False,
        )
    ).eval()  # fmt: skip
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(17, (3, 29))
    with torch.no_grad():
        expected = theirs(input_ids=ids, use_cache=False, labels=ids)
        found = ours(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.loss, expected.loss)


def test_a_bf16_model_computes_the_scan_in_fp32() -> None:
    torch.manual_seed(2)
    model = SignedMambaForCausalLM(
        SignedMambaConfig(vocab_size=17, hidden_size=32, num_hidden_layers=2, allow_neg_eigval=True)
    ).to(torch.bfloat16)  # fmt: skip
    ids = torch.randint(17, (2, 9))
    with torch.no_grad():
        found, expected = model(ids).logits, model.float()(ids).logits
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.05)


def loop(mixer: SignedMambaMixer, x: Tensor) -> Tensor:
    """The mixer with negative eigenvalues, one state entry at a time in Python floats' precision."""
    config, weights = mixer.config, {name: p.detach() for name, p in mixer.named_parameters()}
    rank, size = config.time_step_rank, config.state_size
    u, z = (x @ weights["in_proj.weight"].T).chunk(2, -1)
    padded = F.pad(u, (0, 0, config.conv_kernel - 1, 0))
    kernel = weights["conv1d.weight"][:, 0]
    conv = sum(padded[:, j : j + x.shape[1]] * kernel[:, j] for j in range(config.conv_kernel))
    u = F.silu(conv + weights["conv1d.bias"])
    low, b, c = (u @ weights["x_proj.weight"].T).split([rank, size, size], -1)
    dt = F.softplus(low @ weights["dt_proj.weight"].T + weights["dt_proj.bias"])
    rate = weights["A_log"].exp()
    state, outputs = torch.zeros(len(x), *rate.shape, dtype=x.dtype), []
    for t in range(x.shape[1]):
        decay = 2 * torch.exp(-dt[:, t, :, None] * rate) - 1
        state = decay * state + (dt[:, t] * u[:, t])[..., None] * b[:, t, None, :]
        outputs.append((state * c[:, t, None, :]).sum(-1) + weights["D"] * u[:, t])
    return (torch.stack(outputs, 1) * F.silu(z)) @ weights["out_proj.weight"].T


def test_with_negative_eigenvalues_it_is_the_signed_recurrence() -> None:
    torch.manual_seed(1)
    mixer = SignedMambaForCausalLM(
        SignedMambaConfig(vocab_size=5, hidden_size=16, num_hidden_layers=1, allow_neg_eigval=True)
    ).double().backbone.layers[0].mixer  # fmt: skip
    mixer.dt_proj.bias.data += 3  # large time steps: transitions below 0
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    torch.testing.assert_close(mixer(x), loop(mixer, x))
