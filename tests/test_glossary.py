"""The retired words of docs/dev/glossary.md stay out of the code, the configs, the tests and the docs."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from test_layout import ROOT, tracked

GLOSSARY = "docs/dev/glossary.md"
FOREIGN = {"LICENSE", "docs/comparison.md"}  # the words of others
TEXT = {".md", ".py", ".yaml", ".json", ".toml", ".sh", ".slurm", ".txt", ".html", ""}


def cells(heading: str) -> list[list[str]]:
    """The body rows of the table below a heading of the glossary."""
    section = (ROOT / GLOSSARY).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def retired() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """(word, kind, folders, successor) of each retired word; without folders it holds everywhere."""
    for words, successor, checked in cells("Retired words"):
        kind, _, folders = checked.partition(" in ")
        for word in words.split(", "):
            yield word, kind, tuple(folders.split(", ")) if folders else (), successor


@cache
def files() -> dict[str, str]:
    """The text of each file in which retired words are looked for."""
    paths = [path for path in tracked() if path.parts[:2] not in {("docs", "dev"), ("docs", "reports")}]
    kept = [p for p in paths if p.suffix in TEXT and str(p) not in FOREIGN]
    return {str(path): (ROOT / path).read_text() for path in kept}


def names(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each identifier of a Python file."""
    for node in ast.walk(ast.parse(source)):
        found: list[str] = []
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=name):
                found = [name or ""]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found = [name]
            case ast.alias(name=name, asname=asname):
                found = [*name.split("."), asname or ""]
            case ast.ImportFrom(module=str(name)):
                found = name.split(".")
        for name in found:
            yield getattr(node, "lineno", 0), name.lstrip("_")


@cache
def python_names() -> dict[str, list[tuple[int, str]]]:
    return {path: list(names(text)) for path, text in files().items() if path.endswith(".py")}


def pattern(word: str, kind: str) -> re.Pattern[str]:
    """What finds mentions: of a word also as a part of a longer name, of a path also as a dotted module."""
    if kind == "text" and "_" not in word:
        return re.compile(rf"(?<![A-Za-z-]){re.escape(word)}(?![A-Za-z-])")
    forms, module = [word], word.removesuffix(".py")
    if "/" in word and not any(f"/{module}/" in f"/{path}" for path in files()):
        forms.append(module.replace("/", "."))
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, forms))})(?![\w-])")


def findings(word: str, kind: str, folders: tuple[str, ...]) -> Iterator[str]:
    """Where a retired word still stands, as path:line."""
    within = tuple(f"{folder}/" for folder in folders) or ("",)
    if kind == "names":
        for path, found in python_names().items():
            if path.startswith(within):
                yield from (
                    f"{path}:{line}" for line in sorted({line for line, name in found if name == word})
                )
        return
    if kind == "files":
        yield from (path for path in files() if f"/{word}/" in f"/{path}/")
    mention = pattern(word, kind)
    for path, text in files().items():
        if path.startswith(within) and mention.search(text):
            lines = enumerate(text.splitlines(), 1)
            yield from (f"{path}:{number}" for number, line in lines if mention.search(line))


def test_retired_words_stay_out() -> None:
    lines = []
    for word, kind, folders, successor in retired():
        assert kind in {"text", "names", "files"}, f"{word}: checked as {kind}?"
        if found := list(findings(word, kind, folders)):
            lines.append(f"{word} ({kind}), now {successor}: {', '.join(found)}")
    assert not lines, "retired words:\n" + "\n".join(lines)


def test_modules_of_the_glossary_exist() -> None:
    text = (ROOT / GLOSSARY).read_text().split("\n## Writing rules\n")[0]
    paths = re.findall(r"`((?:fla_train|kernels|eval|configs)/[\w./-]+)`", text)
    missing = sorted({path for path in paths if not (ROOT / path).exists()})
    assert len(paths) > 40 and not missing, f"{GLOSSARY} names {', '.join(missing)}"
