"""Overrides as their author wrote them, and error messages for those that do not fit a config."""

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fla_train.cli.config_files import ConfigFiles
from fla_train.cli.names import is_open, key_error, null_part_error, option_error
from fla_train.hub.saved_config import quote

COMPLETE = ("trainer", "optimizer", "schedule", "launch", "logger", "hub", "run")  # their files have all keys
QUOTED = r"'(?:[^'\\]|\\.)*'"
SWEPT = re.compile(rf"{QUOTED}|[^,]+", re.DOTALL)  # one value of KEY=1,2
ITEM = re.compile(rf"{QUOTED}|[^\s,'\"\[\](){{}}]+(?=\s*[,\]])")  # one text of KEY=[a,b]


def as_written(config_name: str, overrides: Sequence[str], *, sweep: bool = False) -> list[str]:
    """Quote the values that Hydra would change: `hub.tag=1.10` is the text 1.10, `data.path=a,b` one path.

    A key whose type is text takes what stands behind `=` literally; a list of texts, each of its items. Hydra
    reads text in single quotes, with its `${...}`, and `null` where the type allows it. The schemas must be
    registered.

    Args:
        sweep: a comma separates values.

    Raises:
        ValueError: an override is not UTF-8 text.
    """
    return [_as_written(config_name, override, sweep) for override in overrides]


def check_names(configs: ConfigFiles, overrides: Sequence[str]) -> None:
    """Check names by the config files alone, within a second: the schemas import torch and transformers.

    Of keys only those in sections whose files name all of them. Composing checks everything.

    Raises:
        ValueError: it names each option and each key that does not exist.
    """
    chosen = {
        group: option
        for group, option in configs.chosen(overrides).items()
        if option not in (None, "null") and re.fullmatch(r"[\w./-]+", option)  # no values of a sweep
    }
    errors = [option_error(configs, *choice) for choice in chosen.items() if not configs.has(*choice)]
    content = yaml.safe_load(configs.own_keys) or {}
    content |= {group: yaml.safe_load(configs.keys(group, option)) for group, option in chosen.items()}
    config = OmegaConf.create({key: content.get(key) for key in (*content, *configs.defaults)})
    for override in overrides:
        key, sign, value = override.lstrip("+").partition("=")
        section = key.split(".")[0]
        if sign and "." in key and section in COMPLETE and config.get(section) is not None:
            errors += [f"{override}: {error}" for error in [key_error(configs, config, key, value)] if error]
    if errors:
        raise ValueError("\n  ".join(errors))


def _as_written(config_name: str, override: str, sweep: bool) -> str:
    key, sign, value = override.partition("=")
    try:
        override.encode()
    except UnicodeEncodeError as failure:
        raise ValueError(f"{key}: not UTF-8 text; check the locale (LANG=C.UTF-8) or the value") from failure
    annotation = _annotation(config_name, key.lstrip("+"))
    if annotation in (str, str | None):
        keep = ("null",) if annotation == str | None else ()
        if not sweep:
            value = _literal(value, keep)
        elif not re.fullmatch(r"\w+\(.*\)", value):  # such as choice(a,b)
            value = SWEPT.sub(lambda match: _literal(match[0], keep), value)
    elif annotation == list[str]:
        value = ITEM.sub(lambda match: _literal(match[0]), value)
    elif not value.startswith(("[", "{", "'", '"')):  # which Hydra shall explain where it can't read it
        value = value if _parsed(value) is not None else quote(value)
    return f"{key}{sign}{value}"


def _literal(text: str, keep: Sequence[str] = ()) -> str:
    """`text` in quotes, unless Hydra reads it as it is, it is one of `keep`, or it has quotes already."""
    same = _parsed(text) == text and "${" not in text
    return text if same or text in keep or re.fullmatch(QUOTED, text, re.DOTALL) else quote(text)


def _parsed(text: str) -> object:
    """What Hydra reads; None where it can't."""
    try:
        override = OverridesParser.create().parse_override(f"key={text}")
    except HydraException:
        return None
    return override if override.is_sweep_override() or override.value() is None else override.value()


def _annotation(config_name: str, key: str) -> Any:
    """The type that the schemas declare for a dotted key; None if they have no such key."""
    schemas = ConfigStore.instance().repo
    stored = schemas.get(f"{config_name}_schema.yaml") or schemas.get("train_schema.yaml")
    found: Any = stored and OmegaConf.get_type(stored.node)
    for name in key.split("."):
        if get_origin(found) is dict:
            found = get_args(found)[1]
            continue
        section = next((part for part in (found, *get_args(found)) if is_dataclass(part)), None)
        found = get_type_hints(section).get(name) if section else None
        if found is Any and f"{name}_schema.yaml" in schemas:
            found = OmegaConf.get_type(schemas[f"{name}_schema.yaml"].node)
    return found


def override_errors(
    configs: ConfigFiles,
    overrides: Sequence[str],
    compose_with: Callable[[Sequence[str]], DictConfig],
    *,
    sweep: bool = False,
) -> list[str]:
    """A line for each override that does not fit those that do; in a sweep, for each of its values.

    Choices of groups come first: keys depend on them. `compose_with` composes a config with overrides.
    """
    try:
        config = compose_with([])
    except Exception as failure:  # --config-name or the folder of --config-dir
        return [one_line(failure)]
    good: list[str] = []
    errors: dict[str, list[str]] = {}
    for override in sorted(overrides, key=lambda text: "." in text.split("=")[0]):
        fits = []
        for single in _single_values(override) if sweep else [override]:
            try:
                composed = compose_with([*good, single])
            except Exception as failure:
                reason = [_reason(configs, config, single, failure)]
            else:
                reason = addition_errors(configs, composed, [single])
                fits += [] if reason else [(single, composed)]
            errors.setdefault(override, []).extend(reason)
        if fits:
            good.append(fits[0][0])
            config = fits[0][1]
    return [reason for override in dict.fromkeys(overrides) for reason in errors[override]]


def _single_values(override: str) -> list[str]:
    """An override for each of its values: `seed=1,2` is seed=1 and seed=2."""
    try:
        parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_override(override)
        if not parsed.is_sweep_override():
            return [override]
        return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
    except HydraException:  # reported when it is composed
        return [override]


def _reason(configs: ConfigFiles, config: DictConfig, text: str, failure: Exception) -> str:
    """`text: what is wrong with it`, an override that Hydra refused to add to what gave `config`."""
    if "=" not in text and not text.startswith("~"):
        path = f"{'checkpoint' if 'checkpoint' in config else 'run.dir'}={text}"
        return f"{text}: write {path if os.path.exists(text) else 'KEY=VALUE or GROUP=OPTION'}"
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return f"{text}: {one_line(failure)}"
    if override.is_sweep_override():
        return f"{text}: several values are KEY=1,2 with -m, to run once with each, or 'KEY=[1,2]' for a list"
    key, value = override.key_or_group, override.value()
    group = key.split("/")[0]
    if key in configs.defaults and value is None:
        if configs.defaults[key] is None:
            return f"{text}: write ~{key} to choose none"
        return f"{text}: choose an option of {key}: fla-{configs.config_name} --list {key} prints them"
    if group in configs.defaults and not isinstance(value, dict):
        for option in value if isinstance(value, list) else [value]:
            if not configs.has(group, str(option)):
                error = option_error(configs, group, str(option))
                return error if error.startswith(text.lstrip("+")) else f"{text}: {error}"
    if isinstance(value, dict) and (error := null_part_error(configs, config, key)):
        return f"{text}: {error}"  # Hydra can't merge a mapping into null
    plain = "VALUE" if value is None else text.partition("=")[2]
    # A key inside of a mapping, or in the file of an option, is another than the override's.
    unknown = re.search(r"Key '.*' (?:is )?not in .*\n\s*full_key: (\S+)", str(_cause(failure)))
    if unknown and unknown[1].startswith(f"{key}.") and is_open(config, key):
        entry, _, name = unknown[1].removeprefix(f"{key}.").rpartition(".")
        if entry:  # of a type of its own, whose keys are fixed
            known = OmegaConf.select(config, key)._metadata.element_type.__dataclass_fields__
            return f"{text}: {key}.{entry} has no key {name}; it has {', '.join(known)}"
        return f"{text}: {key} has no {name} yet: write {shlex.quote(f'+{text}')} to add it"
    if unknown and not key.startswith(unknown[1]):
        key, plain = unknown[1], "VALUE"
    error = key_error(configs, config, key, plain) or one_line(failure)
    if error.endswith("converted to Integer") and re.fullmatch(r"\d+(\.0*)?e\d+|\d+\.0*", plain, re.I):
        error += f": write {key}={float(plain):.0f}"
    return f"{text}: {error}"


def addition_errors(configs: ConfigFiles, config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Errors of `+KEY=VALUE` whose key the schema lacks: Hydra adds it all the same."""
    added = {text: text.lstrip("+").partition("=") for text in overrides if text.startswith("+")}
    errors = {
        text: key_error(configs, config, key, value)
        for text, (key, _, value) in added.items()
        if key not in configs.defaults
    }
    return [f"{text}: {error}" for text, error in errors.items() if error]


def _cause(failure: BaseException) -> BaseException:
    """The error behind Hydra's wrapping.

    Under a debugger OmegaConf chains its errors to templates of their messages, so the first one counts.
    """
    while failure.__cause__ is not None and not isinstance(failure, OmegaConfBaseException):
        failure = failure.__cause__
    return failure


def one_line(failure: Exception) -> str:
    """The cause behind Hydra's wrapping, without its `full_key:` trailer and its search path."""
    cause = _cause(failure)
    text = str(cause).partition("Config search path:")[0].partition("See https://hydra.cc")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return " ".join(kept) or type(cause).__name__
