"""The language models that `fla-bench train` and `generate` measure: the config's, and peers of its size."""

from collections.abc import Callable, Sequence
from importlib import import_module

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fla_train.hub.formats.fla import from_ours
from fla_train.models.build import build_model, build_model_config
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.flops import count_parameters, flops_per_token
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.models.zoo.flops import forward_flops
from fla_train.training.config import TrainConfig

Compose = Callable[[Sequence[str]], TrainConfig]  # composes a config from overrides


def _ours(config: TrainConfig) -> PreTrainedModel:
    return build_model(build_model_config(config.model))


def _transformer(config: TrainConfig) -> PreTrainedModel:
    """Return our softmax attention model with as many parameters as ours: the MLP makes up the difference."""
    peer = {"layer_types": ["full_attention"], "sliding_window": None, "mixer": None, "mixer_options": None}
    model = DeltaProductConfig.from_node({**config.model, **peer})
    missing = count_parameters(DeltaProductConfig.from_node(config.model)).body - count_parameters(model).body
    width = model.intermediate_size + missing / (3 * model.hidden_size * model.num_hidden_layers)
    model.intermediate_size = 64 * max(1, round(width / 64))
    return DeltaProductForCausalLM(model)


def _llama(config: TrainConfig) -> PreTrainedModel:
    """Return transformers' Llama with SDPA and as many parameters: its MLP makes up the difference."""
    ours = DeltaProductConfig.from_node(config.model)
    hidden, layers = ours.hidden_size, ours.num_hidden_layers
    rest = count_parameters(ours).body - layers * (4 * hidden**2 + 2 * hidden) - hidden
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=ours.vocab_size,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=ours.num_attention_heads,
            num_key_value_heads=ours.num_attention_heads,
            intermediate_size=64 * max(1, round(rest / (3 * hidden * layers) / 64)),
            max_position_embeddings=config.trainer.seq_len,
            tie_word_embeddings=ours.tie_word_embeddings,
            attn_implementation="sdpa",
        )
    )


def _fla(config: TrainConfig) -> PreTrainedModel:
    """Return flash-linear-attention's model of the same recurrence and parameters."""
    ours = DeltaProductConfig.from_node(config.model)
    ours.max_position_embeddings = config.trainer.seq_len
    content, _ = from_ours(ours, {})
    models, name = import_module("fla.models"), content["architectures"][0].removesuffix("ForCausalLM")
    return getattr(models, f"{name}ForCausalLM")(getattr(models, f"{name}Config").from_dict(content))


MODELS = {"ours": _ours, "transformer": _transformer, "llama": _llama, "fla": _fla}
COMPILED = "-compiled"  # suffix of a model's name: run it under torch.compile


def build(name: str, config: TrainConfig) -> PreTrainedModel:
    """Build one of `MODELS` on torch's default device. A name with `-compiled` compiles at the first call."""
    model = MODELS[name.removesuffix(COMPILED)](config)
    if name.endswith(COMPILED):
        model.compile()
    return model


def training_flops(name: str, model: PreTrainedModel, config: TrainConfig) -> float | None:
    """Return the FLOPs per token, forward and backward; None for fla's models.

    Our count of a recurrence is that of its chunked form. No such count of fla's kernels exists, so a
    utilization by our formula would not be comparable.
    """
    if name.removesuffix(COMPILED) == "fla":
        return None
    if isinstance(model.config, DeltaProductConfig):
        return flops_per_token(model.config, config.trainer.seq_len)
    return forward_flops(model, config.trainer.seq_len).training
