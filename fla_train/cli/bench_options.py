"""The options of `fla-bench`."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from fla_train.cli.version import add_version

DTYPES = ("bf16", "fp16", "fp32")


def positive(text: str) -> int:
    """A number of at least 1, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A finite number of at least 0, for argparse."""
    if not (math.isfinite(float(text)) and float(text) >= 0):
        raise argparse.ArgumentTypeError("must be a finite number of at least 0")
    return float(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fla-bench", description="Measure the operator or the training step on this machine."
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, about: str) -> Callable[..., argparse.Action]:
        return commands.add_parser(name, help=about).add_argument

    kernels = command("kernels", "the operator's backends and peers")
    decode = command("decode", "generation by whole models, or the operator's step of one token")
    fused_ops = command("fused_ops", "convolution, norms, SwiGLU, gates, cross-entropy")
    attention = command("attention", "softmax attention, windows and packed documents against the length")
    train = command("train", "optimizer steps on random tokens, with their parts")
    tune = command("tune", "find the fastest launch options of the Triton kernels")
    precompile = command("precompile", "compile the kernels of a training run into a folder for containers")

    for add, rows in ((kernels, 32), (fused_ops, 8), (tune, 32)):
        add("--batch", type=positive, default=rows, help=f"B: rows (default: {rows})")
        add("--tokens", type=positive, default=2048, help="T: tokens of a row (default: 2048)")
    for add in (kernels, attention, tune):
        add("--heads", type=positive, default=8, help="H, of kernels the heads of v (default: 8)")
    kernels("--group", type=positive, default=1, help="heads of v that share a head of q and k (default: 1)")
    for add in (kernels, decode, attention):
        add("--head-dim", type=positive, default=128, help="K; D of attention")
    for add, most in ((kernels, 3), (decode, 4), (tune, 3)):
        add("--value-dim", type=positive, help="V (default: K)")
        add("--num-householder", type=positive, nargs="+", default=list(range(1, most + 1)), help="n_h")
    for add in (kernels, decode, fused_ops, attention):
        add("--dtype", choices=DTYPES, help="of activations (default: bf16 on a GPU, fp32 on a CPU)")
    for add in (kernels, decode, fused_ops, attention, train):
        add("--json", type=Path, help="also write everything to this file, and the tables next to it (.md)")
    for add in (kernels, fused_ops, attention):
        add("--rounds", type=positive, default=15, help="samples of each time on a CPU")
    for add in (kernels, fused_ops):
        add("--peers", action="store_true", help="also time the peers that are installed")
    for add in (kernels, fused_ops, attention, train):
        add("--threads", type=positive, help="torch threads on a CPU")
    for add in (kernels, fused_ops, train):
        add("--peak-tflops", type=float, help="ceiling of matrix products")
        add("--bandwidth", type=float, help="ceiling of the memory in TB/s")
    for add in (train, precompile):
        add("overrides", nargs="*", help="of configs/train.yaml, as for fla-train")

    switch = argparse.BooleanOptionalAction
    kernels("--gate", action=switch, help="forget gate (default: both with and without)")
    kernels("--norm", action=switch, default=True, help="L2 norm of q and k inside the kernel")
    kernels("--backends", nargs="+", help="ours (default: the device's own)")
    kernels("--graphs", action="store_true", help="time CUDA graphs: without the host's launches")
    kernels(
        "--patience",
        type=seconds,
        default=0,
        help="seconds a kernel may compile and tune (default: 0, any number)",
    )
    kernels("--recompute", action="store_true", help="also ours with only the inputs kept for backward")

    decode("--heads", type=positive, nargs="+", default=[256, 512, 2048, 8192], help="B x H")
    decode("--state-dtype", choices=("fp32", "bf16"), default="fp32")

    decode("--model", help="time generation by this model (fla-train --list models), not the operator")
    decode("--batch", type=positive, nargs="+", default=[1, 64], help="sequences")
    contexts = [2048, 8192, 32768, 131072]
    decode("--contexts", type=positive, nargs="+", default=contexts, help="tokens of the prompts")
    decode("--new-tokens", type=positive, default=64, help="timed after the first")
    decode(
        "--peers",
        nargs="+",
        default=[],
        help="llama, transformer, fla; llama-compiled, transformer-compiled (static cache)",
    )

    lengths = [2048, 4096, 8192, 16384, 32768]
    attention("--tokens", type=positive, nargs="+", default=lengths, help="T of one row")
    attention("--kv-heads", type=positive, help="key and value heads (default: --heads)")
    attention("--window", type=positive, default=1024, help="of sliding window attention (tokens)")
    attention("--document", type=positive, default=1024, help="of the packed documents (tokens)")

    fused_ops("--hidden", type=positive, default=1024, help="channels (default: 1024)")
    fused_ops("--head-dim", type=positive, help="of the norm with gate (default: 128, --hidden at most)")
    fused_ops("--intermediate", type=positive, help="channels of SwiGLU (default: 2.75 x --hidden)")
    fused_ops("--vocabulary", type=positive, default=32000, help="of the loss (default: 32000)")
    fused_ops("--num-householder", type=positive, default=1, help="n_h, of the gates")
    fused_ops("--functions", nargs="+", help="some only (default: all)")

    train("--steps", type=positive, default=10, help="timed, after as many as needed to warm up")
    peers = "transformer (ours), llama or fla, of equal parameters; llama-compiled: by torch.compile"
    train("--peers", nargs="+", default=[], help=peers)

    tune("--head-dim", type=positive, nargs="+", default=[128], help="K")
    tune("--dtype", choices=("bf16", "fp16"), default="bf16", help="of q, k and v")
    tune("--file", type=Path, help="of the table (default: the one that training reads)")

    precompile("--folder", type=Path, required=True, help="Triton's cache; containers need it at this path")

    return parser
