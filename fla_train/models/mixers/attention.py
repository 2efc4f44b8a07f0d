"""Causal softmax attention over all tokens or a window, with grouped queries and rotary positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from fla_train.kernels.context_parallel import gather_earlier
from fla_train.kernels.fused_ops.backend import resolve_backend
from fla_train.kernels.fused_ops.flash_decoding import attention_step
from fla_train.kernels.fused_ops.rotary import rotary
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.context import SequenceContext
from fla_train.models.layers import RMSNorm, project
from fla_train.models.visible_keys import VisibleKeys

BLOCK = 256  # queries and keys per block of `attention_in_blocks`
HALF = (torch.bfloat16, torch.float16)


class Attention(nn.Module):
    """Causal softmax attention over [B, T, hidden_size], of one type of `config.layer_types`.

    `attn_implementation` "sdpa" (the default) uses torch's kernels. "eager" computes the weights, as does any
    call that requests them.
    """

    def __init__(self, config: DeltaProductConfig, layer_index: int = 0) -> None:
        super().__init__()
        self.config, self.layer_index = config, layer_index
        self.kind = config.layer_types[layer_index]
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        kv_size = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        if config.use_qk_norm:
            self.q_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.k_norm = RMSNorm(kv_size, config.norm_eps)

    def forward(self, x: Tensor, context: SequenceContext, cache: Cache | None = None) -> Tensor:
        """Attend; this layer's keys and values in `cache` are read and updated in place."""
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        if self.config.use_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))  # [B, T, H, D]
        if context.cos is not None:
            q, k = rotary(q, k, context.cos, context.sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_index)
        visible = context.visible[self.kind]
        if context.part is not None:
            k, v = gather_earlier(torch.stack([k, v]), context.part, self.layer_index)
        if self.config._attn_implementation == "eager" or context.attentions is not None:
            o, weights = eager_attention(q, k, v, visible)
            if context.attentions is not None:
                context.attentions.append(weights)
        else:
            o = attention(q, k, v, visible)
        return project(o.transpose(1, 2).flatten(-2), self.o_proj)[0]


def attention(q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys) -> Tensor:
    """Compute softmax(q k^T / sqrt(D)) v over the visible keys, without a [T, S] mask.

    Plain causality runs in torch's scaled_dot_product_attention. On a GPU windows and packed documents run in
    its FlashAttention kernel for sequences of unequal lengths, and one token on a padded or static cache in
    `attention_step`. Everything else runs block by block. For a window, time is linear in T.

    Args:
        q: [B, H, T, D]; k, v: [B, H_kv, S, D].

    Returns:
        [B, H, T, D].
    """
    if visible.plain:
        return _sdpa(q, k, v, is_causal=q.shape[2] > 1)
    if q.shape[2] == 1 and not torch.is_grad_enabled() and resolve_backend("auto", q) == "triton":
        compiling = torch.compiler.is_compiling()  # makes the mask once, but cannot trace cached properties
        return attention_step(q, k, v, visible.mask() if compiling else visible.mask_of_step)
    if visible.cu_seqlens is not None and flash_takes(q):
        return _flash(q, k, v, visible)
    return attention_in_blocks(q, k, v, visible)


def attention_in_blocks(q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys) -> Tensor:
    """Compute `attention` by blocks of queries, each on its visible blocks of keys, on any device.

    The backward pass recomputes each block, so no masks are kept.
    """
    k_blocks, v_blocks = k.split(BLOCK, dim=2), v.split(BLOCK, dim=2)
    outputs = []
    for start, q_block in zip(range(0, q.shape[2], BLOCK), q.split(BLOCK, dim=2), strict=True):
        queries = slice(start, start + q_block.shape[2])
        low, high = visible.key_range(queries.start, queries.stop)
        if torch.is_grad_enabled():
            # Several queries share whole blocks, because the gradient of a slice would have the size of k.
            first, last = low // BLOCK, (high - 1) // BLOCK + 1
            pieces = (q_block, *k_blocks[first:last], *v_blocks[first:last])
            options = {"visible": visible, "queries": queries, "keys": slice(first * BLOCK, last * BLOCK)}
            o = checkpoint(_attend, *pieces, use_reentrant=False, preserve_rng_state=False, **options)
        else:
            keys = slice(low, high)
            o = _attend(q_block, k[:, :, keys], v[:, :, keys], visible=visible, queries=queries, keys=keys)
        outputs.append(o)
    return torch.cat(outputs, dim=2)


def _attend(q: Tensor, *kv: Tensor, visible: VisibleKeys, queries: slice, keys: slice) -> Tensor:
    """Attend with a block of queries to keys and values, passed as equally many pieces of each."""
    pieces = kv[: len(kv) // 2], kv[len(kv) // 2 :]
    k, v = (piece[0] if len(piece) == 1 else torch.cat(piece, dim=2) for piece in pieces)
    return _sdpa(q, k, v, visible.mask(queries, keys))


def eager_attention(q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys) -> tuple[Tensor, Tensor]:
    """Return outputs [B, H, T, D] and softmax weights [B, H, T, S], with the softmax in fp32.

    Arguments are those of `attention`.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible.mask(), float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return weights @ v, weights


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Call torch's attention. On a GPU only half-precision kernels without a mask support grouped heads."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and (mask is not None or q.dtype not in HALF):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)


def flash_takes(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _flash(q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys) -> Tensor:
    """Compute `attention` over the documents of all rows, without synchronizing to get their lengths.

    A document's last query sees its last key, even if its keys begin before its queries.

    torch.nn.attention.varlen calls this operator, but its handling of grouped heads differs between releases.
    If the longest document is not known, the row length is its bound; programs beyond a document's end stop
    at once.
    """
    batch, _, length, _ = q.shape
    longest = visible.longest or k.shape[2]
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B T, H, D]
    before = None if visible.window is None else visible.window - 1
    o, *_ = torch.ops.aten._flash_attention_forward(
        *rows,
        visible.cu_seqlens,
        visible.key_cu_seqlens,
        min(longest, length),
        longest,
        dropout_p=0.0,
        is_causal=visible.window is None,
        return_debug_mask=False,
        window_size_left=before,
        window_size_right=None if visible.window is None else 0,
    )
    return o.unflatten(0, (batch, length)).transpose(1, 2)
