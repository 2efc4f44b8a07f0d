"""The generated pages hold the config files, the table of frameworks and the public API."""

import importlib.util

from test_layout import ROOT

import fla_train

SPEC = importlib.util.spec_from_file_location("docs_reference", ROOT / "scripts" / "docs_reference.py")
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)


def test_generated_pages() -> None:
    page = reference.on_page_markdown((ROOT / "docs" / "configuration.md").read_text())
    assert "keep_checkpoints: 2" in page and 'note "experiment=state_tracking/s3"' in page
    page = reference.on_page_markdown((ROOT / "docs" / "index.md").read_text())
    assert "| DeltaNet [[1]](comparison.md#notes) | yes |" in page and "<!--" not in page
    page = (ROOT / "docs" / "python.md").read_text()
    assert all(f"\n::: {module}.{name}\n" in page for name, module in fla_train.API.items())
