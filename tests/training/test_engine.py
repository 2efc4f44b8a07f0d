"""The engine's arithmetic against plain PyTorch: whatever the accumulation and the number of ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import engine_steps
import pytest
import torch

from fla_train.training.engine import deepspeed_config
from fla_train.training.optimizer import build_optimizer
from fla_train.training.schema import TrainConfig, to_yaml

SCRIPT = Path(engine_steps.__file__)


@pytest.fixture(scope="module")
def config(make_config: Callable[..., TrainConfig]) -> TrainConfig:
    # A large eps keeps Adam from turning rounding of near-zero gradients into whole steps.
    return make_config(
        "optimizer.eps=1e-3", "optimizer.max_grad_norm=0.5", "trainer.precision=fp32", "launch.device=cpu"
    )


@pytest.fixture(scope="module")
def runs(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The engine's results with one rank and one or four micro-batches, and with two ranks and two each."""
    folder = tmp_path_factory.mktemp("engine")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    launches = {}
    for world, micro_batches in ((1, ["8", "2"]), (2, ["2"])):
        config.launch.num_processes = world
        settings, out = folder / f"config-{world}.yaml", folder / f"out-{world}.json"
        settings.write_text(to_yaml(config))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
        command += [str(SCRIPT), str(settings), str(out), *micro_batches]
        launches[world] = out, subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    results = {}
    for world, (out, process) in launches.items():
        _, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
        for content in json.loads(out.read_text()):
            results[f"{world} rank(s) x {content['accumulation']}"] = content
    return results


@pytest.fixture(scope="module")
def reference(config: TrainConfig) -> dict:
    """The same steps without DeepSpeed: one loss over the whole batch, clipping, AdamW."""
    model = engine_steps.make_model(config)
    optimizer = build_optimizer(model, config.optimizer)
    losses, norms = [], []
    for step in range(engine_steps.STEPS):
        ids, labels = engine_steps.make_batch(step)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        norms.append(
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm).item()
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ids, labels = engine_steps.make_batch(99)
    logits = model(input_ids=ids).logits[:, :-1]
    held_out = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).item()
    weights = engine_steps.checksum(model)
    return {"losses": losses, "grad_norms": norms, "weights": weights, "eval": held_out}


@pytest.mark.parametrize("layout", ["1 rank(s) x 1", "1 rank(s) x 4", "2 rank(s) x 2"])
def test_every_layout_takes_the_steps_of_plain_pytorch(runs: dict, reference: dict, layout: str):
    result = runs[layout]
    assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert result["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-4)
    assert result["weights"] == pytest.approx(reference["weights"], rel=1e-4, abs=1e-3)
    assert result["eval"] == pytest.approx(reference["eval"], rel=1e-5)
    counts = [int((engine_steps.make_batch(s)[1][:, 1:] != -100).sum()) for s in range(engine_steps.STEPS)]
    assert result["targets"] == counts
    assert not any(result["skipped"])
    assert min(reference["grad_norms"]) > 0.5  # clipping was at work


@pytest.mark.parametrize("layout", ["1 rank(s) x 4", "2 rank(s) x 2"])
def test_nan_on_one_rank_skips_the_step_everywhere_and_training_goes_on(runs: dict, layout: str):
    result = runs[layout]
    assert result["poisoned_skipped"] and result["poisoned_unchanged"]
    assert not result["healthy_skipped"] and result["healthy_changed"]


def test_nothing_of_the_deepspeed_config_is_automatic(make_config: Callable[..., TrainConfig]):
    config = make_config("trainer.precision=bf16", "launch.num_processes=2")
    settings = deepspeed_config(config, on_gpu=False)
    assert '"auto"' not in json.dumps(settings)
    assert settings["gradient_accumulation_steps"] == 2
    assert not settings["bf16"]["enabled"] and settings["torch_autocast"]["enabled"]
