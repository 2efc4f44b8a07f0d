"""`fla-bench`: speed of the operator, of generation and of training steps, compared with peers.

    fla-bench kernels                                         # the operator; the shapes of docs/benchmarks.md
    fla-bench kernels --batch 2 --tokens 1024 --heads 4 --head-dim 64 --num-householder 1 2 --peers
    fla-bench fused_ops --peers                               # convolution, norms, SwiGLU, gates, loss
    fla-bench generate --peers llama-compiled fla model=gated_delta_product/340m
    fla-bench train --peers llama model=gated_delta_product/340m trainer.seq_len=2048
    fla-bench tune --head-dim 128 --num-householder 1 2       # launch options for this GPU, to a file
    fla-bench precompile --folder /opt/kernels model=gated_delta_product/340m data=fineweb

Commands on whole models take overrides of configs/train.yaml, KEY=VALUE, as `fla-train` does. Tables go to
stdout in Markdown. `--json X.json` also writes the results to that file, and the printed tables to X.md. Exit
code 2: the request is wrong.
"""

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from fla_train.cli.app import compose, plain_errors
from fla_train.cli.overrides import quote_values
from fla_train.cli.version import add_version
from fla_train.training.config import register, to_config

MODULES = {"generate": "generation", "train": "training"}  # modules of commands with another name
NORMS = ("norm", "residual-norm", "gated-norm")
FUNCTIONS = ("convolution", *NORMS, "rotary", "selective-scan", "swiglu", "gates", "cross-entropy")
PEERS = ("transformer", "llama", "fla", "transformer-compiled", "llama-compiled")
DTYPES = ("bf16", "fp16", "fp32")


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if int(text) < 1:
        raise ArgumentTypeError("must be at least 1")
    return int(text)


def make_parser() -> ArgumentParser:
    """Return the parser of the command line."""
    parser = ArgumentParser(
        prog="fla-bench", description="Measure the operator, generation or training steps on this machine."
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, about: str) -> ArgumentParser:
        return commands.add_parser(name, help=about, description=about)

    kernels = command("kernels", "Time the operator's backends, and peers that are installed.")
    _number(kernels, "--batch", "sequences (B); 1 is enough on a CPU", 32)
    _number(kernels, "--tokens", "tokens of a sequence (T)", 2048)
    _number(kernels, "--heads", "heads of v (H)", 8)
    _number(kernels, "--group", "heads of v that share a head of q and k", 1)
    _number(kernels, "--head-dim", "K", 128)
    _number(kernels, "--value-dim", "V (default: K)")
    _number(kernels, "--num-householder", "n_h", (1, 2, 3))
    _flag(kernels, "--gate", "forget gate (default: both with and without)", None)
    _flag(kernels, "--norm", "L2 norm of q and k inside the kernel (default: with)", True)
    kernels.add_argument("--backends", nargs="+", default=("auto",), help="our backends (default: auto)")
    _flag(kernels, "--graphs", "time CUDA graphs, without the host's launches")
    _flag(kernels, "--peers", "also time the peers that are installed")

    fused_ops = command(
        "fused_ops", "Time convolution, norms, rotary, SwiGLU, gates, selective scan and cross-entropy."
    )
    _number(fused_ops, "--batch", "sequences (B); 1 is enough on a CPU", 8)
    _number(fused_ops, "--tokens", "tokens of a sequence (T)", 2048)
    _number(fused_ops, "--hidden", "channels", 1024)
    _number(fused_ops, "--head-dim", "head dim (default: 128, at most --hidden)")
    _number(fused_ops, "--intermediate", "channels of SwiGLU (default: 2.75 x --hidden)")
    _number(fused_ops, "--vocabulary", "vocabulary size of the loss", 32000)
    _number(fused_ops, "--num-householder", "n_h of the gates", 1)
    _choices(fused_ops, "--functions", "some of the functions (default: all)", FUNCTIONS)
    _flag(fused_ops, "--peers", "also time Liger-Kernel, on a GPU")

    generate = command(
        "generate", "Time generation by a whole model by batch and context, compared with peers."
    )
    _number(generate, "--batch", "sequences", (1, 64))
    _number(generate, "--contexts", "tokens of the prompts", (2048, 8192, 32768, 131072))
    _number(generate, "--new-tokens", "tokens that are timed after the first", 64)
    _choices(generate, "--peers", "models to compare with, -compiled by torch.compile", PEERS)

    train = command("train", "Time optimizer steps on random tokens, by kind of work.")
    _number(train, "--steps", "timed steps, after those that warm up", 10)
    _choices(train, "--peers", "as for generate", (*PEERS, "ours-compiled", "fla-compiled"))

    tune = command("tune", "Find the fastest launch options of the Triton kernels for this GPU.")
    _number(tune, "--batch", "sequences (B)", 32)
    _number(tune, "--tokens", "tokens of a sequence (T)", 2048)
    _number(tune, "--heads", "heads (H)", 8)
    _number(tune, "--head-dim", "K", (128,))
    _number(tune, "--value-dim", "V (default: K)")
    _number(tune, "--num-householder", "n_h", (1, 2, 3))
    tune.add_argument("--dtype", choices=DTYPES[:2], default="bf16", help="of q, k and v (default: bf16)")
    tune.add_argument("--file", type=Path, help="of the table (default: the one that training reads)")

    precompile = command("precompile", "Compile the kernels of a training run into a folder, for containers.")
    precompile.add_argument(
        "--folder", type=Path, required=True, help="Triton's cache; containers need it at this path"
    )

    for each in (generate, train, precompile):
        about = "overrides of configs/train.yaml, such as model=gated_delta_product/340m"
        each.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=about)
    for each in (kernels, fused_ops, generate):
        each.add_argument("--dtype", choices=DTYPES, help="(default: bf16 on a GPU, fp32 on a CPU)")
    for each in (kernels, fused_ops, generate, train):
        each.add_argument("--json", type=Path, help="also write results to this file, and tables to FILE.md")
    return parser


def _number(command: ArgumentParser, flag: str, about: str, default: Any = None) -> None:
    """Add an option for an integer, or for some if the default is a tuple."""
    many = isinstance(default, tuple)
    if default is not None:
        about += f" (default: {' '.join(map(str, default)) if many else default})"
    command.add_argument(flag, type=positive, nargs="+" if many else None, default=default, help=about)


def _flag(command: ArgumentParser, flag: str, about: str, default: bool | None = False) -> None:
    command.add_argument(flag, action=BooleanOptionalAction, default=default, help=about)


def _choices(command: ArgumentParser, flag: str, about: str, choices: Sequence[str]) -> None:
    command.add_argument(flag, nargs="+", choices=choices, default=(), help=about)


def parse(arguments: Sequence[str]) -> Namespace:
    """Return the options. Arguments with "=" that are not flags are overrides, wherever they stand."""
    parser = make_parser()
    overrides = [text for text in arguments if "=" in text and not text.startswith("-")]
    rest = [text for text in arguments if text not in overrides and text != "--"]
    options, unknown = parser.parse_known_args([*rest[:1], *overrides, *rest[1:]])
    if unknown:
        hint = "; config keys are written KEY=VALUE" if hasattr(options, "overrides") else ""
        hint += f"; fla-bench {options.command} --help lists the options"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return options


def run(arguments: Sequence[str]) -> None:
    """Measure and print.

    Raises:
        ValueError: the request cannot be measured.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints two lines for each profile
    options = parse(arguments)
    file = getattr(options, "json", None)
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ValueError(f"--json {file}: name a file in an existing folder")
    name = MODULES.get(options.command, options.command)
    module = import_module(f"fla_train.bench.{name}")  # imports torch, which takes seconds
    report = module.Report(vars(options))
    module.run(options, report, *[_compose] * hasattr(options, "overrides"))
    if file is not None:
        report.write(file)


def _compose(overrides: Sequence[str]) -> Any:
    """Compose a training config."""
    register()
    return to_config(compose("train", quote_values("train", overrides)))


@plain_errors()
def main() -> None:
    """Run the console command."""
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
