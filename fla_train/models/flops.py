"""Count parameters, training FLOPs and training memory of a model from its config.

Parameter counts are exact. FLOPs count the algorithm's matrix products, two per multiply-add, without
recomputation. Memory is an estimate.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from fla_train.models import layer_sizes
from fla_train.models.activation_checkpointing import SELECTIVE
from fla_train.models.layer_sizes import CHUNK, CHUNK_ELEMENTS
from fla_train.models.settings import DeltaProductSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. The papers report `embedding_once`."""

    body: int  # blocks and final norm, neither embedding nor head
    embedding: int  # vocab_size * hidden_size
    tied: bool

    @property
    def embedding_once(self) -> int:
        return self.body + self.embedding

    @property
    def total(self) -> int:
        """Return the number of all parameters; the head counts unless it is tied."""
        return self.body + (1 if self.tied else 2) * self.embedding


@dataclass(frozen=True)
class TrainingMemory:
    """Estimated bytes per device while training."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  # held as the backward pass begins
    accumulates: bool  # whether gradients of earlier micro-batches exist at that time

    @property
    def total(self) -> int:
        """Return the peak, at the start of the backward pass or when gradients are copied to be reduced."""
        begin = self.activations + (self.gradients if self.accumulates else 0)
        return self.parameters + self.optimizer + max(begin, 2 * self.gradients)


def count_parameters(model: "DeltaProductSettings | PreTrainedModel") -> ParameterCount:
    """Count the parameters of any model, or of a `DeltaProductSettings` without building its model."""
    if not isinstance(model, DeltaProductSettings):
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        tied = head is None or head.weight is table
        held = sum(p.numel() for p in model.parameters())
        return ParameterCount(held - (1 if tied else 2) * table.numel(), table.numel(), tied)
    config = model
    body = _other_matmuls(config) + config.hidden_size * (2 * config.num_hidden_layers + 1)
    body += config.use_qk_norm * len(config.attention_layers) * attention_channels(config)
    if config.mixer is None:
        body += config.layer_types.count("linear_attention") * layer_sizes.parameters(config)
    else:
        body += sum(p.numel() for mixer in custom_mixers(config) for p in mixer.parameters())
    return ParameterCount(body, config.vocab_size * config.hidden_size, config.tie_word_embeddings)


def flops_per_token(config: DeltaProductSettings, seq_len: int) -> float:
    """Return the FLOPs to train on one token of a sequence of `seq_len`, forward and backward.

    Each weight of a matrix product, including the head but not the embedding, costs 2 forward and 4 backward.
    A custom mixer counts itself by `flops_per_token`; without it the weights of its linear layers count.
    """
    weights = _other_matmuls(config) + config.vocab_size * config.hidden_size
    if config.mixer is None:
        mixers = config.layer_types.count("linear_attention") * layer_sizes.training_flops(config)
    else:
        mixers = sum(_custom_mixer_flops(mixer, seq_len) for mixer in custom_mixers(config))
    return 6 * weights + mixers + attention_flops(config, seq_len)


def _custom_mixer_flops(mixer: nn.Module, seq_len: int) -> float:
    if hasattr(mixer, "flops_per_token"):
        return mixer.flops_per_token(seq_len)
    return 6 * sum(layer.weight.numel() for layer in mixer.modules() if isinstance(layer, nn.Linear))


def custom_mixers(config: DeltaProductSettings) -> list[nn.Module]:
    """Build the mixers of the linear layers, of the class `config.mixer`, on the meta device.

    Raises:
        MixerError: the class can't be used.
    """
    from fla_train.models.mixers.registry import build_mixer  # imports modeling code

    linear = [i for i, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    with torch.device("meta"):
        return [build_mixer(config, layer) for layer in linear]


def attention_flops(config: DeltaProductSettings, seq_len: int) -> float:
    """Return the FLOPs per token of softmax attention without its projections, forward and backward.

    A visible key costs 4 * hidden_size forward and twice that backward, with causality and windows.
    """
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    kinds = [kind for kind in config.layer_types if kind in windows]
    return 12 * config.hidden_size * sum(visible_keys(seq_len, windows[kind]) for kind in kinds)


def visible_keys(seq_len: int, window: int | None) -> float:
    """Return the number of keys that a token sees within its window, averaged over positions."""
    window = min(window or seq_len, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def training_memory_bytes(
    config: DeltaProductSettings,
    *,
    tokens_per_device: int,
    num_devices: int,
    element_size: int,
    gradient_checkpointing: bool | str,
    accumulates: bool,
) -> TrainingMemory:
    """Estimate a device's memory with fp32 parameters, AdamW and ZeRO-2 over `num_devices`.

    Each device has all parameters (4 bytes each) and, until they are reduced at the end of a step, all
    gradients (4); AdamW's two moments (8) are divided. Activations are the tensors that autograd keeps per
    token of the micro-batch (`tokens_per_device` = micro-batch size * seq_len) with the fused kernels, in
    `element_size` bytes under autocast, plus one chunk of logits and, without checkpointing, the cast
    weights. Fragmentation and communication buffers are not included. Runs of 340M and 1.3B parameters on an
    H100 used 1% less to 2% more. Without the fused kernels expect up to twice as much. Narrow heads in
    float32, for which a GPU runs the recurrence step by step, keep a state per Householder step instead of
    one per chunk.
    """
    count = count_parameters(config)
    parameters = count.total
    layers, hidden = config.num_hidden_layers, config.hidden_size
    recurrent = _kept_by_recurrence(config)
    # q, k (also before their norm), v, the output and log-sum-exps in fp32
    attention = (2 + config.use_qk_norm) * attention_channels(config) + 2 * config.num_attention_heads
    stream = hidden * (4 if config.residual_in_fp32 else element_size)
    rest = element_size * (2 * hidden + 2 * config.intermediate_size) + 2 * stream
    per_layer = [
        rest + element_size * (recurrent if layer == "linear_attention" else attention)
        for layer in config.layer_types
    ]
    kept = max(per_layer) + layers * stream if gradient_checkpointing else sum(per_layer)
    if gradient_checkpointing == SELECTIVE:
        kept += element_size * sum(_product_outputs(config, layer) for layer in config.layer_types)
    logits = min(tokens_per_device * config.vocab_size, CHUNK_ELEMENTS)
    head = 2 * 4 * logits + 4 * config.vocab_size * hidden + 2 * element_size * tokens_per_device * hidden
    weights = 0 if gradient_checkpointing else element_size * count.body
    return TrainingMemory(
        parameters=4 * parameters,
        gradients=4 * parameters,
        optimizer=8 * parameters // num_devices,
        activations=tokens_per_device * kept + weights + head,
        accumulates=accumulates,
    )


def _kept_by_recurrence(config: DeltaProductSettings) -> int:
    """Count the elements per token that the mixer of a linear layer keeps for the backward pass."""
    value_size = config.value_heads * config.head_v_dim
    n, k, v = config.num_householder, config.head_dim, config.head_v_dim
    # The operator keeps T, the scores P, a state per chunk and the output; the corrected values replace v.
    operator = config.value_heads * (n * (CHUNK + k * v // CHUNK) + CHUNK) + value_size
    operator += (config.value_heads - config.num_heads) * k * (1 + n)  # q and k, repeated
    channels = layer_sizes.conv_channels(config)
    return 2 * channels + operator + value_size * (1 + 2 * config.use_output_gate)


def _product_outputs(config: DeltaProductSettings, layer: str) -> int:
    """Count the outputs of a layer's matrix products per token."""
    if layer == "linear_attention":
        gate = config.use_output_gate * config.value_heads * config.head_v_dim
        mixer = layer_sizes.projected_channels(config) + gate
    else:
        mixer = 2 * attention_channels(config)
    return mixer + 2 * config.intermediate_size + 2 * config.hidden_size


def _other_matmuls(config: DeltaProductSettings) -> int:
    """Count the elements of the weight matrices of all blocks, without the mixers of linear layers."""
    hidden = config.hidden_size
    total = config.num_hidden_layers * 3 * hidden * config.intermediate_size
    return total + len(config.attention_layers) * 2 * hidden * attention_channels(config)


def attention_channels(config: DeltaProductSettings) -> int:
    """Return the channels of q and k of an attention layer, which equal those of v and output."""
    kv_size = config.hidden_size * config.num_key_value_heads // config.num_attention_heads
    return config.hidden_size + kv_size
