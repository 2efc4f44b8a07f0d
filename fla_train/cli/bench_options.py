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
        action="store_true",
        help="also ours with nothing but the inputs kept for the backward pass",
    )
    decode = commands.add_parser("decode", help="the operator's step of one token")
    decode.add_argument("--heads", type=int, nargs="+", default=[256, 512, 2048, 8192], help="B x H")
    decode.add_argument("--head-dim", type=int, default=128, help="K")
    decode.add_argument("--value-dim", type=int, help="V (default: K)")
    decode.add_argument("--substeps", type=int, nargs="+", default=[1, 2, 3, 4], help="n_h")
    decode.add_argument("--dtype", choices=DTYPES, help="of q, k and v (default: as of `kernels`)")
    decode.add_argument("--state-dtype", choices=("fp32", "bf16"), default="fp32")
    decode.add_argument("--json", type=Path, help="also write everything to this file")
    fused_ops = commands.add_parser(
        "fused_ops", aliases=["neighbours"], help="convolution, norms, SwiGLU, gates, cross-entropy"
    )
    fused_ops.add_argument("--batch", type=int, default=8, help="B: rows (default: 8)")
    fused_ops.add_argument("--tokens", type=int, default=2048, help="T: tokens of a row (default: 2048)")
    fused_ops.add_argument("--hidden", type=int, default=1024)
    fused_ops.add_argument(
        "--head-dim", type=int, help="of the norm with gate (default: 128, --hidden at most)"
    )
    fused_ops.add_argument("--intermediate", type=int, help="channels of SwiGLU (default: 2.75 x --hidden)")
    fused_ops.add_argument("--vocabulary", type=int, default=32000)
    fused_ops.add_argument("--substeps", type=int, default=1, help="n_h, of the gates")
    fused_ops.add_argument("--dtype", choices=DTYPES, help="of activations (default: as of `kernels`)")
    fused_ops.add_argument("--functions", nargs="+", help="some only (default: all)")
    fused_ops.add_argument("--peers", action="store_true", help="also time Liger-Kernel if it is installed")
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
    first_step = commands.add_parser("first_step", help="a fresh process with empty compile caches")
    scaling = commands.add_parser("scaling", help="fla-train on several numbers of GPUs, beside plain DDP")
    scaling.add_argument("--folder", type=Path, required=True, help="new: for runs, logs and scaling.json")
    scaling.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    scaling.add_argument("--models", nargs="+", choices=("tiny", "340m", "1.3b"), default=["340m", "1.3b"])
    scaling.add_argument("--steps", type=int, default=16)
    scaling.add_argument("--only", default="", help="regular expression: which runs, by name")
    scaling.add_argument("--limit", type=float, default=300, help="seconds for one run")
    for command in (first_step, scaling):
        command.add_argument("overrides", nargs="*", help="of configs/train.yaml, as for fla-train")
    loader = commands.add_parser("loader", help="reading prepared data from the page cache")
    loader.add_argument("folder", help="what fla-prepare printed: `data: ready in FOLDER`")
    loader.add_argument("--seq-len", type=int, default=2048)
    loader.add_argument("--micro-batch", type=int, default=8)
    prepare = commands.add_parser("prepare", help="fla-prepare beside the raw speed of tokenizers")
    prepare.add_argument("corpus", help="parquet or jsonl: file, folder or glob")
    prepare.add_argument("tokenizer", help="folder or Hub name")
    prepare.add_argument("--documents", type=int, default=6000, help="how many to tokenize")
    prepare.add_argument("--rounds", type=int, default=3)
    prepare.add_argument("--workers", type=int, help="processes (default: as fla-prepare chooses)")
    tasks = commands.add_parser("tasks", help="drawing word problems")
    tasks.add_argument("--groups", nargs="+", default=["S3", "S4", "A5", "S5", "Z60"])
    tasks.add_argument("--length", type=int, default=128, help="tokens")
    for command in (loader, tasks):
        command.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    evaluation = commands.add_parser("evaluation", help="answers to lm-eval tasks beside HFLM")
    evaluation.add_argument("mirror", type=Path, help="what scripts/build_eval_mirror.py wrote")
    evaluation.add_argument("tokenizer", help="folder or Hub name")
    evaluation.add_argument("--model", default="gated_delta_product/340m")
    evaluation.add_argument("--limit", type=int, help="documents of each task (default: all)")
    evaluation.add_argument("--tasks", nargs="+", help="default: those of suite=zero_shot")
    evaluation.add_argument("--batch-size", default="auto", help="of HFLM; ours is always auto")
    evaluation.add_argument("--rounds", type=int, default=2, help="how often a task's requests are answered")
    evaluation.add_argument("--lengths", type=int, nargs="*", default=[4096, 8192, 16384, 32768])
    for command in (kernels, fused_ops):
        command.add_argument("--rounds", type=int, default=15, help="samples of each time on a CPU")
    for command in (kernels, fused_ops, train):
        command.add_argument("--threads", type=int, help="torch threads on a CPU")
        command.add_argument("--peak-tflops", type=float, help="ceiling of matrix products")
        command.add_argument("--bandwidth", type=float, help="ceiling of the memory in TB/s")
        command.add_argument("--json", type=Path, help="also write everything to this file")
    return parser
