"""The reference pages hold every key, default and comment of the YAML files, and the public API."""

import importlib.util
import re
from functools import reduce
from itertools import product

import yaml
from test_layout import ROOT

import fla_train
from fla_train.cli.config_files import ConfigFiles, sections
from fla_train.hub.saved_config import flat

SPEC = importlib.util.spec_from_file_location("docs_reference", ROOT / "scripts" / "docs_reference.py")
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)


def test_keys_defaults_and_comments_are_those_of_the_files() -> None:
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        _, text = sections(file.read_text())
        config, keys = yaml.safe_load(text) or {}, reference.parse(text)
        for key in keys.values():
            value = reduce(lambda node, part: node[part], key.name.split("."), config)
            assert not key.default or yaml.safe_load(key.default) == value, f"{file}: {key}"
        inline = tuple(f"{key.name}." for key in keys.values() if key.default.startswith("{"))
        leaves = {name for name, _ in flat(config) if not name.startswith(inline)}
        assert leaves <= keys.keys(), file
        said = " ".join(key.comment for key in keys.values())
        comments = re.findall(r"(?:^|\s)# ?(.*\S)", text)
        assert not [comment for comment in comments if comment not in said], file


def test_the_page_has_the_keys_of_every_command() -> None:
    page = reference.on_page_markdown((ROOT / "docs" / "configuration.md").read_text())
    for command, group in product(reference.COMMANDS, ("", "trainer", "data", "suite")):
        configs = ConfigFiles(command)
        option = configs.defaults.get(group)
        text = configs.keys(group, option) if option else configs.own_keys
        for key, _ in flat(yaml.safe_load(text) or {}):
            assert f"| `{group}.{key}` |" in page or f"| `{key}` |" in page


def test_the_home_page_has_the_table_of_frameworks() -> None:
    page = reference.on_page_markdown((ROOT / "docs" / "index.md").read_text())
    assert "| DeltaNet [[1]](comparison.md#notes) | yes |" in page
    assert "<!--" not in page


def test_the_python_page_documents_what_import_fla_train_offers() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    for name, module in fla_train.API.items():
        assert f"\n::: {module}.{name}\n" in page
