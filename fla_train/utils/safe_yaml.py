"""Load YAML without anchors, with which a few bytes stand for gigabytes. See `safe_files`."""

import re
from typing import Any

import yaml

_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """Load YAML as Hydra reads it: no duplicate keys, `1e-3` is a number, a date is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            raise ValueError(f"line {node.start_mark.line + 1} begins a mapping that has a key twice")
        return found


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_yaml(text: str, deepest: int) -> Any:
    """Return the content of a YAML text of at most `deepest` levels.

    Raises:
        ValueError: it is invalid YAML, or uses an anchor or an alias.
        RecursionError: it is nested too deeply.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_SafeLoader):
            if getattr(event, "anchor", None) is not None:  # also true for an alias
                raise ValueError("it uses a YAML anchor or alias: write the values out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > deepest:  # before the loader, which is recursive
                raise RecursionError
        return _Loader(text).get_single_data()
    except yaml.YAMLError as failure:
        raise ValueError(str(failure)) from failure
