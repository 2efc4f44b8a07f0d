"""Insert the table of all keys and the comparison of frameworks into the site: a hook of mkdocs.yml.

The line `<!-- generated: NAME -->` of a page is replaced by the text that the function `NAME` returns.
"""

import html
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fla_train.cli.config_files import ConfigFiles

DOCS = Path(__file__).resolve().parents[1] / "docs"
COMMANDS = ("train", "prepare", "eval", "export", "generate")
KEY = re.compile(r"(?P<indent> *)(?P<name>[\w-]+):(?: +(?P<value>[^#\s].*?))?(?: +# (?P<comment>.*))?")


@dataclass
class Key:
    """A key of a YAML file: dotted name, default as it is written, comment."""

    name: str
    default: str
    comment: str


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the text of a page with its generated parts; mkdocs calls this for each page."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda match: GENERATED[match[1]](), markdown)


def configuration() -> str:
    """List every key of every command with its default and comment, and the options of every group."""
    return "\n".join(line for command in COMMANDS for line in _command(ConfigFiles(command)))


def comparison() -> str:
    """Return the table of docs/comparison.md, with links to its notes."""
    page = (DOCS / "comparison.md").read_text()
    (table,) = re.findall(r"(?:^\|.*\n)+", page, re.M)
    return re.sub(r"\[(\d+)\]", r"[[\1]](comparison.md#notes)", table)


def parse(text: str, prefix: str = "") -> dict[str, Key]:
    """Return the keys of a YAML file by dotted name; a key that occurs twice keeps its later default.

    A comment on separate lines belongs to the key below, unless it continues the one above at its column.

    Raises:
        ValueError: a line is not a key, list item or comment.
    """
    keys: dict[str, Key] = {}
    above: list[tuple[int, str]] = [(-1, prefix)] if prefix else []  # mappings around: (indent, name)
    waiting, column, last = "", -1, None
    for line in filter(str.strip, text.splitlines()):
        content = line.strip()
        if content.startswith("#"):
            said = content.removeprefix("#").strip()
            if last and line.index("#") == column:
                last.comment += f" {said}"
            else:
                waiting = f"{waiting} {said}".strip()
        elif content.startswith("- ") and last:
            item, _, said = content.removeprefix("- ").partition(" # ")
            last.default = f"[{', '.join([*filter(None, [last.default[1:-1]]), item.strip()])}]"
            last.comment = f"{last.comment} {said}".strip()
        elif match := KEY.fullmatch(line):
            above = [mapping for mapping in above if mapping[0] < len(match["indent"])]
            above.append((len(match["indent"]), match["name"]))
            name = ".".join(part for _, part in above)
            before = keys.pop(name, None)
            said = ". ".join(filter(None, [match["comment"], waiting])) or (before.comment if before else "")
            last = keys[name] = Key(name, match["value"] or "", said)
            waiting, column = "", match.start("comment") - 2
        elif last and last.default.startswith(("[", "{")):  # a list or mapping of several lines
            last.default += f" {content}"
        else:
            raise ValueError(f"not a line of a config file: {line}")
    return keys


def _command(configs: ConfigFiles) -> Iterator[str]:
    yield f"## fla-{configs.config_name}\n"
    yield f"{_escape(configs.intro)}\n"
    yield from _table(parse(configs.own_keys).values())
    if configs.config_name == "prepare":
        yield "All other keys are those of fla-train.\n"
        return
    for group, default in configs.defaults.items():
        yield from _group(configs, group, default)


def _group(configs: ConfigFiles, group: str, default: str | None) -> Iterator[str]:
    """List the options of a group, the keys of the default one, and the differences of each other one."""
    options = configs.options(group)
    yield f"### {group}\n"
    if len(options) > 1 or default is None:
        yield f"| `{group}=` | what |\n|---|---|"
        for option in options:
            mark = " (default)" if option == default else ""
            yield f"| `{option}`{mark} | {_escape(configs.description(group, option))} |"
        yield ""
    base = parse(configs.keys(group, default), group) if default else {}
    yield from _table(base.values())
    for option in options:
        if option != default and not configs.is_global(group, option):
            keys = parse(configs.keys(group, option), group)
            lines = _table(key for name, key in keys.items() if key != base.get(name))
            title = f"Keys of `{group}={option}`" + (" that differ" if base else "")
            yield f'??? note "{title}"\n'
            yield textwrap.indent("\n".join(lines), "    ") + "\n"


def _table(keys: Iterable[Key]) -> Iterator[str]:
    if rows := [key for key in keys if key.default or key.comment]:
        yield "| key | default | what |\n|---|---|---|"
        for key in rows:
            default = f"`{key.default}`".replace("|", "\\|") if key.default else ""
            yield f"| `{key.name}` | {default} | {_escape(key.comment)} |"
        yield ""


def _escape(text: str) -> str:
    """Escape a comment for Markdown, except for code between backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_\[\]|\\])", r"\\\1", html.escape(part, quote=False))
        for part in parts
    )


GENERATED = {"comparison": comparison, "configuration": configuration}
