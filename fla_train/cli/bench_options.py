"""The options of `fla-bench`."""

import argparse
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fla-bench", description="Measure the operator or the training step on this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    kernels = commands.add_parser("kernels", help="the operator's backends and peers")
    kernels.add_argument("--batch", type=int, default=32, help="B: rows (default: 32)")
    kernels.add_argument("--tokens", type=int, default=2048, help="T: tokens of a row (default: 2048)")
    kernels.add_argument("--heads", type=int, default=8, help="H (default: 8)")
    kernels.add_argument("--head-dim", type=int, default=128, help="K")
    kernels.add_argument("--value-dim", type=int, help="V (default: K)")
    kernels.add_argument("--substeps", type=int, nargs="+", default=[1, 2, 3], help="n_h")
    kernels.add_argument(
        "--gate", action=argparse.BooleanOptionalAction, help="forget gate (default: both with and without)"
    )
    kernels.add_argument(
        "--norm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="L2 norm of q and k inside the kernel",
    )
    kernels.add_argument(
        "--dtype", choices=DTYPES, help="of q, k and v (default: bf16 on a GPU, fp32 on a CPU)"
    )
    kernels.add_argument("--backends", nargs="+", help="ours (default: the device's own)")
    kernels.add_argument("--peers", action="store_true", help="also time the peers that are installed")
    kernels.add_argument(
        "--graphs", action="store_true", help="time CUDA graphs: the device without the host's launches"
    )
    kernels.add_argument(
        "--recompute",
        type=int,
        nargs="*",
        metavar="TOKENS",
        help="also ours with nothing but inputs kept for the backward, and with a state every so many tokens",
    )
    decode = commands.add_parser("decode", help="the operator's step of one token")
    decode.add_argument("--heads", type=int, nargs="+", default=[256, 512, 2048, 8192], help="B x H")
    decode.add_argument("--head-dim", type=int, default=128, help="K")
    decode.add_argument("--value-dim", type=int, help="V (default: K)")
    decode.add_argument("--substeps", type=int, nargs="+", default=[1, 2, 3, 4], help="n_h")
    decode.add_argument("--dtype", choices=DTYPES, help="of q, k and v (default: as of `kernels`)")
    decode.add_argument("--state-dtype", choices=("fp32", "bf16"), default="fp32")
    decode.add_argument("--json", type=Path, help="also write everything to this file")
    neighbours = commands.add_parser("neighbours", help="the functions around the operator")
    neighbours.add_argument("--batch", type=int, default=8, help="B: rows (default: 8)")
    neighbours.add_argument("--tokens", type=int, default=2048, help="T: tokens of a row (default: 2048)")
    neighbours.add_argument("--hidden", type=int, default=1024)
    neighbours.add_argument(
        "--head-dim", type=int, help="of the norm with gate (default: 128, --hidden at most)"
    )
    neighbours.add_argument("--intermediate", type=int, help="channels of SwiGLU (default: 2.75 x --hidden)")
    neighbours.add_argument("--vocabulary", type=int, default=32000)
    neighbours.add_argument("--substeps", type=int, default=1, help="n_h, of the gates")
    neighbours.add_argument("--dtype", choices=DTYPES, help="of activations (default: as of `kernels`)")
    neighbours.add_argument("--functions", nargs="+", help="some only (default: all)")
    neighbours.add_argument("--peers", action="store_true", help="also time Liger-Kernel if it is installed")
    train = commands.add_parser("train", help="optimizer steps on random tokens, with their parts")
    train.add_argument("overrides", nargs="*", help="of configs/train.yaml, as for fla-train")
    train.add_argument("--steps", type=int, default=10, help="timed, after as many as needed to warm up")
    train.add_argument(
        "--peers",
        nargs="+",
        default=[],
        help="llama (transformers, SDPA) or fla, of equal parameters; llama-compiled: by torch.compile",
    )
    tune = commands.add_parser("tune", help="find the fastest launch options of the Triton kernels")
    tune.add_argument("--head-dim", type=int, nargs="+", default=[128], help="K")
    tune.add_argument("--value-dim", type=int, help="V (default: K)")
    tune.add_argument("--substeps", type=int, nargs="+", default=[1, 2, 3], help="n_h")
    tune.add_argument("--batch", type=int, default=32, help="B: rows (default: 32)")
    tune.add_argument("--tokens", type=int, default=2048, help="T: tokens of a row (default: 2048)")
    tune.add_argument("--heads", type=int, default=8, help="H (default: 8)")
    tune.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of q, k and v")
    tune.add_argument("--file", type=Path, help="of the table (default: the one that training reads)")
    for command in (kernels, neighbours):
        command.add_argument("--rounds", type=int, default=15, help="samples of each time on a CPU")
    for command in (kernels, neighbours, train):
        command.add_argument("--threads", type=int, help="torch threads on a CPU")
        command.add_argument("--peak-tflops", type=float, help="ceiling of matrix products")
        command.add_argument("--bandwidth", type=float, help="ceiling of the memory in TB/s")
        command.add_argument("--json", type=Path, help="also write everything to this file")
    return parser
