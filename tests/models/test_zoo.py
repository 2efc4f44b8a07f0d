"""Other libraries' models: built from a node, and their loss."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from fla_train.cli.app import compose
from fla_train.models.build import build_model, build_model_config, build_on_meta, model_node
from fla_train.models.flops import count_parameters
from fla_train.models.zoo.flops import forward_flops
from fla_train.models.zoo.loss import HEADS
from fla_train.training.config import register, to_config

VOCABULARY = 211


def node(model_type: str, source: str = "hf", **config: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2}
    return {"source": source, "model_type": model_type, "config": sizes | config, "vocab_size": VOCABULARY}


ATTENTION = {"num_attention_heads": 4, "intermediate_size": 96}
DELTA = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
DELTA |= {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
NEXT = ATTENTION | DELTA | {"head_dim": 16, "num_key_value_heads": 2, "full_attention_interval": 2}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2}
NODES = {
    "llama": node("llama", **ATTENTION),
    "mamba": node("mamba"),
    "mamba2": node("mamba2", num_heads=4, head_dim=32, n_groups=1, state_size=16, chunk_size=16),
    "xlstm": node("xlstm", num_heads=4, autocast_kernel_dtype="float32"),  # its logits have a soft cap
    "qwen3_next": node("qwen3_next", num_experts=0, **NEXT),
    "olmo_hybrid": node("olmo_hybrid", **ATTENTION),
    "signed_mamba": node("signed_mamba", "fla_train", allow_neg_eigval=True),
    "experts": node(
        *("qwen3_next", "hf"),
        **(NEXT | EXPERTS | {"num_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}),
    ),
    "scale": node("granite", logits_scaling=4.0, **ATTENTION),
    "cap": node("gemma2", head_dim=16, final_logit_softcapping=2.0, **ATTENTION),
    "unknown": node(
        *("falcon_h1", "hf"),
        **(ATTENTION | {"num_key_value_heads": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}),
        **{"mamba_n_groups": 1, "mamba_d_state": 16, "lm_head_multiplier": 0.5},
    ),
    "unknown_experts": node(
        *("granitemoe", "hf"),
        **(ATTENTION | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}),
        **{"num_key_value_heads": 2, "router_aux_loss_coef": 0.5, "logits_scaling": 4.0},
    ),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(build_model_config(NODES[name])).train()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # a soft cap matters
    return model


CHECKED = {node["model_type"] for node in NODES.values()} | {"gated_deltanet"}  # the latter is of fla
OF_TRANSFORMERS = sorted(HEADS.keys() & CONFIG_MAPPING_NAMES.keys() - CHECKED)


@pytest.mark.parametrize("model_type", OF_TRANSFORMERS)
@torch.no_grad()
def test_heads_are_those_of_the_classes(model_type: str) -> None:
    """Each entry of the table against the logits of transformers' class, large enough for a soft cap."""
    config = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])()
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 96, "head_dim": 16, "num_key_value_heads": 4, "pad_token_id": 0}
    sizes |= {"moe_intermediate_size": 32}
    sizes |= {"layer_types": None, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    for name, value in sizes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](type(config)(**config.to_diff_dict())).eval()
    model.get_output_embeddings().weight.mul_(30)
    ids, change = torch.randint(VOCABULARY, (1, 9)), HEADS[model_type]
    logits = model.get_output_embeddings()(model.base_model(ids, use_cache=False)[0])
    expected = logits if change is None else change(logits, model.config)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)


class LogitsSeen(TorchDispatchMode):
    """For how many tokens at once an operator returned logits; [64, vocabulary] is the head's weight."""

    tokens = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        for tensor in tree_leaves(out):
            shape = tensor.shape if isinstance(tensor, Tensor) else ()
            if len(shape) > 1 and shape[-1] == VOCABULARY and shape != (64, VOCABULARY):
                self.tokens = max(self.tokens, tensor.numel() // VOCABULARY)
        return out


@pytest.mark.parametrize("name", NODES)
def test_the_loss_is_the_classs_own_without_all_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("loss", "zoo.loss"):
        monkeypatch.setattr(f"fla_train.models.{module}.CHUNK_ELEMENTS", 8 * VOCABULARY)
    model = build(name)
    ids = torch.randint(VOCABULARY, (2, 33))
    labels = torch.where(torch.rand(2, 33) < 0.5, ids, -100)
    losses, gradients = [], []
    for forward in (model, lambda **inputs: type(model).__bases__[1].forward(model, **inputs)):
        with LogitsSeen() as seen:
            loss = forward(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
        losses.append(loss.item())
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
        if forward is model and "unknown" not in name:
            assert seen.tokens <= 16  # a chunk of 8 on the CPU, twice as many in place of fp32 copies
    assert seen.tokens == 66
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    largest = max(g.abs().max().item() for g in gradients[1].values())
    for key, expected in gradients[1].items():
        torch.testing.assert_close(gradients[0][key], expected, rtol=1e-3, atol=1e-5 * largest)

    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    expected = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    torch.testing.assert_close(model.token_losses(ids).flatten(), expected, rtol=1e-4, atol=1e-4)


def test_documents_that_positions_pack_are_kept_apart() -> None:
    """By our loss and by the class's own logits, also after a pass over whole rows."""
    model = build("llama")
    ids = torch.randint(VOCABULARY, (1, 24))
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None]
    second = torch.where(torch.arange(24) > 9, ids, -100)
    alone = model(input_ids=ids[:, 9:], labels=ids[:, 9:], use_cache=False).loss
    by_name = model(input_ids=ids, labels=second, position_ids=positions, use_cache=False).loss
    by_place = model(ids, None, positions, labels=second, use_cache=False).loss
    torch.testing.assert_close([by_name, by_place], [alone, alone])
    model.eval()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits[:, 9:], model(input_ids=ids[:, 9:], use_cache=False).logits)


@pytest.mark.parametrize("name", ["experts", "unknown", "unknown_experts"])
def test_micro_batches_add_up(name: str) -> None:
    """With the number of targets of the whole batch, the load balancing loss included."""
    model = build(name)
    ids = torch.randint(VOCABULARY, (1, 33))
    labels = torch.where(torch.rand(1, 33) < 0.5, ids, -100)
    inputs = {"input_ids": ids, "labels": labels, "use_cache": False}
    count = (labels[:, 1:] != -100).sum()
    whole, half = (model(**inputs, num_items_in_batch=n).loss for n in (count, 2 * count))
    torch.testing.assert_close(2 * half, whole)


@pytest.mark.parametrize("name", ["llama", "scale", "unknown", "experts"])  # one of each kind of head
@pytest.mark.parametrize("items", [None, torch.tensor(0)])
def test_a_batch_without_targets_has_loss_zero(name: str, items: Tensor | None) -> None:
    model = build(name)
    ids = torch.randint(VOCABULARY, (2, 9))
    labels = torch.full_like(ids, -100)
    loss = model(input_ids=ids, labels=labels, num_items_in_batch=items, use_cache=False).loss
    loss.backward()
    assert loss == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", NODES)
def test_a_node_follows_from_the_config(name: str) -> None:
    config = build_model_config(NODES[name])
    assert build_model_config(model_node(config)).to_dict() == config.to_dict()


# (recurrent layers, heads, K, V, whether the state is read before it is written, as the delta rule does)
RECURRENT = {
    "mamba": (2, 128, 16, 1, False),
    "mamba2": (2, 4, 16, 32, False),
    "xlstm": (2, 4, 8, 16, False),
    "qwen3_next": (1, 2, 16, 16, True),
    "olmo_hybrid": (1, 4, 12, 24, True),
    "signed_mamba": (2, 128, 16, 1, False),
}


@pytest.mark.parametrize("name", ["llama", *RECURRENT])
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    """The counter sees each product that is computed: of attention those that causality masks, too."""
    model, length = build(name).eval(), 64
    if name not in ("xlstm", "signed_mamba"):
        model.set_attn_implementation("eager")
    with FlopCounterMode(display=False, depth=99) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    counts = counter.get_flop_counts()
    found = forward_flops(build_on_meta(NODES[name]), length)
    bmm, convolution = torch.ops.aten.bmm, torch.ops.aten.convolution
    products = {op: count / length for op, count in counts["Global"].items() if op is not bmm}
    products[convolution] = products.get(convolution, 0) * length / (length + 3)  # padded by 3 tokens
    assert found.projections == pytest.approx(sum(products.values()))
    attention = sum(c[bmm] for key, c in counts.items() if key.endswith("self_attn")) / length
    assert found.attention == pytest.approx(attention * (length + 1) / (2 * length))
    if name == "llama":
        with FlopCounterMode(display=False) as trained:
            model(torch.zeros(1, length, dtype=torch.int64), use_cache=False).logits.sum().backward()
        ratio = trained.get_total_flops() / counter.get_total_flops()
        assert found.training == pytest.approx(ratio * (found.projections + found.attention))

    layers, heads, k, v, reads_first = RECURRENT.get(name, (0, 0, 0, 0, False))
    state, key, value = torch.ones(heads, k, v), torch.ones(heads, 1, k), torch.ones(heads, 1, v)
    with FlopCounterMode(display=False) as counter:
        error = value - key @ state if reads_first else value
        key @ (state + key.mT @ error)
    assert found.recurrences == layers * counter.get_total_flops()


def test_flops_of_a_token_s_experts() -> None:
    """Two of four and a shared one in each block; the dense model has an MLP of 96 channels there."""
    dense, experts = (forward_flops(build_on_meta(NODES[name]), 64) for name in ("qwen3_next", "experts"))
    expert, routers = 2 * 3 * 64 * 32, 2 * 64 * (4 + 1)
    assert experts.projections - dense.projections == 2 * (3 * expert + routers - 3 * expert)
    assert experts.attention == dense.attention


def test_nothing_crosses_the_bounds_of_documents() -> None:
    model = build("llama").eval()
    ids, bounds = torch.randint(VOCABULARY, (1, 24)), [0, 9, 10, 24]
    inputs = {"input_ids": ids, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    packed, logits = model.token_losses(**inputs), model(**inputs, use_cache=False).logits
    for start, stop in pairwise(bounds):
        torch.testing.assert_close(packed[:, start : stop - 1], model.token_losses(ids[:, start:stop]))
        torch.testing.assert_close(logits[:, start:stop], model(input_ids=ids[:, start:stop]).logits)
    inputs |= {"labels": ids, "num_items_in_batch": torch.tensor(7), "use_cache": False}
    torch.testing.assert_close(model(**inputs).loss, model.train()(**inputs).loss)
    assert model.keeps_documents_apart() and not build("mamba2").keeps_documents_apart()
    blind = node("mpt", n_layers=2, n_heads=4)  # it takes no positions
    assert not build_model(build_model_config(blind)).keeps_documents_apart()


@pytest.mark.parametrize("name", ["llama", "mamba", "mamba2", "xlstm", "qwen3_next", "olmo_hybrid"])
def test_the_340m_are_of_one_size(name: str) -> None:
    """With the 32,000 tokens of the papers' tokenizer."""
    register()
    config = to_config(compose("train", [f"model=hf/{name}/340m", "model.vocab_size=32000"]))
    assert 320e6 < count_parameters(build_on_meta(config.model)).total < 400e6
