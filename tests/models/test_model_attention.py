"""Attention layers against a dense mask in fp64 and transformers' Llama and Mistral; memory and FLOPs."""

import math
from functools import partial

import pytest
import torch
from small_models import small_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.context import SequenceContext
from fla_train.models.mixers import attention as module
from fla_train.models.mixers.attention import attention, eager_attention
from fla_train.models.modeling import DeltaProductForCausalLM

LENGTH, WINDOW, DOCUMENTS = 37, 6, (9, 0, 1, 27)
KINDS = {"full_attention": None, "sliding_attention": WINDOW}
LAYOUTS = ("plain", "packed", "padded")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def config_of(*kinds: str, kv_heads: int = 2, **overrides) -> DeltaProductConfig:
    window = WINDOW if "sliding_attention" in kinds else None
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    fields = {"layer_types": list(kinds), "sliding_window": window, "num_hidden_layers": len(kinds)}
    return small_config(**(heads | fields | overrides))


def layout_of(name: str, length: int, device: str = "cpu") -> dict[str, Tensor]:
    """Return arguments of a model's forward: bounds of documents, or padding on both sides and a gap."""
    if name == "packed":
        return {"cu_seqlens": torch.tensor([0, *DOCUMENTS]).cumsum(0).int().to(device)}
    if name == "padded":
        mask = torch.ones(2, length, dtype=torch.long, device=device)
        mask[0, :7] = mask[1, -4:] = mask[1, 11] = 0
        return {"attention_mask": mask}
    return {}


def dense_attention(q: Tensor, k: Tensor, v: Tensor, kind: str, layout: str) -> Tensor:
    """With a [T, T] mask written out pair by pair."""
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    document = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
    padding = layout_of(layout, length).get("attention_mask", torch.ones(len(q), length)).bool()
    visible = torch.zeros(len(q), 1, length, length, dtype=torch.bool)
    for row in range(len(q)):
        for i in range(length):
            for j in range(i + 1):
                same = layout != "packed" or document[i] == document[j]
                near = KINDS[kind] is None or i - j < KINDS[kind]
                visible[row, 0, i, j] = (same and near and padding[row, j]) or i == j
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible.to(q.device), -torch.inf)
    return scores.softmax(-1) @ v


def inputs_and_gradient(layout: str, kv_heads: int, dtype: torch.dtype, device: str, size: int = 8):
    """q, k and v [B, H, T, D], and the gradient of the output, 0 where a query is padding."""
    generator = torch.Generator().manual_seed(2)
    batch = 1 if layout == "packed" else 2

    def draw(heads: int) -> Tensor:
        x = torch.randn(batch, LENGTH, heads, size, generator=generator, dtype=torch.float64)
        return x.to(device, dtype).transpose(1, 2)

    gradient = draw(4)
    if layout == "padded":
        gradient = gradient * layout_of(layout, LENGTH, device)["attention_mask"][:, None, :, None].to(dtype)
    return [draw(heads).requires_grad_() for heads in (4, kv_heads, kv_heads)], gradient


def check(
    kind: str,
    layout: str,
    kv_heads: int,
    dtype=torch.float64,
    device="cpu",
    size=8,
    bound=1e-12,
    run=attention,
):
    """Compare outputs at unpadded tokens, and the gradients of q, k and v, by relative error."""
    leaves, gradient = inputs_and_gradient(layout, kv_heads, dtype, device, size)
    tokens = torch.zeros(len(gradient), LENGTH, 4 * size, dtype=dtype, device=device)
    config = config_of(kind, kv_heads=kv_heads, hidden_size=4 * size)
    context = SequenceContext.build(config, tokens, **layout_of(layout, LENGTH, device))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    results = []
    for given, function in (
        (leaves, partial(run, visible=context.visible[kind])),
        (exact, partial(dense_attention, kind=kind, layout=layout)),
    ):
        o = function(*given)
        grads = torch.autograd.grad(o, given, gradient.to(o.dtype))
        results.append([(o * (gradient != 0)).detach(), *grads])
    for found, expected in zip(*results, strict=True):
        assert (found.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(("block", "kv_heads"), [(5, 4), (5, 1), (256, 1)])
@every_layout
@every_kind
def test_equals_a_dense_mask(monkeypatch, kind, layout, kv_heads, block):
    monkeypatch.setattr(module, "BLOCK", block)
    check(kind, layout, kv_heads)


@every_layout
@every_kind
def test_eager_attention_equals_a_dense_mask(kind, layout):
    check(kind, layout, 2, run=lambda *qkv, visible: eager_attention(*qkv, visible)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@every_layout
@every_kind
def test_gpu_attention_equals_a_dense_mask(kind, layout, kv_heads, dtype):
    check(kind, layout, kv_heads, dtype, "cuda", size=64, bound=1e-2 if dtype == torch.bfloat16 else 1e-5)


NAMES = {
    "embeddings": "embed_tokens",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn": "self_attn",
}


@pytest.mark.parametrize(
    ("kind", "config_class", "model_class"),
    [
        ("full_attention", LlamaConfig, LlamaForCausalLM),
        ("sliding_attention", MistralConfig, MistralForCausalLM),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_transformers(kind, config_class, model_class):
    torch.manual_seed(0)
    ours = DeltaProductForCausalLM(config_of(kind, kind, rope_theta=500.0)).eval()
    shared = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    )
    fields = {name: getattr(ours.config, name) for name in shared.split()}
    if kind == "sliding_attention":
        fields["sliding_window"] = WINDOW
    rope = {"rope_type": "default", "rope_theta": 500.0}
    theirs = model_class(config_class(**fields, rms_norm_eps=1e-6, rope_parameters=rope)).eval()
    theirs.load_state_dict(
        {
            ".".join(NAMES.get(part, part) for part in name.split(".")): x
            for name, x in ours.state_dict().items()
        }
    )
    tokens = torch.randint(31, (2, 50))
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(found):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return found


@every_layout
def test_no_mask_of_all_pairs_is_made(monkeypatch, layout):
    """In training, in the prompt's pass of generation and in a step after it."""
    monkeypatch.setattr(module, "BLOCK", 32)
    config = config_of("sliding_attention", "full_attention", hidden_act="silu")
    model, length = DeltaProductForCausalLM(config), 400
    inputs = layout_of(layout, length)
    if layout == "packed":
        inputs = {"cu_seqlens": torch.tensor([0, 30, 31, 260, length])}
    tokens = torch.randint(1, 31, (2 if layout == "padded" else 1, length))
    with LargestTensor() as largest:
        model.train()(tokens, labels=tokens, **inputs).loss.backward()
        if layout != "packed":
            model.eval().generate(tokens, **inputs, max_new_tokens=2, pad_token_id=0)
    assert largest.elements < length**2 / 2


def test_rotary_angles_are_exact_far_from_the_start():
    """As differences in fp64; fp32 would be off by 0.002."""
    config = config_of("full_attention", hidden_size=64)
    context = SequenceContext.build(config, torch.zeros(1, 40_001, 1))
    channels = context.cos.shape[1]
    angles = [40_000 * 10_000 ** (-i / channels) for i in range(channels)]
    for found, function in ((context.cos, math.cos), (context.sin, math.sin)):
        assert found[-1].tolist() == pytest.approx([function(angle) for angle in angles], abs=1e-6)
