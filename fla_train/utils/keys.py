"""Declare config keys with their rules: limits, choices, and where a value may come from or go to.

    @dataclass
    class OptimizerConfig:
        name: str = key(choices=("adamw", "muon"), resume="fixed")
        lr: float = key(at_least=0)

        def check(self) -> Iterator[str]:       # optional: rules that involve several keys
            if self.name == "muon" and self.lr == 0:
                yield "lr=0 trains nothing: use a positive rate"

`find_errors` checks all keys of a config and of its sections. `rule` returns a rule of a key.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from functools import cache
from inspect import formatannotation
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

AUTO = "auto"
# OmegaConf's mark of a value to be given, not imported because exported models have a copy of this file.
MISSING = "???"
LIMITS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}
RULES = {*LIMITS, "choices", "classes", "free", "from_folder", "from_task", "from_weights", "keys"}
RULES |= {"nonempty", "prepared", "private", "required", "resume", "sources", "type", "word"}


def key(default: Any = MISSING, *, factory: Callable[[], Any] | None = None, **rules: Any) -> Any:
    """Declare a field of a config with its rules.

    Limits (`at_least`, `at_most`, `above`, `below`) hold for a number, or for each number in a list. Null
    and, if the type allows text, `word` (default: "auto") are exempt. `choices` are the allowed values. With
    `classes=True` the value, or an entry of the list, may be an import path, `package.module:NAME`. With
    `nonempty=True` a list or mapping needs an entry. `required` describes a value that must be set although
    its default is null. `type` is that of a value annotated as `Any`, because Hydra adds no keys to a typed
    mapping.

    The other rules of a section hold for its keys too, unless they have their own:

    - `resume`: how a resumed run treats a changed value. "fixed": it raises an error. "free": it ignores the
      change. None: it logs the change. "data": it raises an error if the change leads to other tokens.
    - `from_folder`: the values that a command takes from the config in `run.dir`; None: all.
    - `free`: whether a setting of a model changes no trained weight, and results only by rounding. "machine":
      it describes the machine, so that it is not saved with the model.
    - `from_task`, `from_weights`: whether the task or `init_from` sets the key.
    - `prepared`: what prepared data keep of the key. "fingerprint": it determines the tokens, and so the
      folder. None: the manifest records it. "nothing": the tokens of a corpus do not depend on it.
    - `private`: whether the model card leaves the key out.
    - `sources`: the values of `data.source` with which the key is read; None: all.

    Args:
        factory: creates the default of a section, a list or a mapping.
        rules: rules by name. `keys` has further ones, {name of a rule: {key of an untyped section: rule}}.
    """
    assert rules.keys() <= RULES
    if factory is not None:
        return field(default_factory=factory, metadata=rules)
    return field(default=default, metadata=rules)


def find_errors(config: Any, prefix: str = "", base: type | None = None) -> list[str]:
    """List all errors of a config, one line each, starting with the dotted key.

    A section's `check` runs once its keys are of their types and within their limits.

    Args:
        prefix: dotted name of the config in messages, with a trailing dot.
        base: class of the config that declares the keys, if a library has added fields to it.
    """
    known, where = {entry.name for entry in fields(config)}, "see docs/configuration.md"
    errors = [f"{prefix}{name} is not a key: {where}" for name in vars(config) if name not in known]
    inner_errors = []
    for entry in fields(base or config):
        name, value, rules = prefix + entry.name, getattr(config, entry.name), entry.metadata
        for inner, section in _sections(name, value):
            inner_errors += find_errors(section, f"{inner}.")
        errors += type_errors(name, value, rules.get("type", entry.type)) or _value_errors(name, value, rules)
    if not errors and hasattr(config, "check"):
        errors += [prefix + line for line in config.check()]
    return errors + inner_errors


def require_valid(config: Any, prefix: str = "", base: type | None = None) -> None:
    """Raise `ValueError` with all errors of `find_errors`, if there is one."""
    require_none(find_errors(config, prefix, base))


def require_none(errors: Sequence[str]) -> None:
    """Raise `ValueError` with these errors, one per line, if there is one."""
    if errors:
        raise ValueError("\n  ".join(errors))


def rule(config_type: type, kind: str, name: str) -> Any:
    """Return the rule `kind` of a dotted key such as `trainer.seq_len`, or of a key within it."""
    rules = _rules(config_type, kind)
    while name not in rules:
        name = name.rpartition(".")[0]
    return rules[name]


@cache
def _rules(config_type: type, kind: str) -> dict[str, Any]:
    """Return the rule `kind` of every key by its dotted name; "" has that of keys without one, None."""

    def collect(section: type, prefix: str, inherited: Any) -> Iterator[tuple[str, Any]]:
        types = get_type_hints(section)
        for entry in fields(section):
            name, value = f"{prefix}{entry.name}", entry.metadata.get(kind, inherited)
            yield name, value
            for inner, inner_rule in entry.metadata.get("keys", {}).get(kind, {}).items():
                yield f"{name}.{inner}", inner_rule
            for inner_type in filter(is_dataclass, get_args(types[entry.name]) or (types[entry.name],)):
                yield from collect(inner_type, f"{name}.", value)

    return {"": None, **dict(collect(config_type, "", None))}


def type_errors(name: str, value: Any, annotation: Any) -> list[str]:
    """List the error of a value that is of another type than its annotation."""
    return [] if fits(value, annotation) else [f"{name}={value!r:.80} must be {formatannotation(annotation)}"]


def fits(value: Any, annotation: Any) -> bool:
    """Return whether a value of JSON or YAML is of a type. Booleans are not numbers; lists may be tuples."""
    origin, types = get_origin(annotation), get_args(annotation)
    if origin in (UnionType, Union):  # the type of Optional[VALUE] is Union
        return any(fits(value, each) for each in types)
    if origin is tuple:
        return isinstance(value, list | tuple) and len(value) == len(types) and all(map(fits, value, types))
    if types:  # list[VALUE], Sequence[VALUE] or dict[str, VALUE]
        children = value.values() if isinstance(value, dict) else value
        allowed = list | tuple if origin is list else origin
        return isinstance(value, allowed) and all(fits(child, types[-1]) for child in children)
    if annotation is float:
        return type(value) is int or isinstance(value, float)
    return annotation is Any or type(value) is annotation


def _sections(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the sections in a key's value: itself, or those in a mapping."""
    if is_dataclass(value):
        yield name, value
    elif isinstance(value, Mapping):
        yield from ((f"{name}.{inner}", content) for inner, content in value.items() if is_dataclass(content))


def _value_errors(name: str, value: Any, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors of a value of key `name`, or of each value in a list or mapping."""
    limits = {limit: metadata[limit] for limit in LIMITS if limit in metadata}
    choices, classes, word = metadata.get("choices", ()), metadata.get("classes"), metadata.get("word", AUTO)
    if metadata.get("nonempty") and value in ([], (), {}):
        yield f"{name} is empty: give at least one value"
    elif value in (None, "") and "required" in metadata:
        yield f"{name} must be set: {metadata['required']}"
    elif isinstance(value, Mapping):
        for inner, content in value.items():
            yield from _value_errors(f"{name}.{inner}", content, {})
    elif isinstance(value, list | tuple):
        for content in value:
            yield from _value_errors(name, content, metadata)
    elif choices and value is not None and value not in choices and not (classes and ":" in value):
        words = ", ".join(str(choice).lower() for choice in choices)
        yield f"{name}={value} must be one of {words}{', or package.module:Name' * bool(classes)}"
    elif limits and isinstance(value, str) and value != word:
        yield f"{name}={value} must be a number, or {word}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name}={value} must be a finite number"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield f"{name}={value} must lie in -2^63..2^63 - 1"
    elif isinstance(value, int | float) and not all(LIMITS[limit](value, limits[limit]) for limit in limits):
        bounds = (f"{limit.replace('_', ' ')} {bound:g}" for limit, bound in limits.items())
        yield f"{name}={value} must be {' and '.join(bounds)}"
