"""Roofline: FLOPs and bytes of the operator and of a training step, and the least time they take on a device.

Counts of the operator are per token and head. n is n_h, K and V the head dims, M the Householder steps of a
chunk (C = M / n tokens), e the bytes of an element of q, k and v. Two FLOPs are one multiply-add;
matrix products count as dense, though half of a causal one is zero; elementwise work is left out.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fla_train.models import build_config
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.flops import attention_channels, attention_flops, count_parameters, stream_bytes
from fla_train.models.layer_sizes import conv_channels
from fla_train.training.config import TrainConfig
from fla_train.utils.throughput import peak_flops

CHUNK = 64  # M
GATE_BYTES = 4  # of an element of beta and g, which are fp32

# Bytes per second of the memory, from NVIDIA's data sheets of the SXM modules (A100: the one of 80 GB). A
# device's name holds the first part that matches.
BANDWIDTH = (("H200", 4.8e12), ("H100", 3.35e12), ("A100", 2.039e12))
# Bytes per second that a GPU sends by NVLink: half of what the same sheets give for both directions.
LINK = (("H200", 4.5e11), ("H100", 4.5e11), ("A100", 3e11))
# The same chips in other modules, whose memory and links differ: an "A100-PCIE-40GB", a "GH200".
OTHER_MODULES = re.compile(r"PCIe|NVL|GH200", re.IGNORECASE)
ADAMW_BYTES = 28  # per fp32 parameter: it, its gradient and two moments read, it and the moments written
CAST_BYTES = 12  # per fp32 weight of a bf16 product: it read, its copy written; the same of its gradient
SENT_BYTES = {"fp32": 4, "bf16": 2}  # of an element on its way to other ranks; weights are fp32


@dataclass(frozen=True)
class Shape:
    """Sizes of one call of the operator."""

    batch: int
    tokens: int
    heads: int  # of v
    key_dim: int
    value_dim: int
    num_householder: int  # n_h
    gated: bool
    element_size: int = 2  # bytes, of q, k, v and o
    group: int = 1  # heads of v that share a head of q and k

    @property
    def token_heads(self) -> int:
        """Batch x tokens x heads: what times and counts are given per."""
        return self.batch * self.tokens * self.heads

    @property
    def input_bytes(self) -> float:
        """Bytes of q, k and v, per token and head."""
        n, k, v = self.num_householder, self.key_dim / self.group, self.value_dim
        return self.element_size * (k + n * (k + v))


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at most."""

    flops: float  # FLOP/s of matrix products
    bandwidth: float  # bytes/s, read and written together
    source: str  # where the two come from

    def seconds(self, flops: float, traffic: float) -> float:
        """Least time of `flops` FLOPs and `traffic` bytes: the longer of the two, which may overlap."""
        return max(flops / self.flops, traffic / self.bandwidth)


def forward_flops(shape: Shape, chunk: int = CHUNK) -> float:
    """FLOPs of a forward pass, per token and head.

        K K^T                 2 n M K        Q K^T    2 M K
        K S                   2 n K V        Q S      2 K V
        (I + L)^-1            n M^2 / 3      P U      2 M V
        (I + L)^-1 (V - K S)  2 n M V
        K^T U                 2 n K V        in all   n [2M(K + V) + 4KV + M^2/3] + 2KV + 2M(K + V)

    The right column is the query's side, whose rows are tokens instead of Householder steps.
    """
    n, k, v, m = shape.num_householder, shape.key_dim, shape.value_dim, chunk
    per_step = 2 * m * (k + v) + 4 * k * v + m * m / 3
    return n * per_step + 2 * k * v + 2 * m * (k + v)


def backward_flops(shape: Shape, chunk: int = CHUNK) -> float:
    """FLOPs of a backward pass that finds the inverse T = (I + L)^-1 and each chunk's state S kept.

    Per step K S, K dS, U dS^T, dV S^T and K^T dV (10 K V); T (V - K S), T^T dU and dV U^T (6 M V); the
    gradient of K K^T times K (2 M K). Per token dO S^T and Q^T dO (4 K V); Q K^T, dP K and dP^T Q (6 M K);
    P^T dO and dO U^T (4 M V).
    """
    n, k, v, m = shape.num_householder, shape.key_dim, shape.value_dim, chunk
    return n * (10 * k * v + 6 * m * v + 2 * m * k) + 4 * k * v + 6 * m * k + 4 * m * v


def forward_bytes(shape: Shape, *, keep: bool) -> float:
    """Bytes that a forward pass must read and write, per token and head: e (K + nK + nV + V), and the gates.

    With grouped heads K stands for K / group here, and in `backward_bytes`.

    Args:
        keep: also write what the backward pass reads: the inverses (n M) and a state per chunk (n K V / M).
    """
    traffic = shape.input_bytes + shape.element_size * shape.value_dim + _gates(shape)
    return traffic + _kept(shape) if keep else traffic


def backward_bytes(shape: Shape) -> float:
    """Bytes of a backward pass: q, k, v and dO read, dq, dk and dv written, e (2K + V + 2nK + 2nV); the gates
    and their gradients; what the forward pass kept."""
    traffic = 2 * shape.input_bytes + shape.element_size * shape.value_dim
    return traffic + 2 * _gates(shape) + _kept(shape)


def _gates(shape: Shape) -> int:
    return GATE_BYTES * (shape.num_householder + shape.gated)


def _kept(shape: Shape) -> float:
    return shape.element_size * shape.num_householder * (CHUNK + shape.key_dim * shape.value_dim / CHUNK)


def forward_bound(shape: Shape, ceilings: Ceilings) -> float:
    """Least seconds of a forward pass that keeps nothing, over the whole shape."""
    return shape.token_heads * ceilings.seconds(forward_flops(shape), forward_bytes(shape, keep=False))


def training_bound(shape: Shape, ceilings: Ceilings) -> float:
    """Least seconds of a forward pass that keeps inverses and states, and the backward pass after it."""
    forward = ceilings.seconds(forward_flops(shape), forward_bytes(shape, keep=True))
    return shape.token_heads * (forward + ceilings.seconds(backward_flops(shape), backward_bytes(shape)))


def step_roofline(
    config: TrainConfig,
    tokens: int,
    parameters: int,
    ceilings: Ceilings,
    ranks: int = 1,
    link: float | None = None,
) -> dict[str, float]:
    """Least milliseconds of a training step on one rank, by kind of work (`breakdown.KINDS`).

    Elementwise work is all between matrix products and operator: convolutions, norms, SwiGLU, and casts of
    weights and their gradients. Communication is the least that ZeRO-2 sends. Gates, embeddings and what
    activation checkpointing recomputes are left out.

    Args:
        tokens: of the step, on all ranks.
        link: bytes per second that a rank sends at most; None: not known.
    """
    tokens //= ranks
    length = config.trainer.seq_len // config.launch.context_parallel  # of a row, on a rank
    model, narrow = build_config(config.model), config.trainer.autocasts
    element_size = 2 if narrow else 4
    micro_batches = tokens // (config.trainer.micro_batch_size * length)
    shape = Shape(
        *(tokens // length, length),
        *(model.value_heads, model.head_dim, model.head_v_dim),
        *(model.num_householder, model.use_forget_gate, element_size),
    )
    recurrent = model.num_hidden_layers - len(model.attention_layers)
    weights = count_parameters(model).embedding_once
    products, head = weights, model.vocab_size * model.hidden_size
    if config.trainer.precision == "fp8":
        products = head + (weights - head) / 2  # at twice the rate
    traffic = tokens * elementwise_bytes(model, element_size)
    if narrow:
        traffic += micro_batches * CAST_BYTES * weights
    seconds_of = {
        "operator": recurrent * training_bound(shape, ceilings)
        + tokens * attention_flops(model, config.trainer.seq_len) / ceilings.flops,
        "matmuls": 6 * products * tokens / ceilings.flops,
        "elementwise": traffic / ceilings.bandwidth,
    }
    if config.optimizer.name == "adamw":
        seconds_of["optimizer"] = ADAMW_BYTES * parameters / ranks / ceilings.bandwidth
    if ranks > 1 and link is not None:
        # In a ring: gradients to their owners once, or with overlap to all (twice the bytes) after each
        # micro-batch, weights to all after the step.
        reductions = 2 * micro_batches if config.launch.overlap_communication else 1
        sent = reductions * SENT_BYTES[config.trainer.gradient_reduction] + SENT_BYTES["fp32"]
        seconds_of["communication"] = (ranks - 1) / ranks * sent * parameters / link
    return {kind: 1e3 * seconds for kind, seconds in seconds_of.items()}


def elementwise_bytes(model: DeltaProductConfig, element_size: int) -> int:
    """Bytes that a token moves between matrix products, forward and backward, activations of `element_size`.

    Each input and output crosses the memory once in each pass, gradients once, with e and s the bytes of an
    activation and of the residual stream (docs/dev/fused_ops.md):

        convolution            5 e     x, y; x, dy, dx
        RMSNorm with gate      8 e     x, gate, y; x, gate, dy, dx, dgate      without 5 e
        rotary                 4 e     q, k, both rotated; their gradients, both turned back
        norm of q and k        5 e     as RMSNorm without gate
        SwiGLU                 9 e     gate, up, y; gate, up, dy, dgate, dup, y
        RMSNorm with residual  4 e + 5 s     update, stream, y, sum; sum, dy, dsum, dupdate, dstream
                               8 e           if s is e: dupdate and dstream are one tensor
    """
    e, layers = element_size, model.num_hidden_layers
    values = model.value_heads * model.head_v_dim
    mixer = 5 * e * conv_channels(model) + (8 if model.use_output_gate else 5) * e * values
    attention = (4 * (model.rope_theta is not None) + 5 * model.use_qk_norm) * e * attention_channels(model)
    kinds = layers - len(model.attention_layers), len(model.attention_layers)
    blocks = 9 * e * model.intermediate_size * layers + kinds[0] * mixer + kinds[1] * attention
    s = stream_bytes(model, e)
    first = 2 * e + 3 * s  # of the first norm, which nothing is added to
    return blocks + model.hidden_size * (first + 2 * layers * (8 * e if s == e else 4 * e + 5 * s))


def link_bandwidth(device_name: str) -> float | None:
    """What a GPU of this name, as CUDA gives it, sends at most in bytes per second; None where unknown."""
    if OTHER_MODULES.search(device_name):
        return None
    return next((speed for part, speed in LINK if part in device_name), None)


def known_ceilings(device_name: str, dtype: torch.dtype) -> Ceilings | None:
    """The data sheet's numbers for a device's name as CUDA gives it; None where they are not known."""
    flops = peak_flops(device_name, "bf16") if dtype in (torch.bfloat16, torch.float16) else None
    bandwidth = next((speed for part, speed in BANDWIDTH if part in device_name), None)
    if flops is None or bandwidth is None or OTHER_MODULES.search(device_name):
        return None
    return Ceilings(flops, bandwidth, "data sheet")


def measured_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of a few square matrix products, and of a few copies between buffers beyond any cache."""
    on_gpu = device.type == "cuda"
    size, extent = (8192, 2**31) if on_gpu else (1024, 2**27)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(extent, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    product = _best(lambda: a @ b, device)
    copy = _best(lambda: target.copy_(source), device)
    return Ceilings(2 * size**3 / product, 2 * extent / copy, "measured here: matrix product, copy")


def _best(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest repetition: a ceiling asks for the best case, not the usual one."""
    times = []
    for _ in range(6):  # the first warms up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
