"""Shared code of the commands: compose the config, print errors in plain lines, set the exit status.

`help.EXIT_STATUS` lists the statuses.
"""

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from typing import NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fla_train.cli.config_files import ConfigFiles
from fla_train.cli.error_pages import with_pages
from fla_train.cli.help import SCRIPTS, completions, help_text, list_text
from fla_train.cli.names import flag_error
from fla_train.cli.overrides import addition_errors, as_written, check_names, one_line, override_errors
from fla_train.cli.scales import store_sections
from fla_train.cli.version import add_version
from fla_train.hub.saved_config import quote
from fla_train.utils.errors import Interrupted

CONFIG_PATH = "pkg://fla_train.configs"
INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C


class LeftOut(Exception):
    """Raised by a job of a sweep that is not this process's to do."""


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep (`-m`).

    Attributes:
        number: from 0, in Hydra's order.
        count: jobs of the sweep.
        swept: the overrides that differ between jobs, as this one has them.
    """

    number: int
    count: int
    swept: tuple[str, ...]


def sweep_job() -> SweepJob | None:
    """The job that a command runs now; None: it is no sweep."""
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return None
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides(FlagParser().parse_intermixed_args().overrides)
    (jobs,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    differ = [len(set(values)) > 1 for values in zip(*jobs, strict=True)]
    swept = tuple(text.lstrip("+") for text in compress(jobs[hydra.job.num], differ))
    return SweepJob(hydra.job.num, len(jobs), swept)


def compose(config_name: str, overrides: Sequence[str] = (), *, config_dir: str | None = None) -> DictConfig:
    """Compose `configs/<config_name>.yaml` with Hydra overrides, and with options of `config_dir` too.

    Raises:
        ValueError: naming every override that does not fit, with the reason and close names for each.
    """
    configs = ConfigFiles(config_name, config_dir)
    with _hydra(configs) as compose_with:
        try:
            config = compose_with(overrides)
        except Exception as failure:
            errors = override_errors(configs, overrides, compose_with)
            # Errors that show only in combination have no single override to blame.
            raise ValueError("\n  ".join(errors) if errors else one_line(failure)) from failure
        if errors := addition_errors(configs, config, overrides):
            raise ValueError("\n  ".join(errors))
        return config


def check_sweep(config_name: str, overrides: Sequence[str], *, config_dir: str | None = None) -> None:
    """Compose with each value of a sweep's overrides by itself.

    Raises:
        ValueError: naming every value that does not fit, as `compose` does.
    """
    configs = ConfigFiles(config_name, config_dir)
    with _hydra(configs) as compose_with:
        if errors := override_errors(configs, overrides, compose_with, sweep=True):
            raise ValueError("\n  ".join(errors))


@contextmanager
def _hydra(configs: ConfigFiles) -> Iterator[Callable[[Sequence[str]], DictConfig]]:
    """Hydra, initialized with these files; yields what composes a config with overrides."""
    folder = []
    if configs.folder:
        if not configs.folder.is_dir():
            raise ValueError(f"--config-dir {configs.folder}: there is no such folder")
        folder = [f"hydra.searchpath=[{quote(f'file://{configs.folder.resolve()}')}]"]
    state = GlobalHydra.instance()
    before, state.hydra = state.hydra, None  # another program's, or that of the command that composes a suite
    try:
        with hydra.initialize_config_module("fla_train.configs", version_base="1.3"):

            def composed(overrides: Sequence[str], scaled: bool = True) -> DictConfig:
                if scaled:
                    store_sections(overrides, lambda chosen: composed(chosen, scaled=False))
                return hydra.compose(configs.config_name, overrides=[*folder, *overrides])

            yield composed
    finally:
        GlobalHydra.instance().hydra = before


def leave(code: int) -> NoReturn:
    """End with this status. Of a terminal that has gone Python would make 120, since it can't be flushed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def fail(message: object, code: int = 2) -> int:
    """Print `error:` lines to stderr and return the exit code, also where the terminal has gone."""
    with suppress(OSError):
        print(f"error: {with_pages(str(message))}", file=sys.stderr, flush=True)
    return code


def fail_by(error: Exception) -> int:
    """`fail` for what ended a command: the exit code is 1 where the machine or the network failed, else 2."""
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return fail(f"{place}{error.strerror or ' '.join(str(error).split())}", code=1)
    message = one_line(error) if isinstance(error, OmegaConfBaseException) else error
    return fail(message, code=1 if isinstance(error, Interrupted) else 2)


@contextmanager
def interruptible() -> Iterator[None]:
    """End by a line, without a traceback, on Ctrl-C and without memory, also while modules load."""
    try:
        yield
    except MemoryError:
        leave(fail("out of host memory: give the job more of it", 1))
    except KeyboardInterrupt:
        fail("interrupted")
        leave(INTERRUPTED)


class FlagParser(ArgumentParser):
    """Hydra's flags, `--list`, our version; an error is a line of ours."""

    def __init__(self) -> None:
        super().__init__(parents=[get_args_parser()], add_help=False, conflict_handler="resolve")
        add_version(self)
        self.add_argument("--list", action="store_true")

    def error(self, message: str) -> NoReturn:
        if unknown := re.fullmatch(r"unrecognized arguments: (\S+).*", message):
            known = (flag for action in self._actions for flag in action.option_strings)
            message = flag_error(unknown[1], known)
        sys.exit(fail(message))


def _answer(configs: ConfigFiles, flags: Namespace, overrides: Sequence[str]) -> bool:
    """Print what --help, --list or a shell's completion asks for, without heavy imports; whether one did.

    Raises:
        ValueError: a group or an option does not exist.
    """
    if flags.help:
        check_names(configs, overrides)
        print(help_text(configs, overrides))
    elif flags.list:
        print(list_text(configs, overrides))
    elif flags.shell_completion and overrides[:1] and overrides[0].startswith("query="):
        print("\n".join(completions(configs, os.environ["COMP_LINE"])))
    elif flags.shell_completion and (script := SCRIPTS.get("".join(overrides[:1]))):
        print(script)
    else:
        return False
    return True


@interruptible()
def run_hydra(
    config_name: str,
    register: Callable[[], None],
    task: Callable[[DictConfig], int | None],
    extend: Callable[..., list[str]] | None = None,
) -> None:
    """Entry of a console command: `register()` the schemas, compose from `sys.argv`, run `task`, exit.

    A `ValueError` is a user error and prints one line, as does an `OSError`, say of a disk that is full;
    with `FLA_TRAIN_TRACEBACK=1` they are raised instead. `extend(overrides, sweep=..., config_dir=...)` may
    add overrides to those given.
    In a sweep (`-m`) the other jobs still run, and the exit code is the highest; 2 if all are `LeftOut`.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # no Python process of ours imports from the current folder
    flags = FlagParser().parse_intermixed_args()
    overrides = flags.overrides
    words = [word for word in sys.argv[1:] if word not in overrides]
    config_name = flags.config_name or config_name
    try:
        if flags.experimental_rerun:
            raise ValueError(
                "--experimental-rerun loads a pickle, which may run code: give the overrides again"
            )
        if _answer(ConfigFiles(config_name, flags.config_dir), flags, overrides):
            return
        if not flags.shell_completion:
            check_names(ConfigFiles(config_name, flags.config_dir), overrides)
            register()
            overrides = as_written(config_name, overrides, sweep=flags.multirun)
            if extend is not None:
                overrides = extend(overrides, sweep=flags.multirun, config_dir=flags.config_dir)
            check = check_sweep if flags.multirun else compose
            check(config_name, overrides, config_dir=flags.config_dir)
    except BrokenPipeError:  # `fla-train --list | head` has read enough
        leave(0)
    except (ValueError, OSError) as error:
        sys.exit(fail_by(error))
    sys.argv[1:] = [*words, *overrides]  # Hydra takes no overrides on both sides of flags

    codes: list[int] = []
    left_out: list[LeftOut] = []
    begun = False

    def guarded(config: DictConfig) -> None:
        nonlocal begun
        begun = True
        try:
            codes.append(task(config) or 0)
        except (ValueError, OmegaConfBaseException, OSError) as error:
            if os.environ.get("FLA_TRAIN_TRACEBACK"):
                raise
            codes.append(fail_by(error))
        except LeftOut as error:
            left_out.append(error)
        except KeyboardInterrupt:
            fail("interrupted")
            sys.exit(INTERRUPTED)  # ends a sweep too

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors; else it prints them and exits with 1
    try:
        hydra.main(version_base="1.3", config_path=CONFIG_PATH, config_name=config_name)(guarded)()
    except Exception as failure:
        if begun or os.environ.get("FLA_TRAIN_TRACEBACK"):
            raise
        if isinstance(failure, OSError) and not isinstance(failure, HydraException):
            sys.exit(fail_by(failure))  # the record of a sweep can't be written
        sys.exit(fail(one_line(failure)))  # Hydra's: flags, or jobs of a sweep that do not fit as a whole
    except SystemExit as end:
        if flags.cfg and end.code == 1:  # --package names no key, as Hydra has said
            sys.exit(2)
        raise
    if left_out and not codes:
        sys.exit(fail(left_out[-1]))
    if code := max(codes, default=0):  # a job of a sweep that failed did not keep the others from running
        sys.exit(code)
