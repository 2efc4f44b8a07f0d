"""`--version`: print the versions that a problem report needs."""

import argparse
from typing import Any

import fla_train
from fla_train.utils.environment import git_commit, package_version


class _ShowVersions(argparse.Action):
    """Print the versions and exit. They are looked up only on use, because git is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        packages = {name: package_version(name) or "missing" for name in ("torch", "triton", "transformers")}
        versions = ", ".join(f"{name} {version}" for name, version in packages.items())
        print(f"fla_train {fla_train.__version__}, commit {git_commit() or 'unknown'}, {versions}")
        parser.exit()


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--version` to a command."""
    about = "print versions and exit"
    parser.add_argument("--version", action=_ShowVersions, nargs=0, default=argparse.SUPPRESS, help=about)
