"""`--help`, `--list` and shell completion of the Hydra commands.

They show the commented YAML files themselves, so that they can't fall behind them.
"""

import textwrap
from collections.abc import Sequence

import yaml
from hydra.plugins.completion_plugin import CompletionPlugin

from fla_train.cli.config_files import ConfigFiles
from fla_train.hub.saved_config import flat

USAGE = """\
usage: fla-{name} [KEY=VALUE | GROUP=OPTION]... [FLAG]...

  KEY=VALUE         set a key (a.b=3 for a key b below a); null unsets it
  GROUP=OPTION      choose a file of a group; --help then shows its keys
  --list [GROUP]    the options of each group, a line each
  --cfg job         print the composed config and stop
  -m                run once for each combination of values separated by commas (KEY=1,2)
  --config-dir DIR  also take options from DIR/GROUP/OPTION.yaml
  --version         print the version
  -sc install=bash  print a shell script that completes names: eval "$(fla-{name} -sc install=bash)"
"""
WIDTH = 110
FOCUS = {"prepare": ("data", "experiment")}  # the groups whose keys a command's help shows; of the others all


def help_text(configs: ConfigFiles, overrides: Sequence[str] = ()) -> str:
    """Usage, groups with their options, and every key with its default and comment."""
    parts = [configs.intro, USAGE.format(name=configs.config_name)]
    chosen = configs.chosen(overrides)
    if chosen:
        parts.append("Groups (* is chosen)")
        for group, option in chosen.items():
            names = " ".join(f"*{name}" if name == option else name for name in configs.options(group))
            parts.append(
                textwrap.fill(names, WIDTH, initial_indent=f"  {group:<11}", subsequent_indent=" " * 13)
            )
        parts.append("")
    parts.append("Keys, with their defaults\n\n" + configs.own_keys)
    for group, option in chosen.items():
        if option in (None, "null") or group not in FOCUS.get(configs.config_name, chosen):
            continue
        keys = configs.keys(group, option)
        if configs.is_global(group, option):
            parts.append(f"# {group}={option} changes these keys; of two lines the later counts\n{keys}")
        else:
            parts.append(f"{group}:    # {group}={option}\n{textwrap.indent(keys, '  ')}")
    return "\n".join(parts)


def list_text(configs: ConfigFiles, groups: Sequence[str] = ()) -> str:
    """The options of `groups` (default: all that leave a choice) with a line on each."""
    lines = []
    for group in groups or configs.defaults:
        options = configs.options(group)
        if group in groups or len(options) > 1:
            width = max(map(len, options), default=0)
            lines.append(f"{group}=")
            for option in options:
                about = textwrap.shorten(
                    configs.description(group, option), WIDTH - 3 - width, placeholder=" ..."
                )
                lines.append(f"  {option:<{width}} {about}")
            lines.append("")
    return "\n".join(lines)


def completions(configs: ConfigFiles, line: str) -> list[str]:
    """What the last word of a command line can become: options of a group, keys, or files as a value."""
    overrides = line.split()[1:]
    word = overrides.pop() if overrides and not line[-1].isspace() else ""
    sign, name = (word[:1], word[1:]) if word.startswith(("+", "~")) else ("", word)
    key, equals, value = name.partition("=")
    if key in configs.defaults and equals:
        found = [f"{key}={option}" for option in configs.options(key)]
    elif equals:
        found = [f"{key}={path}" for path in CompletionPlugin.complete_files(value)]
    else:
        found = [f"{group}=" for group in configs.defaults]
        found += [f"{key}=" for key, _ in flat(yaml.safe_load(configs.own_keys) or {})]
        for group, option in configs.chosen(overrides).items():
            if option in (None, "null") or configs.is_global(group, option):
                continue
            if name.startswith(f"{group}."):
                keys = yaml.safe_load(configs.keys(group, option)) or {}
                found += [f"{group}.{key}=" for key, _ in flat(keys)]
            else:
                found.append(f"{group}.")
    return sorted(sign + text for text in found if text.startswith(name))
