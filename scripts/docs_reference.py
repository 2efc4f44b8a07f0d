"""Generated parts of the documentation site: a hook of mkdocs.yml, which `make docs` runs.

A page has the line `<!-- generated: NAME -->` where the text of the function `NAME` goes. So each page is in
the repository too, and nothing generated is. A link whose text is a file's name, `[data.md](data.md)`, gets
the title of that page.
"""

import html
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import fla_train
from fla_train.cli.config_files import ConfigFiles

DOCS = Path(__file__).resolve().parents[1] / "docs"
COMMANDS = ("train", "prepare", "eval", "export", "generate")
DOCUMENTED = {  # what python.md shows, by section; `.*` also the public members of a class
    "Train, and read runs": [*(f"fla_train:{name}" for name in fla_train.API), "fla_train:Run.*"],
    "The operator": [
        f"fla_train.kernels.delta_product:{name}"
        for name in ("delta_product", "delta_product_step", "resolve_backend", "check_backend")
    ],
    "Models and mixers": [
        "fla_train.models:DeltaProductConfig",
        "fla_train.models:DeltaProductForCausalLM",
        "fla_train.models:DeltaProductForCausalLM.forward",
        "fla_train.models:DeltaProductForCausalLM.token_losses",
        "fla_train.models.mixers:Mixer",
        "fla_train.models.mixers:Mixer.__call__",
    ],
}
LINK = re.compile(r"\[[\w/.]+\.md\](?=\((?P<page>[\w/.]+\.md)[#)])")
KEY = re.compile(r"(?P<indent> *)(?P<name>[\w-]+):(?: +(?P<value>[^#\s].*?))?(?: +# (?P<comment>.*))?")
NAME = re.compile(r"[\w\\]+(\([\w\\]+\))?")  # of an argument, with its underscores escaped
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Optional methods):")
QUALIFIER = re.compile(r"(?<![\w.])(?:[a-z_]\w*\.)+(?=[A-Z])")  # torch.Tensor: Tensor


@dataclass
class Key:
    """A key of a YAML file: dotted name, default as it is written, comment."""

    name: str
    default: str
    comment: str


def on_page_markdown(markdown: str, page: Any = None, **_: object) -> str:
    """Called by mkdocs with the text of each page."""
    markdown = re.sub(r"<!-- generated: (\w+) -->", lambda found: GENERATED[found[1]](), markdown)
    folder = DOCS if page is None else (DOCS / page.file.src_uri).parent
    return LINK.sub(lambda found: f"[{title(folder / found['page'])}]", markdown)


def title(page: Path) -> str:
    """The first heading of a page."""
    return re.search(r"^# (.+)", page.read_text(), re.M)[1]


def configuration() -> str:
    """Every key of every command with its default and comment, and the options of every group."""
    return "\n".join(line for command in COMMANDS for line in _command(ConfigFiles(command)))


def api() -> str:
    """The public functions and classes: signatures and docstrings."""
    lines = []
    for title, names in DOCUMENTED.items():
        lines.append(f"## {title}\n")
        for name in names:
            module, _, path = name.partition(":")
            thing = reduce(getattr, path.removesuffix(".*").split("."), import_module(module))
            if path.endswith(".*"):
                members = {f"{path[:-1]}{key}": value for key, value in vars(thing).items() if key[0] != "_"}
                lines += [text for key, value in members.items() for text in _documented(value, key)]
            else:
                lines += _documented(thing, path, module)
    return "\n".join(lines)


def comparison() -> str:
    """The table of docs/comparison.md, whose notes stay there."""
    page = (Path(__file__).parent.parent / "docs" / "comparison.md").read_text()
    (table,) = re.findall(r"(?:^\|.*\n)+", page, re.M)
    return re.sub(r"\[(\d+)\]", r"[[\1]](comparison.md#notes)", table)


def tutorial() -> str:
    """The notebook docs/tutorial.ipynb below its title, outputs included."""
    return notebook(DOCS / "tutorial.ipynb").partition("\n")[2]


def notebook(file: Path) -> str:
    """A notebook as Markdown: code, then what it printed, showed as text, or drew."""
    parts = []
    for cell in json.loads(file.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if picture := data.get("image/png"):
                parts.append(f"![drawn by the code above](data:image/png;base64,{picture.strip()})")
            else:
                shown = "".join(output.get("text") or data["text/plain"])
                parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts)


def parse(text: str, prefix: str = "") -> dict[str, Key]:
    """The keys of a YAML file by dotted name, in its order; of a key that comes twice, the later default.

    A comment on lines of its own belongs to the key below, unless it continues the one above at its column.

    Raises:
        ValueError: a line is no key, list item or comment.
    """
    found: dict[str, Key] = {}
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
            before = found.pop(name, None)
            said = ". ".join(filter(None, [match["comment"], waiting])) or (before.comment if before else "")
            last = found[name] = Key(name, match["value"] or "", said)
            waiting, column = "", match.start("comment") - 2
        elif last and last.default.startswith(("[", "{")):  # a list or mapping of several lines
            last.default += f" {content}"
        else:
            raise ValueError(f"not a line of a config file: {line}")
    return found


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
    """The options of a group, the keys of the default one, and what differs in each other one."""
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


def _documented(thing: Any, path: str, module: str = "") -> Iterator[str]:
    """Heading, signature and docstring of a function, class, method or property."""
    shown = callable(thing) and not (isinstance(thing, type) and issubclass(thing, BaseException))
    code = [f"{path.rpartition('.')[2]}{_signature(thing)}"] if shown else []
    if module != "fla_train" and module and "." not in path:
        code.insert(0, f"from {module} import {path}\n")
    yield f"### fla_train.{path}\n" if module == "fla_train" else f"### {path}\n"
    if code:
        yield "\n".join(["```python", *code, "```\n"])
    yield _markdown(inspect.getdoc(thing) or "")


class _Shown(str):
    """Text that a signature shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _signature(function: Callable[..., Any]) -> str:
    """A parameter a line, types without their modules, long defaults left out."""
    found, lines, star = inspect.signature(function), [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            lines.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        kind, default = parameter.annotation, parameter.default
        shown = parameter.replace(
            annotation=_Shown(kind) if isinstance(kind, str) else kind,
            default=_Shown("...") if len(repr(default)) > 60 else default,
        )
        lines.append(str(shown))
    returns = found.return_annotation
    end = (
        ""
        if returns is found.empty
        else f" -> {returns if isinstance(returns, str) else inspect.formatannotation(returns)}"
    )
    return QUALIFIER.sub(
        "", "".join(["(", *(f"\n    {line}," for line in lines), "\n" * bool(lines), ")", end])
    )


def _markdown(docstring: str) -> str:
    """A docstring with its sections (`Args:`, `Raises:`, ...) as lists."""
    lines = []
    for line in _escape(docstring).splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if SECTION.fullmatch(line):
            lines.append(f"**{text.rstrip(':')}**\n")
        elif indent == 4:
            name, colon, rest = text.partition(": ")
            named = colon and NAME.fullmatch(name)
            lines.append(f"- `{name.replace(chr(92), '')}`: {rest}" if named else f"- {text}")
        else:
            lines.append(f"  {text}" if indent else text)
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    """A comment as Markdown: what looks like markup is text, but for code between backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_\[\]|\\])", r"\\\1", html.escape(part, quote=False))
        for part in parts
    )


GENERATED = {"api": api, "comparison": comparison, "configuration": configuration, "tutorial": tutorial}
