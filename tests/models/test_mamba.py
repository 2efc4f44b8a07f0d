"""Our Mamba against transformers' with the same weights; tests/kernels has the signed scan."""

import torch
from transformers import MambaConfig, MambaForCausalLM

from fla_train.models.zoo.mamba import SignedMambaConfig, SignedMambaForCausalLM


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
