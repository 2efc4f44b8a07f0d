"""Parameters and training FLOPs of one DeltaProduct mixer, and sizes of chunks."""

from fla_train.models.configuration import DeltaProductConfig

CHUNK = 64  # M: Householder steps (tokens x n_h) per chunk of the operator
CHUNK_ELEMENTS = 2**25  # logits held at once by the loss, at 8 bytes each


def matmul_weights(config: DeltaProductConfig) -> int:
    """Count the elements of the mixer's weight matrices."""
    n, v = config.num_householder, config.head_v_dim
    by_value_head = n * (v + 1) + config.use_forget_gate + v * config.use_output_gate + v
    return config.hidden_size * (_key_channels(config) + config.value_heads * by_value_head)


def parameters(config: DeltaProductConfig) -> int:
    """Count all parameters of the mixer."""
    rest = config.head_v_dim + 2 * config.value_heads * config.use_forget_gate
    return matmul_weights(config) + rest + config.conv_size * conv_channels(config)


def training_flops(config: DeltaProductConfig) -> float:
    """Return the FLOPs per token, forward and backward.

    An element of a weight matrix costs 2 forward and 4 backward. The operator costs, per value head, with K x
    V states, n = num_householder and chunks of M Householder steps (dense tiles, states and T kept):

        forward   n [2M(K + V) + 4KV + M^2/3] + 2KV + 2M(K + V)
        backward  n [10KV + 6MV + 2MK] + 4KV + 6MK + 4MV
    """
    n, k, v, m = config.num_householder, config.head_dim, config.head_v_dim, CHUNK
    forward = n * (2 * m * (k + v) + 4 * k * v + m * m / 3) + 2 * k * v + 2 * m * (k + v)
    backward = n * (10 * k * v + 6 * m * v + 2 * m * k) + 4 * k * v + 6 * m * k + 4 * m * v
    convolution = 6 * config.conv_size * conv_channels(config)
    return 6 * matmul_weights(config) + config.value_heads * (forward + backward) + convolution


def conv_channels(config: DeltaProductConfig) -> int:
    """Return the channels of q, k and v with a short convolution, 0 without it."""
    return projected_channels(config) if config.use_short_conv else 0


def projected_channels(config: DeltaProductConfig) -> int:
    """Return the channels of q, k and v."""
    return _key_channels(config) + config.value_heads * config.num_householder * config.head_v_dim


def _key_channels(config: DeltaProductConfig) -> int:
    """Return the channels of q and k."""
    return config.num_heads * config.head_dim * (1 + config.num_householder)
