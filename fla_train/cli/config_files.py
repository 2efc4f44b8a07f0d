"""The files of configs/ read as text: groups, the options of a group, their descriptions and keys.

No config is composed and no schema imported, so that --help, --list and completion answer at once.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml

from fla_train.cli.scales import SCALES
from fla_train.hub.saved_config import flat, plain

# What a file is put together from, by its defaults: `- /model/size@_here_: tiny`, `- /experiment/mad/common`.
# A part at another place, such as `- /model/batch@_global_.trainer: 340m`, has its keys there.
PART = re.compile(r"^ *- /(\S+?)(@\S+?)?(?:: (\S+))?$", re.MULTILINE)
GROUP = re.compile(r"^  - (\w+): (\S+)", re.MULTILINE)
CONFIG = re.compile(r"^  - (\w+)$", re.MULTILINE)  # another command's, whose groups this one has
OVERRIDE = re.compile(r"^ *- override /(\w+): (\S+)$", re.MULTILINE)
GLOBAL = "# @package _global_"
ENTRY = re.compile(r"( *)([\w-]+):( *)([^#]*?) *(#.*)?$")  # indent, key, space, value, comment

# Keys of a command whose value is an option of another command's group.
OPTIONS_OF = {"train": {"trainer.suite": "suite"}}


class ConfigFiles:
    """The files that a command composes `config_name` from: configs/ and the folder of `--config-dir`."""

    def __init__(self, config_name: str, config_dir: str | None = None):
        self.config_name = config_name
        self.folder = Path(config_dir) if config_dir else None
        self._roots: list[Traversable] = [files("fla_train.configs"), *filter(None, [self.folder])]
        text = self._read(config_name)
        self.intro, self.own_keys = sections(text)
        # {group: option that is chosen by default}
        self.defaults: dict[str, str | None] = {
            group: None if option == "null" else option
            for part in [*map(self._read, CONFIG.findall(text)), text]
            for group, option in GROUP.findall(part)
        }

    def listed(self) -> dict[str, str]:
        """{what chooses an option: its group}: each group, and keys that name an option of another."""
        return {group: group for group in self.defaults} | OPTIONS_OF.get(self.config_name, {})

    def options(self, group: str) -> list[str]:
        """The options of a group, in folders too (`delta_net/tiny`), without the files that others share."""
        if group == "scale":
            return list(SCALES)
        found, shared = set(), []
        for path, text in self._walk(group):
            shared += [f"{part}/" if option else part for part, place, option in PART.findall(text) if place]
            found.add(path)
        shared = tuple(part.removeprefix(f"{group}/") for part in shared)
        return sorted(
            o for o in found if not o.startswith(shared) and not o.split("/")[-1].startswith("common")
        )

    def has(self, group: str, option: str) -> bool:
        """Whether `group=option` can be composed."""
        return option in SCALES if group == "scale" else bool(self._read(f"{group}/{option}"))

    def chosen(self, overrides: Iterable[str]) -> dict[str, str | None]:
        """{group: option}: the defaults, what an experiment changes in them, what `overrides` ask for."""
        asked = dict(o.lstrip("+").split("=", 1) for o in overrides if "=" in o)
        asked = {group: option for group, option in asked.items() if group in self.defaults}
        chosen = self.defaults | asked
        for group, option in list(chosen.items()):
            chosen |= self.overridden(group, option)
        return chosen | asked

    def overridden(self, group: str, option: str | None) -> dict[str, str]:
        """{group: option} that an option, such as an experiment, chooses for other groups."""
        return {g: o for text in self._texts(f"{group}/{option}") for g, o in OVERRIDE.findall(text)}

    def is_global(self, group: str, option: str) -> bool:
        """Whether the keys of an option are those of the root and not those below `group`."""
        return self._read(f"{group}/{option}").lstrip().startswith(GLOBAL)

    def values(self, overrides: Iterable[str]) -> dict[str, str]:
        """{dotted key: value, as text}: what chosen options set beside their group, and `overrides`."""
        found: dict[str, str] = {}
        for group, option in self.chosen(overrides).items():
            for place, text in self._elsewhere(f"{group}/{option}"):
                keys = yaml.safe_load(sections(text)[1]) or {}
                found |= {place + key: plain(value) for key, value in flat(keys)}
        return found | dict(o.lstrip("+").split("=", 1) for o in overrides if "=" in o)

    def keys(self, group: str, option: str) -> str:
        """The keys of an option with their comments, those of its parts first."""
        return "".join(sections(text)[1] for text in self._texts(f"{group}/{option}")).strip() + "\n"

    def description(self, group: str, option: str) -> str:
        """The first comment of an option's file or, if it has none, those of its parts."""
        text = self._read(f"{group}/{option}")
        if intro := sections(text)[0].strip():
            return " ".join(re.split(r"\n\s", intro)[0].split())  # an indented line is a command
        parts = [_name(*part) for part in reversed(PART.findall(text)) if part[1] in ("", "@_here_")]
        return " ".join(self.description(*part.split("/", 1)) for part in parts if "/common" not in part)

    def _read(self, name: str) -> str:
        for root in self._roots:
            if (file := root / f"{name}.yaml").is_file():
                return file.read_text()
        return ""

    def _texts(self, name: str) -> Iterator[str]:
        """A file and, before it, the files that it is put together from."""
        text = self._read(name)
        for part in PART.findall(text):
            if part[1] in ("", "@_here_"):
                yield from self._texts(_name(*part))
        yield text

    def _elsewhere(self, name: str) -> Iterator[tuple[str, str]]:
        """("trainer.", text) of each part of a file whose keys are there, ("", text) of a `GLOBAL` file."""
        text = self._read(name)
        for part in PART.findall(text):
            if part[1].startswith("@_global_."):
                yield part[1].removeprefix("@_global_.") + ".", self._read(_name(*part))
            else:
                yield from self._elsewhere(_name(*part))
        if text.lstrip().startswith(GLOBAL):
            yield "", text

    def _walk(self, group: str) -> Iterator[tuple[str, str]]:
        for root in self._roots:
            if (root / group).is_dir():
                yield from _walk(root / group)


def sections(text: str) -> tuple[str, str]:
    """A file's opening comment, and its keys without the defaults list."""
    intro = re.match(r"(#.*\n)*", text).group()
    keys = re.sub(r"^defaults:\n(?:[ \t]+.*\n|\n)*", "", text[len(intro) :], flags=re.MULTILINE).strip()
    shown = (line for line in intro.splitlines() if not line.startswith("# @package"))
    comment = "".join(line.removeprefix("# ").removeprefix("#") + "\n" for line in shown)
    return comment, f"{keys}\n" if keys else ""


def with_values(text: str, values: Mapping[str, str], prefix: str = "") -> str:
    """YAML text of the keys below `prefix` with these values; a line that has one begins with `*`."""
    lines, parents = [], []  # parents: (indent, name)
    for line in text.splitlines():
        if entry := ENTRY.match(line):
            indent, name, space, value, comment = entry.groups("")
            parents = [*(parent for parent in parents if parent[0] < len(indent)), (len(indent), name)]
            new = values.get(prefix + ".".join(name for _, name in parents))
            if value and new is not None:
                before = f"*{indent[1:]}{name}:{space}{new} "
                line = (before.ljust(len(line) - len(comment)) + comment).rstrip()
        lines.append(line + "\n")
    return "".join(lines)


def _name(part: str, place: str, option: str) -> str:
    return f"{part}/{option}" if option else part


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name.removesuffix(".yaml"), entry.read_text()
