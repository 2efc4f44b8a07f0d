"""The options of `fla-bench`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fla-bench", description="Measure the operator or the training step on this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, about: str, **options: Any) -> Callable[..., argparse.Action]:
        return commands.add_parser(name, help=about, **options).add_argument

    kernels = command("kernels", "the operator's backends and peers")
    decode = command("decode", "the operator's step of one token")
    fused_ops = command(
        "fused_ops", "convolution, norms, SwiGLU, gates, cross-entropy", aliases=["neighbours"]
    )
    attention = command("attention", "softmax attention, windows and packed documents against the length")
    train = command("train", "optimizer steps on random tokens, with their parts")
    tune = command("tune", "find the fastest launch options of the Triton kernels")
    first_step = command("first_step", "a fresh process with empty compile caches")
    scaling = command("scaling", "fla-train on several numbers of GPUs, beside plain DDP")
    loader = command("loader", "reading prepared data from the page cache")
    prepare = command("prepare", "fla-prepare beside the raw speed of tokenizers")
    tasks = command("tasks", "drawing word problems")
    evaluation = command("evaluation", "answers to lm-eval tasks beside HFLM")

    for add, rows in ((kernels, 32), (fused_ops, 8), (tune, 32)):
        add("--batch", type=int, default=rows, help=f"B: rows (default: {rows})")
        add("--tokens", type=int, default=2048, help="T: tokens of a row (default: 2048)")
    for add in (kernels, attention, tune):
        add("--heads", type=int, default=8, help="H (default: 8)")
    for add in (kernels, decode, attention):
        add("--head-dim", type=int, default=128, help="K; D of attention")
    for add, most in ((kernels, 3), (decode, 4), (tune, 3)):
        add("--value-dim", type=int, help="V (default: K)")
        add(
            "--num-householder",
            "--substeps",
            type=int,
            nargs="+",
            default=list(range(1, most + 1)),
            help="n_h",
        )
    for add in (kernels, decode, fused_ops, attention):
        add("--dtype", choices=DTYPES, help="of activations (default: bf16 on a GPU, fp32 on a CPU)")
    for add in (kernels, decode, fused_ops, attention, train):
        add("--json", type=Path, help="also write everything to this file")
    for add in (kernels, fused_ops, attention):
        add("--rounds", type=int, default=15, help="samples of each time on a CPU")
    for add in (kernels, fused_ops):
        add("--peers", action="store_true", help="also time the peers that are installed")
    for add in (kernels, fused_ops, attention, train):
        add("--threads", type=int, help="torch threads on a CPU")
    for add in (kernels, fused_ops, train):
        add("--peak-tflops", type=float, help="ceiling of matrix products")
        add("--bandwidth", type=float, help="ceiling of the memory in TB/s")
    for add in (train, first_step, scaling):
        add("overrides", nargs="*", help="of configs/train.yaml, as for fla-train")
    for add in (loader, tasks):
        add("--seconds", type=float, default=4.0, help="of each measurement")

    switch = argparse.BooleanOptionalAction
    kernels("--gate", action=switch, help="forget gate (default: both with and without)")
    kernels("--norm", action=switch, default=True, help="L2 norm of q and k inside the kernel")
    kernels("--backends", nargs="+", help="ours (default: the device's own)")
    kernels("--graphs", action="store_true", help="time CUDA graphs: without the host's launches")
    kernels("--recompute", action="store_true", help="also ours with only the inputs kept for backward")

    decode("--heads", type=int, nargs="+", default=[256, 512, 2048, 8192], help="B x H")
    decode("--state-dtype", choices=("fp32", "bf16"), default="fp32")

    lengths = [2048, 4096, 8192, 16384, 32768]
    attention("--tokens", type=int, nargs="+", default=lengths, help="T of one row (default: 2048 to 32768)")
    attention("--kv-heads", type=int, help="key and value heads (default: --heads)")
    attention("--window", type=int, default=1024, help="of sliding window attention (tokens)")
    attention("--document", type=int, default=1024, help="of the packed documents (tokens)")

    fused_ops("--hidden", type=int, default=1024)
    fused_ops("--head-dim", type=int, help="of the norm with gate (default: 128, --hidden at most)")
    fused_ops("--intermediate", type=int, help="channels of SwiGLU (default: 2.75 x --hidden)")
    fused_ops("--vocabulary", type=int, default=32000)
    fused_ops("--num-householder", "--substeps", type=int, default=1, help="n_h, of the gates")
    fused_ops("--functions", nargs="+", help="some only (default: all)")

    train("--steps", type=int, default=10, help="timed, after as many as needed to warm up")
    peers = "llama (transformers, SDPA) or fla, of equal parameters; llama-compiled: by torch.compile"
    train("--peers", nargs="+", default=[], help=peers)

    tune("--head-dim", type=int, nargs="+", default=[128], help="K")
    tune("--dtype", choices=("bf16", "fp16"), default="bf16", help="of q, k and v")
    tune("--file", type=Path, help="of the table (default: the one that training reads)")

    scaling("--folder", type=Path, required=True, help="new: for runs, logs and scaling.json")
    scaling("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    scaling("--models", nargs="+", choices=("tiny", "340m", "1.3b"), default=["340m", "1.3b"])
    scaling("--steps", type=int, default=16)
    scaling("--only", default="", help="regular expression: which runs, by name")
    scaling("--limit", type=float, default=300, help="seconds for one run")

    loader("folder", help="what fla-prepare printed: `data: ready in FOLDER`")
    loader("--seq-len", type=int, default=2048)
    loader("--micro-batch", type=int, default=8)

    prepare("corpus", help="parquet or jsonl: file, folder or glob")
    prepare("tokenizer", help="folder or Hub name")
    prepare("--documents", type=int, default=6000, help="how many to tokenize")
    prepare("--rounds", type=int, default=3)
    prepare("--workers", type=int, help="processes (default: as fla-prepare chooses)")

    tasks("--groups", nargs="+", default=["S3", "S4", "A5", "S5", "Z60"])
    tasks("--length", type=int, default=128, help="tokens")

    evaluation("mirror", type=Path, help="what scripts/build_eval_mirror.py wrote")
    evaluation("tokenizer", help="folder or Hub name")
    evaluation("--model", default="gated_delta_product/340m")
    evaluation("--limit", type=int, help="documents of each task (default: all)")
    evaluation("--tasks", nargs="+", help="default: those of suite=zero_shot")
    evaluation("--batch-size", default="auto", help="of HFLM; ours is always auto")
    evaluation("--rounds", type=int, default=2, help="how often a task's requests are answered")
    evaluation("--lengths", type=int, nargs="*", default=[4096, 8192, 16384, 32768])
    return parser
