"""docs/kernels.md names files and functions that exist, and the notation of the interface's docstring."""

import ast
import re
from pathlib import Path

import pytest

from fla_train.kernels.delta_product import interface

ROOT = Path(__file__).parents[2]
OPERATOR = ROOT / "kernels" / "delta_product"
PAGE = (ROOT / "docs/kernels.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
NAMED = [(cells[0].strip("`"), cells[1]) for cells in ROWS if cells[0].endswith(".py`")]


@pytest.mark.parametrize(("file", "functions"), NAMED)
def test_a_row_names_functions_of_its_file(file, functions):
    definitions = (ast.FunctionDef, ast.ClassDef)
    nodes = ast.walk(ast.parse((OPERATOR / file).read_text()))
    defined = {node.name for node in nodes if isinstance(node, definitions)}
    assert set(re.findall(r"`(\w+)`", functions)) <= defined


def test_paths_in_the_text_exist():
    paths = re.findall(r"`((?:kernels|tests)/[\w/]+\.\w+)`", PAGE)
    assert paths and len(NAMED) > 15
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_kernels_in_the_text_exist():
    sources = "".join(file.read_text() for file in OPERATOR.rglob("*.py"))
    kernels = set(re.findall(r"`(\w+_kernel)`", PAGE))
    assert [name for name in kernels if f"def {name}(" not in sources] == []


def test_the_table_is_that_of_the_interface():
    symbols = [cells[0] for cells in ROWS if "[" in cells[1] and not cells[0].startswith("`")]
    formulas = {
        line.split()[0].rstrip(",") for line in interface.__doc__.splitlines() if line.startswith("    ")
    }
    assert {symbol.split(",")[0] for symbol in symbols} - {"symbol"} <= formulas
