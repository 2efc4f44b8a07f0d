"""`fla-bench attention`: time and memory of softmax attention against the length, by what a token sees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fla_train.bench.measure import median_times, peak_memory
from fla_train.models import DeltaProductConfig
from fla_train.models.context import SequenceContext
from fla_train.models.mixers.attention import attention

HEADER = (
    "| tokens | sees | forward ms | fwd+bwd ms | fwd+bwd ns per token | extra memory MiB | bytes per token |",
    "|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Row:
    """One layout at one length: median times, and the peak of both passes beyond q, k and v."""

    tokens: int
    sees: str
    forward_ms: float
    both_ms: float
    memory_bytes: int

    def markdown(self) -> str:
        """The row of the table under `HEADER`."""
        each = f"{1e6 * self.both_ms / self.tokens:.4g} | {self.memory_bytes / 2**20:.4g}"
        return (
            f"| {self.tokens} | {self.sees} | {self.forward_ms:.4g} | {self.both_ms:.4g} | {each} "
            f"| {self.memory_bytes / self.tokens:.4g} |"
        )


def bench_attention(
    lengths: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    document: int,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int = 5,
) -> Iterator[Row]:
    """Time one row of each of `lengths` with causal attention, a window, packed documents, and both at once.

    Args:
        document: tokens of each packed document.
        rounds: samples of each time on a CPU.

    Raises:
        ValueError: for heads that do not fit together, or a window of one token.
    """
    configs = {
        kind: DeltaProductConfig(
            hidden_size=heads * head_dim,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            layer_types=[kind],
            sliding_window=window if kind == "sliding_attention" else None,
        )
        for kind in ("full_attention", "sliding_attention")
    }
    generator = torch.Generator(device).manual_seed(0)
    for tokens in lengths:
        q, k, v, do = (
            torch.randn(1, tokens, count, head_dim, generator=generator, device=device, dtype=dtype)
            .transpose(1, 2)
            .requires_grad_()
            for count in (heads, kv_heads, kv_heads, heads)
        )
        bounds = torch.tensor([*range(0, tokens, document), tokens], device=device)
        for kind, packed in (
            ("full_attention", False),
            ("sliding_attention", False),
            ("full_attention", True),
            ("sliding_attention", True),
        ):
            stream = torch.empty(1, tokens, 0, dtype=dtype, device=device)
            options = {"cu_seqlens": bounds, "longest": document} if packed else {}
            context = SequenceContext.build(configs[kind], stream, **options)
            run = partial(attention, visible=context.visible[kind])

            def forward(run=run, qkv=(q, k, v)) -> None:
                with torch.no_grad():
                    run(*qkv)

            def both(run=run, qkv=(q, k, v), do=do) -> None:
                torch.autograd.grad(run(*qkv), qkv, do)

            names = {"full_attention": "all", "sliding_attention": f"window {window}"}
            sees = names[kind] + (f", documents of {document}" if packed else "")
            times = median_times({"forward": forward, "both": both}, device, rounds)
            yield Row(tokens, sees, times["forward"], times["both"], peak_memory(both, device))
