"""The engine's arithmetic against plain PyTorch: whatever the accumulation and the number of ranks."""

from collections.abc import Callable
from pathlib import Path

import engine_steps
import numpy as np
import pytest
import torch
from warm_ranks import WarmRanks

from fla_train.training.config import TrainConfig, to_yaml
from fla_train.training.engine import gradient_norm
from fla_train.training.optimizer import parameter_groups
from tests.ranks import start_ranks


@pytest.fixture(scope="module")
def config(make_config: Callable[..., TrainConfig]) -> TrainConfig:
    # A large eps keeps Adam from turning rounding of near-zero gradients into whole steps.
    return make_config(
        "optimizer.eps=1e-3", "optimizer.max_grad_norm=0.5", "trainer.precision=fp32", "launch.device=cpu"
    )


@pytest.fixture(scope="module")
def runs(config: TrainConfig, warm_ranks: WarmRanks) -> dict[str, dict]:
    """The engine's results with one rank and one or four micro-batches, and with two ranks and two each."""
    return engine_steps.run_layouts(warm_ranks, config, [(1, 8), (1, 2), (2, 2)])


@pytest.fixture(scope="module")
def reference(config: TrainConfig) -> dict:
    model = engine_steps.make_model(config)
    settings = config.optimizer
    adamw = torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay),
        lr=engine_steps.LEARNING_RATE,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    return engine_steps.reference(model, [adamw], settings.max_grad_norm)


@pytest.mark.parametrize("layout", ["1 rank(s) x 1", "1 rank(s) x 4", "2 rank(s) x 2"])
def test_every_layout_takes_the_steps_of_plain_pytorch(runs: dict, reference: dict, layout: str):
    result = runs[layout]
    assert result["precompiled_passes"] == 1
    assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert result["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-5)
    torch.testing.assert_close(result["weights"], reference["weights"], rtol=1e-4, atol=1e-3)
    assert result["eval"] == pytest.approx(reference["eval"], rel=1e-5)
    counts = [int((engine_steps.make_batch(s)[1][:, 1:] != -100).sum()) for s in range(engine_steps.STEPS)]
    assert result["targets"] == counts
    assert not any(result["skipped"])
    assert result["stop"] == [False] * (engine_steps.STEPS - 1) + [True]  # one rank's wish reaches all
    assert min(reference["grad_norms"]) > 0.5  # clipping was at work


@pytest.mark.parametrize("layout", ["1 rank(s) x 4", "2 rank(s) x 2"])
def test_nan_on_one_rank_skips_the_step_everywhere_and_training_goes_on(runs: dict, layout: str):
    result = runs[layout]
    assert result["poisoned_skipped"] and result["poisoned_unchanged"]
    assert not result["healthy_skipped"] and result["healthy_changed"]


@pytest.mark.parametrize("layout", ["1 rank(s) x 1", "2 rank(s) x 2"])
def test_a_spike_of_the_loss_skips_the_step_everywhere(runs: dict, layout: str):
    assert runs[layout]["spike_skipped"] and runs[layout]["spike_unchanged"]


def test_float8_takes_the_same_steps_on_two_ranks_and_nearly_those_of_bf16(make_config, warm_ranks):
    more = ["optimizer.eps=1e-3", "optimizer.max_grad_norm=0.5", "launch.device=cpu", "model.hidden_size=128"]
    half, eighth = (make_config(f"trainer.precision={precision}", *more) for precision in ("bf16", "fp8"))
    near = engine_steps.run_layouts(warm_ranks, half, [(1, 2)])["1 rank(s) x 4"]
    ids, labels = engine_steps.make_batch(0)
    errors = []
    for autocast in (True, False):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            first = engine_steps.make_model(half)(input_ids=ids, labels=labels).loss.item()
        errors.append(abs(near["losses"][0] - first))
    assert errors[0] < errors[1]  # the step ran in bf16
    one, two = engine_steps.run_layouts(warm_ranks, eighth, [(1, 2), (2, 2)]).values()
    # In the first step only sums of four micro-batches in fp32 (eps 6e-8) have another order. Adam moves a
    # weight by at most lr / eps = 10 times the error of its gradient of 1e-3; checksums add up 4e4 weights.
    for key in ("losses", "grad_norms"):
        assert one[key][0] == pytest.approx(two[key][0], rel=1e-6)
    assert one["weights"][0] == pytest.approx(two["weights"][0], rel=1e-6, abs=1e-4)
    assert one["losses"] != near["losses"]
    # From then on weights differ by an ulp, which takes some to the next number in float8, 2^-3 away. Initial
    # weights one ulp apart give losses that differ by up to 0.7 %, and norms by up to 5 %.
    for run in (one, two):
        assert run["losses"] == pytest.approx(near["losses"], rel=2e-2)
        assert run["grad_norms"] == pytest.approx(near["grad_norms"], rel=1e-1)
        assert run["eval"] == pytest.approx(near["eval"], rel=2e-2)
        assert run["poisoned_skipped"] and run["poisoned_unchanged"] and run["healthy_changed"]


def test_the_norm_of_many_gradients_is_that_of_float64(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: None)
    gradient = 0.1 + torch.rand(4_000_000)
    expected = np.linalg.norm(gradient.numpy().astype(np.float64))
    assert gradient_norm({0: [gradient[:7], gradient[7:]], 1: []}).item() == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [1, 2])
def test_the_host_waits_for_the_gpu_once_per_reading(make_config, tmp_path, gpus):
    """Three accumulated steps, two of them skipped, under torch's detector of waits, then one reading."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    sizes = [f"launch.num_processes={gpus}", f"trainer.global_batch_tokens={256 * gpus}"]
    config = make_config("launch.device=cuda", "trainer.precision=bf16", *sizes)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    script = Path(__file__).with_name("engine_syncs.py")
    for rank in start_ranks([str(script), str(tmp_path / "config.yaml")], gpus):
        output, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0 and "read [3, 4, 5]" in output, errors[-3000:]
