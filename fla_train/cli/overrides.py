"""Command-line overrides: quote text values, and explain every override that does not fit a config.

Suggestions come from Hydra's config repository (options) and from the composed config (keys), by difflib.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_origin, get_type_hints

from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fla_train.cli.scales import SCALES
from fla_train.utils.overrides import flatten, quote

GROUPS = ("experiment", "scale", "recipe", "debug")  # groups without a key
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'", re.DOTALL)
FRAGMENTS = ("model/batch", "model/size", "model/variant", "model/zoo")  # other options are composed of these
HYDRA = "nothing reads Hydra's settings: run.dir=DIR is the folder, -m sweeps, run.job=N is a job of a sweep"


def repository(config_dir: str | None = None) -> ConfigRepository:
    """Return Hydra's repository of our config files and those of `--config-dir`."""
    version.setbase("1.3")
    path = create_config_search_path("pkg://fla_train.configs")
    if config_dir:
        path.append("command-line", f"file://{os.path.abspath(config_dir)}")
    return ConfigRepository(path)


def options(repo: ConfigRepository, group: str) -> list[str]:
    """Return the options of a group, including those in subfolders: `delta_net/tiny`."""
    if group == "scale":
        return list(SCALES)
    configs = repo.get_group_options(group, ObjectType.CONFIG)
    names = [name for name in configs if not name.startswith("common")]
    for folder in repo.get_group_options(group, ObjectType.GROUP):
        if f"{group}/{folder}" not in FRAGMENTS:
            names += [f"{folder}/{name}" for name in options(repo, f"{group}/{folder}")]
    return names


def quote_values(config_name: str, overrides: Sequence[str], *, sweep: bool = False) -> list[str]:
    """Quote values that Hydra would change: the text `hub.tag=1.10` stays 1.10, `data.path=a,b` is one path.

    The characters after `=` are literal for a key of type text, except `null` where the type allows it and
    text in single quotes. Other values are quoted only if Hydra cannot parse them.

    The schemas must be registered.

    Args:
        sweep: a comma separates values, which are left to Hydra.
    """
    words = []
    for override in overrides:
        key, sign, value = override.partition("=")
        kind = _annotation(config_name, key.lstrip("+"))
        if QUOTED.fullmatch(value) or (sweep and "," in value) or (value == "null" and kind is not str):
            pass
        elif kind in (str, str | None):
            value = value if _parsed(value) == value and "${" not in value else quote(value)
        elif not value.startswith(("[", "{", "'", '"')) and _parsed(value) is None:
            value = quote(value)
        words.append(f"{key}{sign}{value}")
    return words


def _parsed(text: str) -> object:
    """Return the value that Hydra reads; None if it can't."""
    try:
        override = OverridesParser.create().parse_override(f"key={text}")
    except HydraException:
        return None
    return override if override.is_sweep_override() or override.value() is None else override.value()


def _annotation(config_name: str, key: str) -> Any:
    """Return the type that the schemas declare for a dotted key; None without such a key."""
    schemas = ConfigStore.instance().repo
    stored = schemas.get(f"{config_name}_schema.yaml") or schemas.get("train_schema.yaml")
    kind: Any = stored and OmegaConf.get_type(stored.node)
    for name in key.split("."):
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
            continue
        section = next((x for x in (kind, *get_args(kind)) if is_dataclass(x)), None)
        kind = get_type_hints(section).get(name) if section else None
    return kind


def override_errors(
    repo: ConfigRepository, overrides: Sequence[str], compose_with: Callable[[Sequence[str]], DictConfig]
) -> list[str]:
    """Return a line for each override that does not fit.

    Options of groups come first, because keys depend on them. `compose_with` composes overrides.
    """
    try:
        config = compose_with([])
    except Exception as failure:  # --config-name or --config-dir is wrong
        return [one_line(failure)]
    good: list[str] = []
    errors: dict[str, list[str]] = {}
    in_order = sorted(overrides, key=lambda text: ("." in text.split("=")[0], text.startswith("scale=")))
    for override in in_order:
        try:
            composed = compose_with([*good, override])
            errors[override] = addition_errors(repo, composed, [override])
        except Exception as failure:
            errors[override] = [_reason(repo, config, override, failure)]
        if not errors[override]:
            good.append(override)
            config = composed
    return [reason for override in dict.fromkeys(overrides) for reason in errors[override]]


def addition_errors(repo: ConfigRepository, config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return an error for each override that Hydra accepts and nothing reads.

    These are `+KEY=VALUE` whose key the schema lacks, and Hydra's own settings.
    """
    added = [text for text in overrides if text.startswith(("+", "hydra"))]
    errors = {text: key_error(repo, config, text.lstrip("+").partition("=")[0]) for text in added}
    return [f"{text}: {error}" for text, error in errors.items() if error]


def _reason(repo: ConfigRepository, config: DictConfig, text: str, failure: Exception) -> str:
    """Return `text: reason` for an override with which Hydra fails, unlike without it (`config`)."""
    key, sign, value = text.lstrip("+~").partition("=")
    if not sign and not text.startswith("~"):
        path = f"{'checkpoint' if 'checkpoint' in config else 'run.dir'}={text}"
        return f"{text}: write {path if os.path.exists(text) else 'KEY=VALUE or GROUP=OPTION'}"
    known = options(repo, key) if repo.group_exists(key) else []
    is_name = re.fullmatch(r"[\w./-]*", value)
    if known and is_name and value not in known and not repo.config_exists(f"{key}/{value}"):
        close = _closest(value, known) or [name for name in known if value in name.split("/")]
        return f"{text}: unknown option{_did_you_mean(close)}\n    options of {key}: {', '.join(known)}"
    if "is not a ListConfig" in one_line(failure):
        return f"{text}: this key is a list: '{key}=[{value}]'"
    unknown = re.search(r"Key '.*' (?:is )?not in .*\n\s*full_key: (\S+)", str(_cause(failure)))
    if known and not unknown:
        return f"{text}: {one_line(failure)}"
    # The unknown key may be one in the file of an option, or in a mapping.
    named = unknown[1] if unknown and (known or unknown[1].startswith(key)) else key
    error = key_error(repo, config, named) or (unknown and f"no such key yet: write +{text} to add it")
    return f"{text}: {error or one_line(failure)}"


def key_error(repo: ConfigRepository, config: DictConfig, key: str) -> str | None:
    """Return why a key does not exist, with the closest ones; None if it exists or may be added."""
    parent, _, name = key.rpartition(".")
    group = key.split(".")[0]
    node = OmegaConf.select(config, parent, throw_on_resolution_failure=False) if parent else config
    schema = OmegaConf.get_type(node)
    if key.startswith("hydra"):
        return None if key == "hydra.searchpath" else HYDRA
    if is_dataclass(schema) and name in {field.name for field in fields(schema)}:
        return None
    if key in GROUPS:
        return "the first line of its file must be `# @package _global_`"
    if isinstance(node, DictConfig) and schema is dict and (name in node or parent not in ("", "model")):
        return None
    if parent and group in config and config[group] is None:
        return f"no {group} is chosen: add {group}=NAME, one of {', '.join(options(repo, group))}"
    content = OmegaConf.to_container(config, resolve=False)
    leaves = [leaf for leaf, _ in flatten(content)]
    known = {".".join(leaf.split(".")[:i]) for leaf in leaves for i in range(1, leaf.count(".") + 2)}
    known |= set(repo.get_group_options("", ObjectType.GROUP)) & {*content, *GROUPS}
    if group == "model" and "source" in config.get("model", {}):
        return f"unknown key {key}: fields of this model's class are model.config.FIELD"
    return f"unknown key {key}{_did_you_mean(_closest(key, known - {key})) or ': --help lists them'}"


def _closest(name: str, known: Iterable[str]) -> list[str]:
    """Return at most six names that are like `name` as a whole or have a word like its last word."""
    by_word: dict[str, list[str]] = {}
    for other in sorted(known):
        for word in {*re.split(r"[./]", other)}:
            by_word.setdefault(word, []).append(other)
    words = get_close_matches(re.split(r"[./]", name)[-1], by_word, n=2, cutoff=0.75)
    # A long group makes any two of its keys alike.
    whole = get_close_matches(name, known, n=3, cutoff=0.85 if "." in name else 0.75)
    return list(dict.fromkeys([*whole, *(other for word in words for other in by_word[word])]))[:6]


def _did_you_mean(names: Sequence[str]) -> str:
    return f": did you mean {' or '.join(names)}?" if names else ""


def _cause(failure: BaseException) -> BaseException:
    """Return the error behind Hydra's wrapping: the outermost of OmegaConf's, or the innermost cause."""
    while failure.__cause__ is not None and not isinstance(failure, OmegaConfBaseException):
        failure = failure.__cause__
    return failure


def one_line(failure: Exception) -> str:
    """Return the cause behind Hydra's wrapping, without its `full_key:` trailer and its search path."""
    cause = _cause(failure)
    text = str(cause).partition("Config search path:")[0].partition("See https://hydra.cc")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return " ".join(kept) or type(cause).__name__
