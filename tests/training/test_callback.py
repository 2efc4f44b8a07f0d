"""Callbacks, optimizers and schedules from outside the package, against plain PyTorch."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import engine_steps
import numpy as np
import pytest
import torch
import torch.distributed as dist
import warm_ranks as ranks
from warm_ranks import WarmRanks

from fla_train.data.sampler import BatchSampler
from fla_train.run.resolve import resolve
from fla_train.training import checkpoint
from fla_train.training.config import OptimizerConfig, TrainConfig
from fla_train.training.engine import build_engine, train_step
from fla_train.training.features.bad_steps import BadSteps
from fla_train.training.model import other_weights
from fla_train.training.optimizer import check_elementwise, make_schedule, parameter_groups
from fla_train.utils.records import read_metrics

pytestmark = pytest.mark.usefixtures("elsewhere")
Make = Callable[..., TrainConfig]
CPU = ["launch.device=cpu", "trainer.precision=fp32"]
RECORDER = """
from fla_train.training.callback import Callback

def hook(name):
    def call(self, *arguments):
        with open("calls", "a") as file:
            print(name, *(a for a in arguments if isinstance(a, int)), file=file)
        return getattr(Callback, name)(self, *arguments)
    return call

class Recorder(Callback):
    for name in ("before_step", "model_inputs", "run_pass", "after_loss", "after_backward", "after_step"):
        locals()[name] = hook(name)
    for name in ("after_results", "after_evaluation", "exported_weights", "finish", "summary"):
        locals()[name] = hook(name)
"""


@pytest.fixture
def examples(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(elsewhere))


def test_the_order_of_hooks(make_config: Make, warm_ranks: WarmRanks, tmp_path: Path):
    Path("recorder.py").write_text(RECORDER)
    options = [*CPU, "trainer.micro_batch_size=4", "trainer.max_steps=1", f"run.dir={tmp_path / 'run'}"]
    warm_ranks.launch(make_config(*options, "trainer.callbacks=[recorder:Recorder]"))
    a_pass = ["model_inputs {}", "run_pass", "after_loss", "after_backward {}"]
    assert Path("calls").read_text().splitlines() == [
        "before_step 1",
        *(line.format(number) for number in (0, 1) for line in a_pass),
        *("after_step 1", "after_results", "after_evaluation 1", "finish", "exported_weights", "summary"),
    ]


STOPPER = """
from fla_train.training.callback import Callback

class Stopper(Callback):
    def after_results(self, results):
        self.trainer.reached = results[-1].step >= 2

class Evaluated(Callback):
    def after_evaluation(self, step, record):
        self.trainer.reached = True
"""


def test_a_callback_ends_a_run(make_config: Make, warm_ranks: WarmRanks, tmp_path: Path):
    Path("stopper.py").write_text(STOPPER)
    options = [*CPU, "trainer.eval_every=0", "trainer.checkpoint_every=0", f"run.dir={tmp_path / 'run'}"]
    warm_ranks.launch(make_config(*options, "trainer.callbacks=[stopper:Stopper]"))
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    # Step 2 has been read while step 3 ran, and step 3 is the last.
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3]
    assert [record["step"] for record in records if "validation_loss" in record] == [3]
    assert (tmp_path / "run/hf/step-0000003").is_dir()


def test_the_last_step_is_logged_if_its_evaluation_ends_the_run(make_config, warm_ranks, tmp_path):
    Path("stopper.py").write_text(STOPPER)
    options = [*CPU, "trainer.eval_every=2", "trainer.log_every=3", f"run.dir={tmp_path / 'run'}"]
    warm_ranks.launch(make_config(*options, "trainer.callbacks=[stopper:Evaluated]"))
    records = [record for record in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in records] == [2] and records[0]["tokens_per_second"] > 0


def train_with_wandb(plan: Path) -> None:
    """Train, on a rank, with a stand-in for W&B whose records are written to a file at the end."""
    logged = []
    run = SimpleNamespace(
        id="fresh",
        log=lambda values, step: logged.append({"step": step, **values}),
        finish=lambda: Path("wandb.json").write_text(json.dumps(logged)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: run))
        ranks.train_plan(plan)


def test_the_exported_average_is_that_of_the_weights_and_a_custom_metric_is_recorded(
    make_config: Make, warm_ranks: WarmRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ranks, "train_plan", train_with_wandb)
    options = [*CPU, "trainer.max_steps=4", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=0"]
    emas = ", ".join(f"{{class: callbacks:Ema, decay: {decay}}}" for decay in (0.5, 0.25))
    callbacks = f"[{emas}, callbacks:SmoothLoss]"
    options += ["logger=default", "logger.wandb.mode=online"]
    options += ["trainer.log_every=2", f"run.dir={tmp_path / 'run'}", f"trainer.callbacks={callbacks}"]
    config = make_config(*options)
    warm_ranks.launch(config)
    from safetensors.torch import load_file

    average = second = dict(engine_steps_model(config).named_parameters())
    for step in range(1, 5):
        file = tmp_path / "run/checkpoints" / checkpoint.folder_name(step) / checkpoint.WEIGHTS
        weights = torch.load(file, weights_only=True)
        average = {name: 0.5 * value.detach() + 0.5 * weights[name] for name, value in average.items()}
        second = {name: 0.25 * value.detach() + 0.75 * weights[name] for name, value in second.items()}
    for folder, expected in (("ema", average), ("ema-2", second), ("hf", weights)):
        exported = load_file(tmp_path / "run" / folder / "step-0000004/model.safetensors")
        for name, value in exported.items():
            torch.testing.assert_close(value, expected[name], msg=f"{folder} {name}")
    records = [record for record in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in records] == [2, 4]
    assert all(0 < record["loss"] < record["smooth_loss"] for record in records)
    shown = [record for record in json.loads(Path("wandb.json").read_text()) if "loss" in record]
    assert [(record["step"], record["smooth_loss"]) for record in shown] == [
        (record["step"], record["smooth_loss"]) for record in records
    ]


def engine_steps_model(config: TrainConfig) -> torch.nn.Module:
    """Return the run's model with its initial weights."""
    from fla_train.data.prepare import prepare
    from fla_train.training.model import build_model

    return build_model(config, prepare(config.data, log=lambda line: None))


def grad_norm_with_z_loss(config: TrainConfig) -> float:
    """Return, on a rank, the gradient norm of a step with z-loss."""
    sys.path.append(".")
    from callbacks import ZLoss

    engine = build_engine(engine_steps.make_model(config), config)
    z_loss = ZLoss(weight=0.5)
    z_loss.attach(SimpleNamespace(model=engine.module))
    plan = BatchSampler(engine_steps.GLOBAL_BATCH, 2, dist.get_rank(), dist.get_world_size())
    ids, labels = engine_steps.make_batch(0)
    pairs = [(ids[rows], labels[rows]) for rows in plan.indices(0)]
    bad_steps = BadSteps(engine.device, max_grad_norm=0.0)
    return train_step(engine, pairs, 1e-2, bad_steps, features=[z_loss]).read().grad_norm


def test_z_loss_has_the_gradient_of_plain_pytorch(make_config: Make, warm_ranks: WarmRanks):
    config = make_config(*CPU, "launch.num_processes=2")
    model = engine_steps.make_model(config)
    ids, labels = engine_steps.make_batch(0)
    logits, targets = model(input_ids=ids).logits[:, :-1], labels[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (loss + 0.5 * logits.logsumexp(-1)[targets != -100].square().mean()).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert warm_ranks.run(2, grad_norm_with_z_loss, config) == pytest.approx([expected] * 2, rel=1e-5)


def run_with_examples(config: TrainConfig) -> dict:
    sys.path.append(".")
    return engine_steps.run(config)


def test_a_custom_optimizer_takes_the_steps_of_plain_pytorch(make_config, warm_ranks, examples):
    from optimization import Lion

    clip = "optimizer.max_grad_norm=0.5"
    config = make_config(
        *CPU, clip, "optimizer.name=optimization:Lion", "optimizer.options={betas: [0.8, 0.9]}"
    )
    model = engine_steps.make_model(config)
    groups = parameter_groups(model, config.optimizer.weight_decay)
    plain = engine_steps.reference(
        model, [Lion(groups, lr=engine_steps.LEARNING_RATE, betas=(0.8, 0.9))], 0.5
    )
    for world, micro_batch in ((1, 2), (2, 4)):
        trainer = replace(config.trainer, micro_batch_size=micro_batch)
        launch = replace(config.launch, num_processes=world)
        layout = replace(config, trainer=trainer, launch=launch)
        result = warm_ranks.run(world, run_with_examples, layout)[0]
        # A gradient near zero may round to the other sign, which moves a weight by 2 lr.
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-2)
        assert result["losses"][:2] == pytest.approx(plain["losses"][:2], rel=1e-3)
        assert result["poisoned_skipped"] and result["poisoned_unchanged"] and result["healthy_changed"]


def test_the_weights_come_back_after_an_export_of_others():
    layer, zeros = torch.nn.Linear(2, 2), torch.zeros(2, 2)
    before = layer.weight.detach().clone()
    with other_weights(layer, {"weight": zeros}):
        assert torch.equal(layer.weight, zeros)
    assert torch.equal(layer.weight, before)


class Normalized(torch.optim.SGD):
    """Divides each tensor's gradient by its norm."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        super().step()


class Counted(torch.optim.SGD):
    """Counts its steps in a type that a checkpoint is not read with."""

    def step(self, closure: None = None) -> None:
        super().step()
        self.param_groups[0]["steps"] = np.float64(1)


def test_an_optimizer_of_whole_matrices_or_unreadable_state_is_rejected():
    def check(name: str) -> None:
        check_elementwise(OptimizerConfig(name, 0.1, 0.1, 0.9, 0.95, 1e-8, 1.0))

    for elementwise in ("SGD", "AdamW", "RMSprop"):
        check(f"torch.optim:{elementwise}")
    for other, reason in (
        (f"{__name__}:Normalized", "whole matrices"),
        (f"{__name__}:Counted", "checkpoints"),
        ("torch.optim:Adagrad", "in its constructor"),
    ):
        with pytest.raises(ValueError, match=reason):
            check(other)


def test_a_custom_schedule_gets_its_options(make_config: Make, examples: None):
    config = make_config("schedule.name=optimization:inverse_sqrt", "schedule.options={warmup: 4}")
    rates = [make_schedule(config)(step) for step in (1, 4, 16)]
    assert rates == pytest.approx([0.25e-2, 1e-2, 0.5e-2])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["trainer.callbacks=[nowhere:Class]"], "nowhere"),
        (["trainer.callbacks=[callbacks]"], "package.module:Class"),
        (["trainer.callbacks=[optimization:Lion]"], "Callback"),
        (["trainer.callbacks=[{class: callbacks:Ema, decoy: 1}]"], "decoy"),
        (["trainer.callbacks=[callbacks:ZLoss]", "trainer.cuda_graph=true"], "trainer.cuda_graph"),
        (["optimizer.name=optimization:Tiger"], "Tiger"),
        (["optimizer.name=optimization:Lion", "optimizer.options={decoy: 1}"], "decoy"),
        (["optimizer.options={betas: [0.9]}"], "optimizer.options"),
        (["schedule.name=cosin"], "schedule.name"),
    ],
)
@pytest.mark.usefixtures("examples")
def test_what_cannot_work_is_named_before_the_start(make_config: Make, options: list[str], named: str):
    with pytest.raises(ValueError, match=named):
        resolve(make_config("launch.device=cpu", *options))
