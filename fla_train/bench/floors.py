"""The least time that the parts of a training step of our models take: FLOPs and bytes over ceilings.

Elementwise work is all between matrix products and operator: convolutions, norms, SwiGLU, and casts of
weights and their gradients. Communication is the least that ZeRO-2 sends. Left out are gates, embeddings,
and what checkpointing computes again.
"""

from fla_train.bench.roofline import Ceilings, Shape, training_bound
from fla_train.models import build_config
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.flops import attention_layers, conv_channels, count_parameters
from fla_train.training.schema import TrainConfig

ADAMW_BYTES = 28  # per fp32 parameter: it, its gradient and two moments read, it and the moments written
CAST_BYTES = 12  # per fp32 weight of a bf16 product: it read, its copy written; the same of its gradient
SENT_BYTES = 4  # of an element of a gradient or a weight on its way to other ranks
STREAM_BYTES = 4  # of an element of the residual stream, which is fp32


def step_floors(
    config: TrainConfig,
    tokens: int,
    parameters: int,
    ceilings: Ceilings,
    ranks: int = 1,
    link: float | None = None,
) -> dict[str, float]:
    """Milliseconds of one rank's operator, matrix products, elementwise work, AdamW and communication.

    Args:
        tokens: of the step, on all ranks.
        link: bytes per second that a rank sends at most; None: not known.
    """
    tokens //= ranks
    model, narrow = build_config(config.model), config.trainer.precision == "bf16"
    element_size = 2 if narrow else 4
    micro_batches = tokens // (config.trainer.micro_batch_size * config.trainer.seq_len)
    shape = Shape(
        *(tokens // config.trainer.seq_len, config.trainer.seq_len),
        *(model.num_heads, model.head_dim, model.head_v_dim),
        *(model.num_householder, model.use_forget_gate, element_size),
    )
    recurrent = model.num_hidden_layers - attention_layers(model)
    weights = count_parameters(model).embedding_once
    traffic = tokens * elementwise_bytes(model, element_size)
    if narrow:
        traffic += micro_batches * CAST_BYTES * weights
    floors = {
        "operator": recurrent * training_bound(shape, ceilings),
        "matmuls": 6 * weights * tokens / ceilings.flops,
        "elementwise": traffic / ceilings.bandwidth,
    }
    if config.optimizer.name == "adamw":
        floors["optimizer"] = ADAMW_BYTES * parameters / ranks / ceilings.bandwidth
    if ranks > 1 and link is not None:
        # In a ring: gradients to their owners after each micro-batch (with overlap they go to all, twice the
        # bytes), weights to all after the step.
        passes = (micro_batches + 1) * (ranks - 1) / ranks
        floors["communication"] = passes * SENT_BYTES * parameters / link
    return {kind: 1e3 * seconds for kind, seconds in floors.items()}


def elementwise_bytes(model: DeltaProductConfig, element_size: int) -> int:
    """Bytes that a token moves between matrix products, forward and backward, activations of `element_size`.

    Each input and output crosses the memory once in each pass, gradients once, with e and s the bytes of an
    activation and of the residual stream (docs/fused_ops.md):

        convolution            5 e     x, y; x, dy, dx
        RMSNorm with gate      8 e     x, gate, y; x, gate, dy, dx, dgate      without 5 e
        SwiGLU                 9 e     gate, up, y; gate, up, dy, dgate, dup, y
        RMSNorm with residual  4 e + 5 s     update, stream, y, sum; sum, dy, dsum, dupdate, dstream
    """
    e, layers = element_size, model.num_hidden_layers
    values = model.num_heads * model.head_v_dim
    mixer = 5 * e * conv_channels(model) + (8 if model.use_output_gate else 5) * e * values
    blocks = 9 * e * model.intermediate_size * layers + mixer * (layers - attention_layers(model))
    first = 2 * e + 3 * STREAM_BYTES  # of the first norm, which nothing is added to
    return blocks + model.hidden_size * (first + 2 * layers * (4 * e + 5 * STREAM_BYTES))
