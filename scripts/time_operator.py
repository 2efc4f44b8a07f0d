"""Times the delta-product operator on this machine: bf16 on a GPU, fp32 on a CPU.

    python scripts/time_operator.py                    # the shapes of docs/kernels.md (B=32 T=2048 H=8)
    python scripts/time_operator.py --batch 1 --tokens 1024 --heads 4 --head-dim 64 --substeps 1 2

Medians in milliseconds of the forward, and of the forward with the backward; gates like those of a trained
model, beta uniform in (0, 2), L2 norm inside. Errors are another matter: `fla-doctor --verbose`.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fla_train.kernels.delta_product import delta_product, resolve_backend


def median_ms(run: Callable[[], object], device: torch.device) -> float:
    """Median time of `run` after warm-up."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(run, return_mode="median")
    times = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--substeps", type=int, nargs="+", default=[1, 2, 3], help="n_h")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, backend {resolve_backend('auto', device)}, {dtype}")
    print("| n_h | gate | forward ms | forward + backward ms |\n|---|---|---|---|")
    size = (args.batch, args.tokens)
    for substeps in args.substeps:
        for gated in (True, False):
            q = torch.randn(*size, args.heads, args.head_dim, device=device, dtype=dtype, requires_grad=True)
            k, v = (
                torch.randn(*size, substeps, args.heads, args.head_dim, device=device, dtype=dtype)
                .requires_grad_()
                for _ in range(2)
            )  # fmt: skip
            beta = (2 * torch.rand(*size, substeps, args.heads, device=device)).requires_grad_()
            g = -0.1 * F.softplus(torch.randn(*size, args.heads, device=device)) if gated else None
            leaves = [q, k, v, beta] + ([g.requires_grad_()] if gated else [])
            do = torch.randn_like(v[:, :, 0])

            def forward(q=q, k=k, v=v, beta=beta, g=g) -> torch.Tensor:
                return delta_product(q, k, v, beta, g, qk_l2norm=True)[0]

            def both(forward=forward, leaves=leaves, do=do) -> None:
                torch.autograd.grad(forward(), leaves, do)

            with torch.no_grad():
                ahead = median_ms(forward, device)
            gate = "yes" if gated else "no"
            print(f"| {substeps} | {gate} | {ahead:.2f} | {median_ms(both, device):.2f} |", flush=True)


if __name__ == "__main__":
    main()
