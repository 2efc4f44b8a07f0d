"""Softmax attention of one token on a cache, Triton only: programs share the keys (flash decoding).

torch's kernels give all keys of a head to one program where a mask says which of them are visible, and copy
the keys for grouped heads. Here as many programs as fill the device take blocks of keys in turn. Keys that
are not visible are not read, so the cost of a cache at fixed addresses depends on its content.
"""

import torch
from torch import Tensor

from fla_train.kernels.cached_launch import run_kernel
from fla_train.kernels.custom_op import custom_op
from fla_train.kernels.optional_triton import tl, triton
from fla_train.kernels.sizes import ceil_div, next_power_of_2, processors

BLOCK = 16384  # bytes of a block of keys
PROGRAMS_PER_PROCESSOR = 3  # as many as run at once


def attention_step(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v over the visible keys, at least one per sequence; no gradients.

    Args:
        q: [B, H, 1, D].
        k, v: [B, H_kv, S, D], in the dtype of `q`.
        visible: [B or 1, 1, 1, S], bool.

    Returns:
        [B, H, 1, D].
    """
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    attention_step_forward(*(x.contiguous() for x in (q, k, v, visible)), o)
    return o


@custom_op(mutates=("o",))
def attention_step_forward(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, o: Tensor) -> None:
    """Fill the output from those of all parts, weighted by their sums of exponentials."""
    (batch, heads, _, size), (kv_heads, keys) = q.shape, k.shape[1:3]
    key_tile = next_power_of_2(max(16, size))
    block = max(16, min(128, BLOCK // (key_tile * k.element_size())))
    wanted = ceil_div(PROGRAMS_PER_PROCESSOR * processors(q.device), batch * kv_heads)
    parts = min(ceil_div(keys, block), wanted)
    o_parts = q.new_empty(parts, *q.shape, dtype=torch.float32)
    lse = q.new_empty(parts, batch, heads, 1, 1, dtype=torch.float32)
    run_kernel(
        attention_step_kernel, (batch * kv_heads, parts),
        q=q, k=k, v=v, visible=visible, o=o_parts, lse=lse, scale=size**-0.5,
        S=keys, PARTS=parts, B=batch, H=kv_heads, G=heads // kv_heads, D=size, ROWS=len(visible) > 1,
        BG=max(16, next_power_of_2(heads // kv_heads)), BS=block, BD=key_tile,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    o.copy_((o_parts * lse.softmax(0)).sum(0))


@triton.jit(do_not_specialize=["S", "PARTS", "B"])
def attention_step_kernel(
    q, k, v, visible,  # [B, H, G, D], [B, H, S, D] twice, [B, S], [1, S] without ROWS
    o, lse, scale, S, PARTS, B,  # out [PARTS, B, H, G, D], [PARTS, B, H, G]
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Attend to every PARTS-th block of a head's keys, for the G queries that share them."""
    i_h, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_g, o_d = tl.arange(0, BG), tl.arange(0, BD)
    m_g, m_d = o_g < G, o_d < D
    p_g = o_g[:, None] * D + o_d[None, :]
    b_q = tl.load(q + i_h * G * D + p_g, mask=m_g[:, None] & m_d[None, :], other=0.0)
    k += i_h * S * D
    v += i_h * S * D
    if ROWS:
        visible += i_h // H * S
    b_max = tl.full([BG], float("-inf"), tl.float32)
    b_sum = tl.zeros([BG], tl.float32)
    b_o = tl.zeros([BG, BD], tl.float32)
    for i in range(i_part * BS, S, PARTS * BS):
        o_s = i + tl.arange(0, BS)
        m_s = tl.load(visible + o_s, mask=o_s < S, other=0) != 0
        m_kv, p_kv = m_s[:, None] & m_d[None, :], o_s[:, None] * D + o_d[None, :]
        b_k = tl.load(k + p_kv, mask=m_kv, other=0.0)
        b_v = tl.load(v + p_kv, mask=m_kv, other=0.0)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        b_scores = tl.where(m_s[None, :], b_scores, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_scores, 1))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p, b_factor = tl.exp(b_scores - b_shift[:, None]), tl.exp(b_max - b_shift)
        b_sum = b_sum * b_factor + tl.sum(b_p, 1)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_factor[:, None], input_precision="ieee")
        b_max = b_new
    i_o = (i_part * B * H + i_h) * G
    tl.store(lse + i_o + o_g, b_max + tl.log(b_sum), mask=m_g)  # -inf without visible keys
    b_o /= tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    tl.store(o + i_o * D + p_g, b_o, mask=m_g[:, None] & m_d[None, :])
