"""Run the Hydra commands: check the overrides, compose the config, print errors in plain lines.

docs/cli.md lists the exit statuses.
"""

import os
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fla_train.cli.overrides import (
    GROUPS,
    addition_errors,
    one_line,
    options,
    override_errors,
    quote_values,
    repository,
    sample_jobs,
)
from fla_train.cli.scales import store_sections
from fla_train.cli.version import add_version
from fla_train.utils.errors import Interrupted
from fla_train.utils.keys import require_none
from fla_train.utils.overrides import quote

INTERRUPTED = 130  # exit status that a shell reports after Ctrl-C
USAGE = """\
usage: fla-{name} [KEY=VALUE | GROUP=OPTION]... [FLAG]...

  KEY=VALUE         set a key (a.b=3 for a key b below a); null unsets it
  GROUP=OPTION      choose a file of a group, which sets many keys
  --help            this text, and the config that the overrides give
  --cfg job         print the composed config and stop
  -m                run once for each combination of values separated by commas (KEY=1,2)
  --config-dir DIR  also take options from DIR/GROUP/OPTION.yaml
  --version         print the versions of fla_train, its commit, torch, triton and transformers
  -sc install=bash  print a script that completes names (or =zsh, =fish): eval "$(fla-train -sc install=bash)"

docs/configuration.md explains every key, docs/cli.md the exit status.
"""


def compose(config_name: str, overrides: Sequence[str] = (), *, config_dir: str | None = None) -> DictConfig:
    """Compose `configs/<config_name>.yaml` with Hydra overrides, and with options of `config_dir` too.

    Raises:
        ValueError: names every override that does not fit, with the reason and close names for each.
    """
    repo = repository(config_dir)
    with _hydra(config_name, config_dir) as compose_with:
        try:
            config = compose_with(overrides)
            errors = addition_errors(repo, config, overrides)
        except Exception as failure:
            # Errors that show only in combination have no single override to blame.
            errors = override_errors(repo, overrides, compose_with) or [one_line(failure)]
        require_none(errors)
        return config


def check_sweep(config_name: str, overrides: Sequence[str], *, config_dir: str | None = None) -> None:
    """Check every value of a sweep's overrides.

    Raises:
        ValueError: names every value that does not fit, as `compose` does.
    """
    repo = repository(config_dir)
    with _hydra(config_name, config_dir) as compose_with:
        store_sections(overrides, lambda chosen: compose_with(chosen, scaled=False))
        # Most sweeps have no error, and a few whole jobs show that. Only to name errors is a config composed
        # for each override.
        with suppress(Exception):
            if not any(addition_errors(repo, compose_with(job), job) for job in sample_jobs(overrides)):
                return
        require_none(override_errors(repo, overrides, compose_with, sweep=True))


def help_text(config_name: str, overrides: Sequence[str], config_dir: str | None) -> str:
    """Return usage, the options of every group, and the config that the overrides give."""
    repo, config = repository(config_dir), compose(config_name, overrides, config_dir=config_dir)
    # Only commands that train have the section `scales`, and with it groups without a key.
    chosen = {*config, *GROUPS} - {"scales"} if "scales" in config else {*config}
    groups = sorted(chosen.intersection(repo.get_group_options("", ObjectType.GROUP)))
    wrap = textwrap.TextWrapper(110, subsequent_indent="    ").fill
    lines = [wrap(f"  {group}={' '.join(options(repo, group))}") for group in groups]
    usage = USAGE.format(name=config_name)
    return "\n".join([usage, "Groups", *lines, "\nConfig\n", OmegaConf.to_yaml(config)])


@contextmanager
def _hydra(config_name: str, config_dir: str | None) -> Iterator[Callable[..., DictConfig]]:
    """Initialize Hydra; yield the function that composes a config with overrides."""
    folder = []
    if config_dir:
        if not Path(config_dir).is_dir():
            raise ValueError(f"--config-dir {config_dir}: folder not found")
        folder = [f"hydra.searchpath=[{quote(f'file://{Path(config_dir).resolve()}')}]"]

    def composed(overrides: Sequence[str], scaled: bool = True) -> DictConfig:
        if scaled:
            store_sections(overrides, lambda chosen: composed(chosen, scaled=False))
        return hydra.compose(config_name, overrides=[*folder, *overrides])

    state = GlobalHydra.instance()
    before, state.hydra = state.hydra, None  # another program's, or that of the command that composes a suite
    try:
        with hydra.initialize_config_module("fla_train.configs", version_base="1.3"):
            yield composed
    finally:
        GlobalHydra.instance().hydra = before


def leave(code: int) -> NoReturn:
    """End with this status, even if the terminal is gone and cannot be flushed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def fail(message: object, code: int = 2) -> int:
    """Print `error:` lines to stderr and return the exit status, even if the terminal is gone."""
    with suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def fail_with(error: Exception) -> int:
    """Print an error and return the exit status: 1 if the machine or the network failed, else 2."""
    if isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename else ""
        return fail(f"{file}{error.strerror or ' '.join(str(error).split())}", code=1)
    message = one_line(error) if isinstance(error, OmegaConfBaseException) else error
    return fail(message, code=1 if isinstance(error, Interrupted) else 2)


@contextmanager
def plain_errors() -> Iterator[None]:
    """End with a line instead of a traceback on a `ValueError`, `OSError` or Ctrl-C, also while modules load.

    A `KeyboardInterrupt` may have advice as its argument. With `FLA_TRAIN_TRACEBACK=1`, errors are raised.
    """
    try:
        yield
    except BrokenPipeError:  # `fla-runs runs | head`
        leave(0)
    except (ValueError, OmegaConfBaseException, OSError) as error:
        if os.environ.get("FLA_TRAIN_TRACEBACK"):
            raise
        leave(fail_with(error))
    except MemoryError:
        leave(fail("out of host memory: give the job more of it", 1))
    except KeyboardInterrupt as stop:
        leave(fail("; ".join(("interrupted", *stop.args)), INTERRUPTED))


def flag_parser() -> ArgumentParser:
    """Return the parser of Hydra's flags and `--version`."""
    parser = ArgumentParser(parents=[get_args_parser()], add_help=False, conflict_handler="resolve")
    add_version(parser)
    return parser


@plain_errors()
def run_hydra(
    config_name: str,
    register: Callable[[], None],
    task: Callable[[DictConfig], int | None],
    extend: Callable[..., list[str]] | None = None,
) -> None:
    """Run a console command: `register()` the schemas, compose from `sys.argv`, run `task`, exit.

    `extend(overrides, sweep=..., config_dir=...)` may add overrides. In a sweep (`-m`) the other jobs still
    run after an error, and the exit status is the highest.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # our Python processes never import from the current folder
    flags = flag_parser().parse_intermixed_args()
    overrides, config_dir = flags.overrides, flags.config_dir
    flag_words = [word for word in sys.argv[1:] if word not in overrides]
    config_name = flags.config_name or config_name
    if flags.experimental_rerun:
        raise ValueError("--experimental-rerun loads a pickle, which may run code: repeat the overrides")
    register()
    if flags.help:
        print(help_text(config_name, overrides, config_dir))
        return
    if not (flags.hydra_help or flags.shell_completion):
        check = check_sweep if flags.multirun else compose
        overrides = quote_values(config_name, overrides, sweep=flags.multirun)
        if extend is not None:
            overrides = extend(overrides, sweep=flags.multirun, config_dir=config_dir)
        check(config_name, overrides, config_dir=config_dir)
    sys.argv[1:] = [*flag_words, *overrides]  # Hydra rejects overrides on both sides of flags

    codes: list[int] = []  # exit statuses of the jobs
    begun = False  # whether a job has started: errors before that are Hydra's

    def guarded(config: DictConfig) -> None:
        nonlocal begun
        begun = True
        try:
            codes.append(task(config) or 0)
        except (ValueError, OmegaConfBaseException, OSError) as error:
            if os.environ.get("FLA_TRAIN_TRACEBACK"):
                raise
            codes.append(fail_with(error))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    try:
        main = hydra.main(version_base="1.3", config_path="pkg://fla_train.configs", config_name=config_name)
        main(guarded)()
    except Exception as failure:
        # A sweep's record may not be writable.
        of_machine = isinstance(failure, OSError) and not isinstance(failure, HydraException)
        if begun or of_machine or os.environ.get("FLA_TRAIN_TRACEBACK"):
            raise
        sys.exit(fail(one_line(failure)))  # flags, or jobs of a sweep that do not fit as a whole
    if code := max(codes, default=0):
        sys.exit(code)
