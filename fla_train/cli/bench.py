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

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fla_train.bench.options import COMMANDS
from fla_train.cli.app import compose, plain_errors
from fla_train.cli.overrides import quote_values
from fla_train.cli.version import add_version
from fla_train.training.config import register, to_config

MODULES = {"generate": "generation", "train": "training"}  # modules of commands with another name


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def parse(arguments: Sequence[str]) -> tuple[str, Any]:
    """Return the name of the command and its options.

    Arguments with "=" that are not flags are overrides, wherever they stand.
    """
    parser = argparse.ArgumentParser(
        prog="fla-bench", description="Measure the operator, generation or training steps on this machine."
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, options in COMMANDS.items():
        command = commands.add_parser(name, help=options.__doc__, description=options.__doc__)
        hints = get_type_hints(options, include_extras=True)
        for item in fields(options):
            hint, about = get_args(hints[item.name])
            if item.name == "overrides":
                command.add_argument(item.name, nargs="*", metavar="KEY=VALUE", help=about)
                continue
            flag = "--" + item.name.replace("_", "-")
            settings = {"required": True} if item.default is MISSING else {"default": item.default}
            if item.default and item.default is not MISSING:
                values = item.default if isinstance(item.default, tuple) else [item.default]
                about += f" (default: {' '.join(map(str, values))})"
            command.add_argument(flag, help=about, **settings, **_settings(hint))
    overrides = [text for text in arguments if "=" in text and not text.startswith("-")]
    rest = [text for text in arguments if text not in overrides and text != "--"]
    request, unknown = parser.parse_known_args([*rest[:1], *overrides, *rest[1:]])
    if unknown:
        hint = "; config keys are written KEY=VALUE" if hasattr(request, "overrides") else ""
        commands.choices[request.command].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options = COMMANDS[request.command]
    return request.command, options(**{item.name: getattr(request, item.name) for item in fields(options)})


def _settings(hint: Any) -> dict[str, Any]:
    """Return argparse's settings for a type, or for that type | None."""
    if get_origin(hint) is UnionType or NoneType in get_args(hint):
        hint = get_args(hint)[0]
    if get_origin(hint) is tuple:
        return {"nargs": "+"} | _settings(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": positive if hint is int else hint}


def run(arguments: Sequence[str]) -> None:
    """Measure and print.

    Raises:
        ValueError: the request cannot be measured.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints two lines for each profile
    name, options = parse(arguments)
    file: Path | None = getattr(options, "json", None)
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ValueError(f"--json {file}: name a file in an existing folder")
    module = import_module(f"fla_train.bench.{MODULES.get(name, name)}")  # imports torch, which takes seconds
    report = module.Report({"command": name} | vars(options))
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
