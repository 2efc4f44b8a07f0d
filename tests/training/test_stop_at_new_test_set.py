"""`task.stop_at` of a test set that a resume brings: earlier evaluations say nothing of it."""

import json
from pathlib import Path

from fla_train.tasks import TaskConfig
from fla_train.training.resume import has_reached
from fla_train.training.run_folder import RunFolder


def test_evaluations_from_before_a_test_set_have_not_reached_its_mark(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path), TaskConfig(stop_at=[["new/accuracy", 0.9]])
    records = [{"step": step, "validation_loss": 1.0, "old/accuracy": 1.0} for step in (1, 2)]
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert not has_reached(config, folder, 2)
