"""FLOPs and bytes of the operator, and the least time they take on a device.

Counts are per token and head. n is n_h, K and V the head dims, M the Householder steps of a chunk (C = M / n
tokens), e the bytes of an element of q, k and v. A multiply-add is two FLOPs. Matrix products count as dense,
though half of a causal one is zero. Elementwise work is left out.
"""

import re
from dataclasses import dataclass

import torch

from fla_train.models.layer_sizes import CHUNK, operator_flops
from fla_train.utils.throughput import peak_flops

GATE_BYTES = 4  # bytes of an element of beta and g, which are fp32

# Memory bandwidth in bytes per second from NVIDIA's data sheets of the SXM modules, A100 with 80 GB.
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.039e12}
# Modules of these chips with another memory: an "A100-PCIE-40GB", a "GH200".
OTHER_MODULES = re.compile(r"PCIe|NVL|GH200", re.IGNORECASE)


@dataclass(frozen=True)
class Shape:
    """Sizes of one call of the operator."""

    batch: int
    tokens: int
    heads: int  # heads of v
    key_dim: int
    value_dim: int
    num_householder: int  # n_h
    gated: bool
    element_size: int = 2  # bytes of an element of q, k, v and o
    group: int = 1  # heads of v that share a head of q and k

    @property
    def input_bytes(self) -> float:
        """Return the bytes of q, k and v per token and head: e (K + n K + n V)."""
        n, k, v = self.num_householder, self.key_dim / self.group, self.value_dim
        return self.element_size * (k + n * (k + v))


@dataclass(frozen=True)
class Ceilings:
    """Peak FLOP/s of matrix products and peak bytes/s of the memory, reads and writes together."""

    flops: float
    bandwidth: float

    def seconds(self, flops: float, traffic: float) -> float:
        """Return the least time of `flops` FLOPs and `traffic` bytes, which may overlap."""
        return max(flops / self.flops, traffic / self.bandwidth)


def forward_bytes(shape: Shape) -> float:
    """Return the least traffic of a forward pass, per token and head: q, k, v, o and the gates.

    With grouped heads K stands for K / group here and in `backward_bytes`.
    """
    return shape.input_bytes + shape.element_size * shape.value_dim + _gates(shape)


def kept_bytes(shape: Shape) -> float:
    """Return the bytes kept for the backward pass: the inverses (n M) and a state per chunk (n K V / M)."""
    return shape.element_size * shape.num_householder * (CHUNK + shape.key_dim * shape.value_dim / CHUNK)


def backward_bytes(shape: Shape) -> float:
    """Return the least traffic of a backward pass, per token and head, e (2K + V + 2nK + 2nV) without gates.

    It reads q, k, v and dO, writes dq, dk and dv, and reads the gates, writes their gradients, and reads the
    tensors that the forward pass kept.
    """
    traffic = 2 * shape.input_bytes + shape.element_size * shape.value_dim
    return traffic + 2 * _gates(shape) + kept_bytes(shape)


def _gates(shape: Shape) -> int:
    return GATE_BYTES * (shape.num_householder + shape.gated)


def bounds(shape: Shape, ceilings: Ceilings) -> tuple[float, float]:
    """Return the least seconds of a forward pass that keeps nothing, and of forward and backward."""
    forward, backward = operator_flops(shape.num_householder, shape.key_dim, shape.value_dim)
    traffic = forward_bytes(shape)
    both = ceilings.seconds(forward, traffic + kept_bytes(shape))
    both += ceilings.seconds(backward, backward_bytes(shape))
    count = shape.batch * shape.tokens * shape.heads
    return count * ceilings.seconds(forward, traffic), count * both


def known_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings | None:
    """Return the data sheet's ceilings of a GPU for 16-bit products, or None if they are not known."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    name = torch.cuda.get_device_name(device)
    flops = peak_flops(name, "bf16")
    bandwidth = next((speed for chip, speed in BANDWIDTH.items() if chip in name), None)
    known = flops is not None and bandwidth is not None and not OTHER_MODULES.search(name)
    return Ceilings(flops, bandwidth) if known else None
