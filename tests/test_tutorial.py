"""The notebook docs/tutorial.ipynb runs from top to bottom."""

from pathlib import Path

import pytest
from test_layout import ROOT

from fla_train.run.results import Run

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_it_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    home = tmp_path / "runs" / "tutorial"
    # Nats per byte; the frequencies of bytes alone give more. Validation documents depend on the Python.
    assert Run(home / "text").metrics.loss.dropna().iloc[-1] < 3.1
    right = [Run(home / f"s3-{i}").metrics["train_length/sequence_accuracy"].iloc[-1] for i in range(5)]
    assert max(right[:2]) < 0.05 and min(right[2:]) > 0.95
