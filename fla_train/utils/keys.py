"""Declare config keys with their rules: limits, choices, and the changes that a resumed run allows.

    @dataclass
    class OptimizerConfig:
        name: str = key(choices=("adamw", "muon"), resume="fixed")
        lr: float = key(at_least=0)

        def check(self) -> Iterator[str]:       # optional: rules that involve several keys
            if self.name == "muon" and self.lr == 0:
                yield "lr=0 trains nothing: use a positive rate"

`find_errors` checks all keys of a config and of its sections. `resume_rule` returns how a resumed run treats
a changed key.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from omegaconf import MISSING

AUTO = "auto"
# How a resumed run treats a changed value: raise an error (fixed), ignore it (free), or log it (logged). For
# `data` keys, it raises an error if the change leads to other tokens.
Rule = Literal["fixed", "free", "logged", "data"]
LIMITS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}


def key(
    default: Any = MISSING,
    *,
    factory: Callable[[], Any] | None = None,
    choices: tuple[bool | str, ...] = (),
    classes: bool = False,
    resume: Rule | None = None,
    rules: Mapping[str, Rule] | None = None,
    **limits: float,
) -> Any:
    """Declare a field of a config with its rules.

    Args:
        factory: creates the default of a section, a list or a mapping.
        choices: the allowed values.
        classes: also allow an import path, `package.module:NAME`.
        resume: how a resumed run treats a change; None: the rule of the section, and at the root `logged`.
        rules: `resume` of single keys in an untyped section.
        limits: at_least, at_most, above, below: of a number, or of each number in a list. Null and, if the
            type allows text, "auto" are exempt.
    """
    assert limits.keys() <= LIMITS.keys()
    metadata = {
        "limits": limits,
        "choices": choices,
        "classes": classes,
        "resume": resume,
        "rules": rules or {},
    }
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def find_errors(config: Any, prefix: str = "") -> list[str]:
    """List all errors of a config, one line each, starting with the dotted key.

    A section's `check` runs once its keys are within their limits.

    Args:
        prefix: dotted name of the config in messages, with a trailing dot.
    """
    known = {entry.name: entry.metadata for entry in fields(config)}
    errors, inner_errors = [], []
    for name, value in vars(config).items():
        if name not in known:
            errors.append(f"{prefix}{name} is not a key: see docs/configuration.md")
        for inner, section in _sections(name, value):
            inner_errors += find_errors(section, f"{prefix}{inner}.")
        errors += _value_errors(f"{prefix}{name}", value, known.get(name, {}))
    if not errors and hasattr(config, "check"):
        errors += [prefix + line for line in config.check()]
    return errors + inner_errors


def require_valid(config: Any, prefix: str = "") -> None:
    """Raise `ValueError` with all errors of `find_errors`, if there is one."""
    if errors := find_errors(config, prefix):
        raise ValueError("\n  ".join(errors))


def resume_rule(config_type: type, name: str) -> Rule:
    """Return the rule of a dotted key such as `trainer.seq_len`, or of a key within it."""
    rules = _resume_rules(config_type)
    while name not in rules:
        name = name.rpartition(".")[0]
    return rules[name]


@cache
def _resume_rules(config_type: type) -> dict[str, Rule]:
    def collect(section: type, prefix: str, inherited: Rule) -> Iterator[tuple[str, Rule]]:
        types = get_type_hints(section)
        for entry in fields(section):
            name, rule = f"{prefix}{entry.name}", entry.metadata.get("resume") or inherited
            yield name, rule
            for inner, inner_rule in entry.metadata.get("rules", {}).items():
                yield f"{name}.{inner}", inner_rule
            for inner_type in filter(is_dataclass, get_args(types[entry.name]) or (types[entry.name],)):
                yield from collect(inner_type, f"{name}.", rule)

    return {"": "logged", **dict(collect(config_type, "", "logged"))}


def _sections(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the sections in a key's value: itself, or those in a mapping."""
    if is_dataclass(value):
        yield name, value
    elif isinstance(value, Mapping):
        yield from ((f"{name}.{inner}", content) for inner, content in value.items() if is_dataclass(content))


def _value_errors(name: str, value: Any, metadata: Mapping[str, Any]) -> Iterator[str]:
    limits, choices = metadata.get("limits", {}), metadata.get("choices", ())
    if isinstance(value, Mapping):
        for inner, content in value.items():
            yield from _value_errors(f"{name}.{inner}", content, {})
    elif isinstance(value, list | tuple):
        for content in value:
            yield from _value_errors(name, content, metadata)
    elif (
        choices and value is not None and value not in choices and not (metadata["classes"] and ":" in value)
    ):
        yield f"{name}={value} must be one of {', '.join(str(choice).lower() for choice in choices)}"
    elif limits and isinstance(value, str) and value != AUTO:
        yield f"{name}={value} must be a number, or auto"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name}={value} must be a finite number"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield f"{name}={value} must lie in -2^63..2^63 - 1"
    elif isinstance(value, int | float) and not all(LIMITS[word](value, limits[word]) for word in limits):
        bounds = (f"{word.replace('_', ' ')} {bound:g}" for word, bound in limits.items())
        yield f"{name}={value} must be {' and '.join(bounds)}"
