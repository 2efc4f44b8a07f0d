"""A golden loss curve: a change that is not meant to change numbers must leave it as it is.

The corpus, the order of the sequences, the initial weights and each step's arithmetic all show in it. After a
change that is meant, the failing test prints the new values; docs/dev/log.md says why they changed.
"""

import pytest

from fla_train.training.optimizer import learning_rate
from fla_train.utils.records import read_metrics

LOSSES = [
    *(5.76167, 5.67975, 5.44057, 5.05838, 4.66932, 4.36838),
    *(4.05056, 3.84363, 3.66774, 3.5688, 3.49345, 3.43614),
]
GRAD_NORMS = [2.0814, 2.5183, 3.3883, 2.1888, 1.6702, 1.5478, 1.5405, 1.4387, 1.4033, 1.3326, 1.2732, 1.383]
VALIDATION = [4.64554, 3.64659, 3.41175]


def test_the_loss_curve_is_the_golden_one(make_config, warm_ranks, tmp_path):
    config = make_config(
        "trainer.precision=fp32", "launch.device=cpu", "schedule.warmup_steps=3", f"run.dir={tmp_path}"
    )
    warm_ranks.launch(config)
    records = read_metrics(tmp_path / "metrics.jsonl")
    steps = [record for record in records if "loss" in record]
    found = {
        "LOSSES": [round(record["loss"], 5) for record in steps],
        "GRAD_NORMS": [round(record["grad_norm"], 4) for record in steps],
        "VALIDATION": [round(r["validation_loss"], 5) for r in records if "validation_loss" in r],
    }
    told = f"found {found}"
    # Initial weights one ulp off change losses by less than the 5e-6 of the digits here, and norms by 3e-5 of
    # them: the bounds leave room for the sums of another processor's instructions.
    assert found["LOSSES"] == pytest.approx(LOSSES, abs=1e-4), told
    assert found["GRAD_NORMS"] == pytest.approx(GRAD_NORMS, rel=2e-3), told
    assert found["VALIDATION"] == pytest.approx(VALIDATION, abs=1e-4), told
    # The learning rate advances once per optimizer step, although each has four micro-batches.
    assert [record["lr"] for record in steps] == [
        learning_rate(step, peak=1e-2, max_steps=12, schedule=config.schedule) for step in range(1, 13)
    ]
