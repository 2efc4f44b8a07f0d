"""The same command repairs damaged files of a finished run and drops no records."""

import shutil

import pytest
from warm_ranks import TWO_RANKS

from fla_train.hub.checksums import find_export_damage
from fla_train.utils.records import read_metrics


@pytest.mark.slow
def test_the_same_command_mends_a_finished_run(
    make_config,
    warm_ranks,
    whole,
    tmp_path,
    capsys,
):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "wandb").touch()  # where W&B wants its folder
    config = make_config(
        *TWO_RANKS, f"run.dir={run}", "logger=default", "logger.wandb.mode=offline", "logger.tensorboard=true"
    )
    (run / "tensorboard").touch()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if b'"loss"' in line)
    lines[number] = lines[number].replace(b'"loss"', b'"l\xffss"')
    (run / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"step": 13, "lo')
    kept = read_metrics(run / "metrics.jsonl")
    weights = run / "hf/step-0000012/model.safetensors"
    expected = weights.read_bytes()
    weights.write_bytes(expected[:-1] + bytes([expected[-1] ^ 1]))
    assert find_export_damage(weights.parent).startswith(weights.name)

    warm_ranks.launch(config)
    assert weights.read_bytes() == expected
    assert read_metrics(run / "metrics.jsonl") == kept and len(kept) == len(lines) - 1
    content = (run / "metrics.jsonl").read_bytes()
    assert lines[number] in content and content.endswith(b'{"step": 13, "lo\n')
    capsys.readouterr()
    warm_ranks.launch(config)
    assert "is complete: 12 steps" in capsys.readouterr().out
    weights.unlink()
    warm_ranks.launch(config)
    assert weights.read_bytes() == expected
