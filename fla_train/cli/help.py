"""`--help` of the Hydra commands: the commented YAML files themselves, so that it can't fall behind them."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

from omegaconf import OmegaConf

USAGE = """\
usage: fla-{name} [KEY=VALUE | GROUP=OPTION]... [--cfg job] [-m]

  KEY=VALUE     set a key (a.b=3 for a key b below a); null unsets it
  GROUP=OPTION  choose a file of a group; --help then shows its keys
  --cfg job     print the composed config and stop
  -m            run once for each combination of values separated by commas (KEY=1,2)
"""


def help_text(config_name: str, overrides: Sequence[str] = ()) -> str:
    """Usage, groups with their options, and every key with its default and comment."""
    root = files("fla_train.configs")
    intro, own_keys = _sections((root / f"{config_name}.yaml").read_text())
    asked = dict(o.lstrip("+").split("=", 1) for o in overrides if "=" in o)
    chosen = {g: asked.get(g, default) for g, default in _groups(root / f"{config_name}.yaml").items()}
    parts = [intro, USAGE.format(name=config_name)]
    if chosen:
        parts.append("Groups (* is chosen)")
        for group, option in chosen.items():
            names = (f"*{name}" if name == option else name for name in _options(root / group))
            parts.append(
                textwrap.fill(
                    " ".join(names), 110, initial_indent=f"  {group:<11}", subsequent_indent=" " * 13
                )
            )
        parts.append("")
    parts.append("Keys, with their defaults\n\n" + own_keys)
    for group, option in chosen.items():
        if option not in (None, "null"):
            parts.append(
                f"{group}:    # {group}={option}\n{textwrap.indent(_text(root, group, option), '  ')}"
            )
    return "\n".join(parts)


def _sections(text: str) -> tuple[str, str]:
    """A file's opening comment, and its keys without the defaults list."""
    intro = re.match(r"(#.*\n)*", text).group()
    keys = re.sub(r"^defaults:\n(?:[ \t]+.*\n|\n)*", "", text[len(intro) :], flags=re.MULTILINE)
    shown = (line for line in intro.splitlines() if not line.startswith("# @package"))
    return "\n".join(line.removeprefix("# ").removeprefix("#") for line in shown) + "\n", keys.strip() + "\n"


def _groups(file: Traversable) -> dict[str, str | None]:
    """{group: default option} of a file's defaults list."""
    entries = OmegaConf.to_container(OmegaConf.create(file.read_text())).get("defaults", [])
    return {group: option for e in entries if isinstance(e, dict) for group, option in e.items()}


def _options(folder: Traversable) -> list[str]:
    """Names of the files that can be chosen; those that others are put together from are left out."""
    found, parts = [], set()
    for path, text in _walk(folder):
        parts |= {f"{part}/" if option else part for part, option in _ingredients(text)}
        found.append(path)
    inside = tuple(part.split("/", 1)[1] for part in parts)
    return sorted(name for name in found if not name.startswith(inside))


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name.removesuffix(".yaml"), entry.read_text()


def _ingredients(text: str) -> list[tuple[str, str]]:
    """(file or folder, option or "") of each `/path@_here_: option` in a defaults list."""
    return re.findall(r"^\s*- /(\S+)@_here_(?:: (\S+))?$", text, flags=re.MULTILINE)


def _text(root: Traversable, group: str, option: str) -> str:
    """The keys of an option with their comments, its ingredients' first."""
    file = root / group / f"{option}.yaml"
    if not file.is_file():
        return f"# there is no {group}={option}\n"
    text = file.read_text()
    names = [f"{part}/{name}" if name else part for part, name in _ingredients(text)]
    keys = [_sections((root / f"{name}.yaml").read_text())[1] for name in names] + [_sections(text)[1]]
    return "".join(keys).strip() + "\n"
