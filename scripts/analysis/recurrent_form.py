"""Time the chunkwise form of the delta rule against the recurrent form, by length and head size, on a GPU.

    python scripts/analysis/recurrent_form.py recurrent-form.json

Figure 1 of arXiv 2406.06484, without heads of 256 channels, for which there are no fp32 kernels. Each call
has 65,536 tokens and heads of 1,024 channels in all, in bf16, or fp32 for the recurrent form, which is made
for it. Columns of the state do not depend on each other, so that form runs slices of V as heads that share
keys: a warp holds one slice of a state in registers.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from fla_train.bench.measure import median_ms
from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.select import RECURRENT_STATE, override
from fla_train.kernels.delta_product.selfcheck import relative_rms
from fla_train.utils.environment import describe_environment

TOKENS, CHANNELS = 65_536, 1_024
LENGTHS, HEAD_SIZES = (512, 1_024, 2_048, 4_096, 8_192, 16_384), (64, 128)
ALGORITHMS = {"chunkwise": "chunk", "recurrent": "fused_recurrent"}
DEVICE = torch.device("cuda")


def inputs(length: int, size: int) -> list[Tensor]:
    """Return q [B, T, H, K], k and v [B, T, 1, H, K], rounded to bf16, and beta [B, T, 1, H]; all fp32."""
    heads, rows = CHANNELS // size, (TOKENS // length, length)
    q, k, v = (torch.randn(*rows, *steps, heads, size, device=DEVICE) for steps in ((), (1,), (1,)))
    beta = 2 * torch.rand(*rows, 1, heads, device=DEVICE)
    return [q.bfloat16().float(), k.bfloat16().float(), v.bfloat16().float(), beta]


def run(form: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Return o [B, T, H, V]; the recurrent form takes slices of V."""
    columns = v.shape[-1] if form == "chunkwise" else RECURRENT_STATE // k.shape[-1]
    slices = v.shape[-1] // columns
    v = v.unflatten(-1, (slices, columns)).flatten(-3, -2)
    o, _ = delta_product(q, k, v, beta.repeat_interleave(slices, -1), qk_l2norm=True, backend="triton")
    return o.flatten(-2).unflatten(-1, (q.shape[2], -1))


def times(form: str, tensors: list[Tensor]) -> tuple[float, float, list[Tensor]]:
    """Return the milliseconds of forward, and of forward and backward, and o with the gradients."""
    dtype = torch.bfloat16 if form == "chunkwise" else torch.float32
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors[:3]] + [tensors[3].requires_grad_()]

    def both() -> list[Tensor]:
        o = run(form, *leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, o.detach())]

    with override(algorithm=ALGORITHMS[form]):  # the backward, too, reads it
        with torch.no_grad():
            forward = median_ms(lambda: run(form, *leaves), DEVICE)
        return forward, median_ms(both, DEVICE), both()


def main() -> None:
    rows = []
    for size in HEAD_SIZES:
        for length in LENGTHS:
            tensors, row, results = inputs(length, size), {"head_size": size, "length": length}, []
            for form in ALGORITHMS:
                row[f"{form}_forward_ms"], row[f"{form}_both_ms"], result = times(form, tensors)
                results.append(result)
            row["difference"] = max(relative_rms(a, b) for a, b in zip(*results, strict=True))
            print(row, flush=True)
            rows.append(row)
    report = {"environment": describe_environment("cuda"), "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
