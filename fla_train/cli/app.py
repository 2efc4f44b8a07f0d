"""Run the Hydra commands: check the overrides, compose the config, print errors in plain lines.

docs/cli.md lists the exit statuses.
"""

import os
import sys
import textwrap
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
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
)
from fla_train.cli.scales import store_sections
from fla_train.cli.version import add_version
from fla_train.utils.errors import Interrupted
from fla_train.utils.keys import require_none
from fla_train.utils.overrides import parse_all, quote

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
    usage = "%(prog)s [KEY=VALUE | GROUP=OPTION]... [FLAG]..."
    hydra_flags = [get_args_parser()]
    parser = ArgumentParser(usage=usage, parents=hydra_flags, add_help=False, conflict_handler="resolve")
    add_version(parser)
    return parser


@dataclass(frozen=True)
class HydraJob:
    """A composed config to run: that of a command, or one of the jobs of a sweep.

    Attributes:
        overrides: with which `config` was composed.
        number: of the job in the sweep, from 0.
        count: number of jobs of the sweep.
        swept: the overrides in which the jobs differ; None outside a sweep.
    """

    config: DictConfig
    overrides: Sequence[str] = ()
    number: int = 0
    count: int = 1
    swept: Sequence[str] | None = None


def sweep_jobs(overrides: Sequence[str], config_dir: str | None = None) -> list[list[str]]:
    """Return the overrides of each job of a sweep: all combinations of the values, the last one fastest.

    Raises:
        ValueError: the sweep is empty, or a value is a continuous range.
    """
    if invalid := [text for text in overrides if not parse_all([text])]:  # composing says why
        return [invalid]
    parsed, repo = parse_all(overrides), repository(config_dir)
    for override in parsed:  # `glob(delta_net/*)` asks for the options of the group
        override.config_loader = SimpleNamespace(get_group_options=lambda group, **_: options(repo, group))
    try:
        (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as failure:
        raise ValueError(one_line(failure)) from failure
    if not jobs:
        raise ValueError("this sweep has no job: a range(...) or glob(...) is empty")
    return jobs


def _handle_flags(config_name: str, task: Callable[[HydraJob], int | None], arguments: Sequence[str]) -> None:
    """Let Hydra handle flags such as `--cfg` and `--info`. It does not run `task` then."""
    sys.argv[1:] = arguments
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    main = hydra.main(version_base="1.3", config_path="pkg://fla_train.configs", config_name=config_name)
    try:
        main(task)()
    except Exception as failure:
        raise ValueError(one_line(failure)) from failure


@plain_errors()
def run_hydra(
    config_name: str,
    register: Callable[[], None],
    task: Callable[[HydraJob], int | None],
    extend: Callable[..., list[str]] | None = None,
) -> None:
    """Run a console command: `register()` the schemas, compose from `sys.argv`, run `task`, exit.

    `extend(overrides, sweep=..., config_dir=...)` may add overrides. In a sweep (`-m`) all jobs are composed
    before the first one runs. After an error the others still run, and the exit status is the highest.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # our Python processes never import from the current folder
    flags = flag_parser().parse_intermixed_args()
    overrides, config_dir = flags.overrides, flags.config_dir
    flag_words = [word for word in sys.argv[1:] if word not in overrides]
    config_name = flags.config_name or config_name
    if flags.experimental_rerun:
        raise ValueError("--experimental-rerun loads a pickle, which may run code: repeat the overrides")
    if flags.config_path:
        raise ValueError("--config-path would replace all configs: add a folder to them with --config-dir")
    register()
    if flags.help:
        print(help_text(config_name, overrides, config_dir))
        return
    jobs: list[list[str]] = []
    if not (flags.hydra_help or flags.shell_completion):
        overrides = quote_values(config_name, overrides, sweep=flags.multirun)
        if extend is not None:
            overrides = extend(overrides, sweep=flags.multirun, config_dir=config_dir)
        jobs = sweep_jobs(overrides, config_dir) if flags.multirun else [overrides]
    configs, errors = [], dict[str, None]()  # each line once, in order
    for job in jobs:
        # To name its errors, a job is composed once per override. So later jobs leave out wrong overrides.
        untried = [text for text in job if not any(line.startswith(f"{text}: ") for line in errors)]
        try:
            configs.append(compose(config_name, untried, config_dir=config_dir))
        except ValueError as error:
            errors |= dict.fromkeys(str(error).split("\n  "))
    require_none([*errors])
    if flags.hydra_help or flags.shell_completion or flags.cfg or flags.info or flags.resolve:
        # Hydra rejects overrides on both sides of flags.
        _handle_flags(config_name, task, [*flag_words, *overrides])
        return

    differ = [len(set(values)) > 1 for values in zip(*jobs, strict=True)]
    codes: list[int] = []  # exit statuses of the jobs
    for number, (config, words) in enumerate(zip(configs, jobs, strict=True)):
        swept = [text.lstrip("+") for text in compress(words, differ)] if flags.multirun else None
        try:
            codes.append(task(HydraJob(config, words, number, len(jobs), swept)) or 0)
        except (ValueError, OmegaConfBaseException, OSError) as error:
            codes.append(fail_with(error))
            if os.environ.get("FLA_TRAIN_TRACEBACK"):
                traceback.print_exc()
    if code := max(codes):
        sys.exit(code)
