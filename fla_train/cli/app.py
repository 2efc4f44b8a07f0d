"""What every Hydra command shares: composing the config, reporting faults in plain lines, exit codes.

Exit codes: 0 done, 1 the work failed, 2 the request or a file that it names is at fault and would be again,
75 stopped on request, 130 interrupted.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fla_train.cli.help import help_text
from fla_train.data.faults import Interrupted
from fla_train.hub.saved_config import escape

CONFIG_PATH = "pkg://fla_train.configs"
SWEEP = ("-m", "--multirun")
INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C


class LeftOut(Exception):
    """Raised by a job of a sweep that is not this process's to do."""


def compose(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose `configs/<config_name>.yaml` with Hydra overrides.

    Raises:
        ValueError: naming every override that does not fit, with Hydra's reason for each.
    """
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("fla_train.configs", version_base="1.3"):
        try:
            return hydra.compose(config_name, overrides=list(overrides))
        except Exception as failure:
            faults = _faults(config_name, overrides)
            # Faults that show only in combination have no single override to blame.
            raise ValueError("\n  ".join(faults) if faults else _one_line(failure)) from failure


def _faults(config_name: str, overrides: Sequence[str]) -> list[str]:
    """The overrides that do not fit those that do. Choices of groups come first: values depend on them."""
    good: list[str] = []
    faults = {}
    for override in sorted(overrides, key=lambda text: "." in text.split("=")[0]):
        try:
            hydra.compose(config_name, overrides=[*good, override])
            good.append(override)
        except Exception as failure:
            faults[override] = f"{override}: {_one_line(failure)}"
    return [faults[override] for override in overrides if override in faults]


def _one_line(failure: Exception) -> str:
    """The cause behind Hydra's wrapping, without its `full_key:` trailer.

    Under a debugger OmegaConf chains its errors to templates of their messages, so the first one counts.
    """
    while failure.__cause__ is not None and not isinstance(failure, OmegaConfBaseException):
        failure = failure.__cause__
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return " ".join(kept) or type(failure).__name__


def quote(text: str) -> str:
    """`text` as Hydra reads it back; it gives commas, quotes and `${` a meaning."""
    text = re.sub(r"(\\*)'", r"\1\1\'", escape(text))  # Hydra: backslashes escape quotes, too
    trailing = len(text) - len(text.rstrip("\\"))
    return f"'{text}" + "\\" * trailing + "'"


def readable(argument: str) -> str:
    """An override whose value Hydra's grammar can't read, such as the path `/Größe (1)`, with it as text.

    What begins like a list, a mapping or a quoted text was not meant as plain text, and stays.
    """
    key, sign, text = argument.partition("=")
    if not sign or text.startswith(("[", "{", "'", '"')):
        return argument
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return f"{key}={quote(text)}"
    return argument


def leave(code: int) -> NoReturn:
    """End with this status. Of a terminal that has gone Python would make 120, since it can't be flushed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def fail(message: object, code: int = 2) -> int:
    """Print one `error:` line to stderr and return the exit code, also where the terminal has gone."""
    with suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def fail_by(fault: Exception) -> int:
    """`fail` for what ended a command: the exit code is 1 where the machine or the network failed, else 2."""
    if isinstance(fault, OSError):
        place = f"{fault.filename}: " if fault.filename else ""
        return fail(f"{place}{fault.strerror or ' '.join(str(fault).split())}", code=1)
    message = _one_line(fault) if isinstance(fault, OmegaConfBaseException) else fault
    return fail(message, code=1 if isinstance(fault, Interrupted) else 2)


def run_hydra(
    config_name: str,
    register: Callable[[], None],
    task: Callable[[DictConfig], int | None],
    extend: Callable[[Sequence[str]], list[str]] = list,
) -> None:
    """Entry of a console command: `register()` the schemas, compose from `sys.argv`, run `task`, exit.

    A `ValueError` is the user's fault and prints one line, as does an `OSError`, say of a disk that is full;
    with `FLA_TRAIN_TRACEBACK=1` they are raised instead. `extend` may add overrides to those given, but for a
    sweep's.
    In a sweep (`-m`) the other jobs still run, and the exit code is the highest; 2 if all are `LeftOut`.
    """
    arguments = [a if a.startswith("-") else readable(a) for a in sys.argv[1:]]
    # In front: Hydra takes no overrides on both sides of it.
    sys.argv[1:] = sorted(arguments, key=lambda a: a not in SWEEP)
    flags = [a for a in sys.argv[1:] if a.startswith("-")]
    overrides = [a for a in sys.argv[1:] if not a.startswith("-")]
    if {"-h", "--help"} & set(flags):
        print(help_text(config_name, overrides))
        return
    register()
    if not set(SWEEP) & set(flags):
        try:
            overrides = extend(overrides)
        except ValueError as fault:
            sys.exit(fail(fault))
        sys.argv[1:] = [*flags, *overrides]
    if not flags:  # sweeps and Hydra's own flags (--cfg, -m) go straight to Hydra
        try:
            compose(config_name, overrides)
        except ValueError as fault:
            sys.exit(fail(fault))
        GlobalHydra.instance().clear()

    codes: list[int] = []
    left_out: list[LeftOut] = []

    def guarded(config: DictConfig) -> None:
        try:
            codes.append(task(config) or 0)
        except (ValueError, OmegaConfBaseException, OSError) as fault:
            if os.environ.get("FLA_TRAIN_TRACEBACK"):
                raise
            codes.append(fail_by(fault))
        except LeftOut as fault:
            left_out.append(fault)
        except KeyboardInterrupt:
            fail("interrupted")
            sys.exit(INTERRUPTED)  # ends a sweep too

    hydra.main(version_base="1.3", config_path=CONFIG_PATH, config_name=config_name)(guarded)()
    if left_out and not codes:
        sys.exit(fail(left_out[-1]))
    if code := max(codes, default=0):  # a job of a sweep that failed did not keep the others from running
        sys.exit(code)
