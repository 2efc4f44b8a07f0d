"""Parameters and training FLOPs of one DeltaProduct mixer, and sizes of chunks."""

from fla_train.models.settings import DeltaProductSettings

CHUNK = 64  # M: Householder steps (tokens x n_h) per chunk of the operator
CHUNK_ELEMENTS = 2**25  # logits held at once by the loss, at 8 bytes each


def matmul_weights(config: DeltaProductSettings) -> int:
    """Count the elements of the mixer's weight matrices."""
    n, v = config.num_householder, config.head_v_dim
    by_value_head = n * (v + 1) + config.use_forget_gate + v * config.use_output_gate + v
    return config.hidden_size * (_key_channels(config) + config.value_heads * by_value_head)


def parameters(config: DeltaProductSettings) -> int:
    """Count all parameters of the mixer."""
    rest = config.head_v_dim + 2 * config.value_heads * config.use_forget_gate
    return matmul_weights(config) + rest + config.conv_size * conv_channels(config)


def training_flops(config: DeltaProductSettings) -> float:
    """Return the FLOPs per token, forward and backward.

    An element of a weight matrix costs 2 forward and 4 backward.
    """
    operator = sum(operator_flops(config.num_householder, config.head_dim, config.head_v_dim))
    convolution = 6 * config.conv_size * conv_channels(config)
    return 6 * matmul_weights(config) + config.value_heads * operator + convolution


def operator_flops(n: int, k: int, v: int, m: int = CHUNK) -> tuple[float, float]:
    """Return the operator's FLOPs per token and value head, of the forward and of the backward pass.

    Matrix products count as dense, for K x V states, n = n_h and chunks of M Householder steps:

        K K^T                 2 n M K        Q K^T    2 M K
        K S                   2 n K V        Q S      2 K V
        (I + L)^-1            n M^2 / 3      P U      2 M V
        (I + L)^-1 (V - K S)  2 n M V
        K^T U                 2 n K V        in all   n [2M(K + V) + 4KV + M^2/3] + 2KV + 2M(K + V)

    The right column is the query's side, whose rows are tokens instead of Householder steps. The backward
    pass reads the kept inverse T = (I + L)^-1 and state S of each chunk. Per step: K S, K dS, U dS^T, dV S^T
    and K^T dV (10 K V); T (V - K S), T^T dU and dV U^T (6 M V); the gradient of K K^T times K (2 M K). Per
    token: dO S^T and Q^T dO (4 K V); Q K^T, dP K and dP^T Q (6 M K); P^T dO and dO U^T (4 M V).
    """
    forward = n * (2 * m * (k + v) + 4 * k * v + m * m / 3) + 2 * k * v + 2 * m * (k + v)
    backward = n * (10 * k * v + 6 * m * v + 2 * m * k) + 4 * k * v + 6 * m * k + 4 * m * v
    return forward, backward


def conv_channels(config: DeltaProductSettings) -> int:
    """Return the channels of q, k and v with a short convolution, 0 without it."""
    return projected_channels(config) if config.use_short_conv else 0


def projected_channels(config: DeltaProductSettings) -> int:
    """Return the channels of q, k and v."""
    return _key_channels(config) + config.value_heads * config.num_householder * config.head_v_dim


def _key_channels(config: DeltaProductSettings) -> int:
    """Return the channels of q and k."""
    return config.num_heads * config.head_dim * (1 + config.num_householder)
