"""The notebook docs/tutorial.ipynb: its outputs are those of one run, and it runs from top to bottom."""

import json
from pathlib import Path

import pytest
from test_layout import ROOT

from fla_train.run import Run

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


def test_outputs_are_those_of_one_run() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert NOTEBOOK.stat().st_size < 200_000


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_it_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    home = tmp_path / "runs" / "tutorial"
    losses = Run(home / "text").metrics.validation_loss.dropna()
    assert losses.iloc[-1] < 3.1  # nats per byte; the frequencies of bytes alone give more
    right = [Run(home / f"s3-{i}").metrics["train_length/sequence_accuracy"].iloc[-1] for i in range(4)]
    assert max(right[:2]) < 0.05 and min(right[2:]) > 0.95
