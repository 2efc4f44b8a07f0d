"""`--help`, `--list` and shell completion of the Hydra commands.

They show the commented YAML files themselves, so that they can't fall behind them. docs/cli.md shows USAGE,
EXIT_STATUS and what else stands here in tables.
"""

import re
import textwrap
from collections.abc import Sequence

import yaml
from hydra.plugins.completion_plugin import CompletionPlugin

from fla_train.cli.config_files import ConfigFiles, with_values
from fla_train.hub.saved_config import flat

USAGE = """\
usage: fla-{name} [KEY=VALUE | GROUP=OPTION]... [FLAG]...

  KEY=VALUE         set a key (a.b=3 for a key b below a); null unsets it
  GROUP=OPTION      choose a file of a group; --help then shows its keys
  --help            this text, with the values that the options chosen beside it set
  --list [GROUP]    the options of each group (model, experiment, ...), a line each
  --cfg job         print the composed config and stop
  -m                run once for each combination of values separated by commas (KEY=1,2)
  --config-dir DIR  also take options from DIR/GROUP/OPTION.yaml
  --version         print the versions of fla_train, its commit, torch, triton and transformers
  -sc install=bash  print a script that completes names (or =zsh): eval "$(fla-train -sc install=bash)"
"""
EXIT_STATUS = {
    0: "done",
    1: "the work failed (a disk, the network, a killed process): the same command may succeed",
    2: "a user error, or a final error of training (such as a full disk at its end): change something",
    75: "stopped on request, with a checkpoint: the same command continues",
    130: "interrupted by Ctrl-C",
}
# Scripts of `-sc install=`. Readline completes what follows the last "=" of a word, zsh the whole word. A
# value for which nothing is offered is a file.
BASH = """\
_fla_complete() {
  local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}"
  local word="${line##* }"
  COMPREPLY=($(COMP_LINE="$line" "$1" -sc query=bash 2>/dev/null))
  [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
}
complete -o nospace -o default -F _fla_complete fla-train fla-prepare fla-eval fla-export fla-generate
"""
ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_fla_complete() {
  local -a found=(${(f)"$(COMP_LINE=$LBUFFER $words[1] -sc query=zsh 2>/dev/null)"})
  (( $#found )) && compadd -Q -S '' -a found || { compset -P '*='; _files }
}
compdef _fla_complete fla-train fla-prepare fla-eval fla-export fla-generate
"""
SCRIPTS = {"install=bash": BASH, "install=zsh": ZSH}
WIDTH = 110
FOCUS = {"prepare": ("data", "experiment")}  # the groups whose keys a command's help shows; of the others all


def help_text(configs: ConfigFiles, overrides: Sequence[str] = ()) -> str:
    """Usage, groups with their options, and every key with its default and comment."""
    status = [f"  {code:<16}  {meaning}" for code, meaning in EXIT_STATUS.items()]
    parts = [configs.intro, USAGE.format(name=configs.config_name), "\n".join(["Exit status", *status, ""])]
    chosen, values = configs.chosen(overrides), configs.values(overrides)
    if chosen:
        parts.append("Groups (* is chosen)")
        for group, option in chosen.items():
            names = " ".join(f"*{name}" if name == option else name for name in configs.options(group))
            parts.append(
                textwrap.fill(names, WIDTH, initial_indent=f"  {group:<11}", subsequent_indent=" " * 13)
            )
        parts.append("")
    left_out = ""
    if configs.config_name == "train" and any(
        text.startswith(("run.dir=", "init_from=")) for text in overrides
    ):
        left_out = "; those of the run or model to go on from are not read here: --cfg job prints them"
    parts.append(
        f"Keys, with their values (* is set by what is chosen{left_out})\n\n"
        f"{with_values(configs.own_keys, values)}"
    )
    for group, option in chosen.items():
        if option in (None, "null") or group not in FOCUS.get(configs.config_name, chosen):
            continue
        keys = configs.keys(group, option)
        if configs.is_global(group, option):
            parts.append(f"# {group}={option}: {configs.description(group, option)}\n# It sets\n{keys}")
        else:
            keys = with_values(textwrap.indent(keys, "  "), values, f"{group}.")
            parts.append(f"{group}:    # {group}={option}\n{keys}")
    return "\n".join(parts)


def list_text(configs: ConfigFiles, words: Sequence[str] = ()) -> str:
    """The options of groups, `model` or `models` (default: all that leave a choice), with a line on each.

    Raises:
        ValueError: there is no such group, or none at all.
    """
    if not (listed := configs.listed()):
        raise ValueError(f"fla-{configs.config_name} has no groups: --help lists its keys")
    names = {name for group in listed.values() for name in (group, f"{group}s")}
    if unknown := [word for word in words if word not in names]:
        raise ValueError(f"there is no group {unknown[0]}: groups are {', '.join(listed.values())}")
    asked = {word.removesuffix("s") for word in words}
    lines = []
    for key, group in listed.items():
        options = configs.options(group)
        if group in asked or (not words and len(options) > 1):
            width = max(map(len, options), default=0)
            lines.append(f"{key}=")
            for option in options:
                about = textwrap.shorten(
                    configs.description(group, option), WIDTH - 3 - width, placeholder=" ..."
                )
                lines.append(f"  {option:<{width}} {about}")
            lines.append("")
    return "\n".join(lines)


def completions(configs: ConfigFiles, line: str) -> list[str]:
    """What the last word of a command line can become: flags, options of a group, keys, files as a value."""
    overrides, listed = line.split()[1:], configs.listed()
    word = overrides.pop() if overrides and not line[-1].isspace() else ""
    sign, name = (word[:1], word[1:]) if word.startswith(("+", "~")) else ("", word)
    key, equals, value = name.partition("=")
    if word.startswith("-"):
        found = re.findall(r"^  (-\S+)", USAGE, re.MULTILINE)
    elif "--list" in overrides:
        found = [f"{group} " for group in listed.values()]
    elif key in listed and equals:
        found = [f"{key}={option}" for option in configs.options(listed[key])]
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
