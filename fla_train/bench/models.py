"""The language models that `fla-bench train` measures: ours, and peers of the same sizes."""

from collections.abc import Callable
from importlib import import_module

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fla_train.models import build_config
from fla_train.models.flops import count_parameters, flops_per_token
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.training.config import TrainConfig


def _ours(config: TrainConfig) -> PreTrainedModel:
    return DeltaProductForCausalLM(build_config(config.model))


def _transformer(config: TrainConfig) -> PreTrainedModel:
    """Transformer++ of our family, of as many parameters: the MLP takes up the difference."""
    ours = build_config(config.model)
    same = build_config({**config.model, "layer_types": ["full_attention"]})
    missing = count_parameters(ours).body - count_parameters(same).body
    width = same.intermediate_size + missing / (3 * same.hidden_size * same.num_hidden_layers)
    same.intermediate_size = 64 * max(1, round(width / 64))
    return DeltaProductForCausalLM(same)


def _llama(config: TrainConfig) -> PreTrainedModel:
    """transformers' Llama with SDPA, of as many parameters: its MLP takes up the difference."""
    ours = build_config(config.model)
    hidden, layers = ours.hidden_size, ours.num_hidden_layers
    rest = count_parameters(ours).body - layers * (4 * hidden**2 + 2 * hidden) - hidden
    width = 64 * max(1, round(rest / (3 * hidden * layers) / 64))
    settings = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=ours.num_attention_heads,
        num_key_value_heads=ours.num_attention_heads,
        intermediate_size=width,
        max_position_embeddings=config.trainer.seq_len,
        tie_word_embeddings=ours.tie_word_embeddings,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(settings)


def _fla(config: TrainConfig) -> PreTrainedModel:
    """flash-linear-attention's model of the same recurrence and the same parameters.

    What our config does not name keeps that package's defaults.
    """
    models = import_module("fla.models")
    ours = build_config(config.model)
    kind = "DeltaNet" if not ours.use_forget_gate else "GatedDeltaNet"
    common = {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.hidden_size,
        "num_hidden_layers": ours.num_hidden_layers,
        "num_heads": ours.num_heads,
        "intermediate_size": ours.intermediate_size,
        "max_position_embeddings": config.trainer.seq_len,
    }
    if ours.use_forget_gate or ours.num_householder > 1:
        common |= {"head_dim": ours.head_dim, "expand_v": ours.head_v_dim / ours.head_dim}
    if ours.num_householder > 1:
        kind = "GatedDeltaProduct"
        common |= {
            "use_output_gate": ours.use_output_gate,
            "num_householder": ours.num_householder,
            "use_forget_gate": ours.use_forget_gate,
            "allow_neg_eigval": ours.allow_neg_eigval,
        }
    else:
        common["use_gate"] = ours.use_output_gate
    return getattr(models, f"{kind}ForCausalLM")(getattr(models, f"{kind}Config")(**common))


MODELS: dict[str, Callable[[TrainConfig], PreTrainedModel]] = {
    "ours": _ours,
    "transformer": _transformer,
    "llama": _llama,
    "fla": _fla,
}
COMPILED = "-compiled"  # after a model's name: run by torch.compile
NAMES = [*MODELS, *(f"{name}{COMPILED}" for name in MODELS)]


def build(name: str, config: TrainConfig) -> PreTrainedModel:
    """The model of one of `NAMES`, on torch's default device; a compiled one compiles at its first call."""
    model = MODELS[name.removesuffix(COMPILED)](config)
    if name.endswith(COMPILED):
        model.compile()
    return model


def training_flops(name: str, model: PreTrainedModel, config: TrainConfig) -> float:
    """FLOPs per token, forward and backward.

    Ours by its formula; of a peer 6 per parameter outside its embedding, and for attention 12 per channel and
    visible key.
    """
    name = name.removesuffix(COMPILED)
    if name == "ours":
        return flops_per_token(model.config, config.trainer.seq_len)
    count = count_parameters(model)
    flops = 6.0 * (count.body + count.embedding)
    if name == "llama":
        keys = (config.trainer.seq_len + 1) / 2
        flops += 12 * model.config.hidden_size * keys * model.config.num_hidden_layers
    return flops
