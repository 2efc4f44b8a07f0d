"""Exact resume of every feature: a run cut at its middle ends like an undisturbed one, bit for bit."""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_resume import losses
from torch.utils._pytree import keystr, tree_flatten_with_path
from warm_ranks import WarmRanks

from fla_train.cli.app import compose
from fla_train.run.launch import launch
from fla_train.training import checkpoint
from fla_train.training.config import TrainConfig, register, to_config

pytestmark = pytest.mark.usefixtures("elsewhere")
MIDDLE, STEPS = 3, 6
TWO = "launch.num_processes=2"
COMMON = [
    *("launch.device=cpu", "trainer.precision=fp32", "trainer.stats_every=2", "trainer.keep_checkpoints=0"),
    *(f"trainer.max_steps={STEPS}", f"trainer.checkpoint_every={MIDDLE}", f"trainer.eval_every={MIDDLE}"),
]
PACKED = "data.document_boundaries=true"
CALLBACKS = "[{class: callbacks:Ema, decay: 0.9}, callbacks:ZLoss, callbacks:SmoothLoss]"
# Resumed on another number of ranks, sums over ranks round otherwise; a large eps keeps that small.
EPS = "optimizer.eps=1e-3"
# A task has its own sizes, and another library's model does not take those of `overrides`.
TASK = [
    *("experiment=state_tracking/s3", "scale=cpu", "model.hidden_size=32", "model.num_heads=2"),
    "task.train.length=6",
    *("task.tests.longer.length=12", "task.test_sequences=24", "task.batch_size=16", "trainer.log_every=1"),
    *("trainer.check_backend=false", "logger=none"),
]


class NarrowMomentum(torch.optim.SGD):
    """Keeps its momentum in bf16, where torch's `load_state_dict` casts it to the dtype of the weights.

    The random states of ranks differ from its first step on.
    """

    def step(self, closure: None = None) -> None:
        super().step()
        torch.rand(int(os.environ.get("RANK", 0)))
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


FEATURES = {
    "packed": [TWO, PACKED, EPS],
    "bf16": [
        *(TWO, "trainer.precision=bf16", "trainer.activation_checkpointing=true"),
        "trainer.gradient_reduction=bf16",
    ],
    "muon": [TWO, "optimizer=muon", "model.num_heads=3", EPS],
    "passing": [TWO, "trainer.initial_state=passing", "trainer.zero_state_share=0.3", EPS],
    "noise and the spike filter": [
        *(
            TWO,
            "trainer.initial_state=noise",
            "trainer.spike_deviations=3",
            "optimizer.max_grad_norm=0.1",
            EPS,
        )
    ],
    "contiguous documents": [TWO, "data.contiguous=true", PACKED, EPS],
    "context parallelism": [TWO, "launch.context_parallel=2", PACKED],
    "mixture": [PACKED, "data=mixture", "data.path=null"],
    "stream": ["data.stream=true", "data.stream_head_documents=100"],
    "task": [*TASK, "task.curriculum=[[2,1],[4,3]]"],
    "another library's model": ["model=hf/llama/tiny", "model.config.hidden_size=32"],
    "hybrid and a custom schedule": [
        *("model.layer_types=[linear_attention,full_attention]", "model.num_attention_heads=2"),
        *("schedule.name=optimization:inverse_sqrt", "schedule.options={warmup: 2}"),
    ],
    "custom optimizer and callbacks": [
        *(TWO, f"optimizer.name={__name__}:NarrowMomentum", "optimizer.options={momentum: 0.9}"),
        *("optimizer.lr=1e-3", f"trainer.callbacks={CALLBACKS}"),
    ],
}
# The features of two ranks that are also resumed on one.
RESHARDED = ["packed", "muon", "passing", "noise and the spike filter", "contiguous documents"]
RESHARDED += ["custom optimizer and callbacks"]
Make = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def make(overrides: list[str], corpus: Path) -> Make:
    """`make(*options)` composes a run: of text, or of a task if an experiment is named."""
    register()

    def composed(*options: str) -> TrainConfig:
        base = [] if any(option.startswith("experiment=") for option in options) else overrides
        if any(option.startswith("model=hf/") for option in options):
            base = [option for option in base if not option.startswith("model.")]
        if base and TWO not in options:
            base = [*base, "trainer.micro_batch_size=4"]  # Two passes, as two ranks have.
        if "data=mixture" in options:
            halves = f"{{a: {{weight: 0.75, path: {corpus}}}, b: {{weight: 0.25, path: {corpus}}}}}"
            options = (*options, f"+data.mixture={halves}")
        return to_config(compose("train", [*base, *COMMON, *options]))

    return composed


@pytest.fixture(scope="module")
def whole(
    make: Make, warm_ranks: WarmRanks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`whole(feature)` is an undisturbed run with it."""

    @functools.cache
    def run(feature: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        warm_ranks.launch(make(*FEATURES[feature], f"run.dir={folder}"))
        return folder

    return run


def cut(run: Path, copy: Path) -> Path:
    """Copy a run as a kill after the checkpoint at its middle leaves it, later metrics included."""
    last = checkpoint.folder_name(STEPS)
    return shutil.copytree(run, copy, ignore=shutil.ignore_patterns("hf", "ema", "plots", last))


def saved(run: Path) -> dict[str, object]:
    """Return the tensors and values of the last checkpoint, without what names the start."""
    folder = run / "checkpoints" / checkpoint.folder_name(STEPS)
    files = {path.name: torch.load(path, weights_only=False) for path in sorted(folder.rglob("*.pt"))}
    return files | {
        "weights": {path.parent.parent.name: path.read_bytes() for path in run.glob("*/*/*.safetensors")}
    }


def assert_equal(ours: object, theirs: object) -> None:
    """Compare nested containers, and the tensors and values in them bit for bit."""
    (our_leaves, our_tree), (their_leaves, their_tree) = map(tree_flatten_with_path, (ours, theirs))
    assert our_tree == their_tree
    for (path, a), (_, b) in zip(our_leaves, their_leaves, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), keystr(path)
        elif not hasattr(a, "__dict__"):
            assert a == b, keystr(path)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_resumed_run_equals_an_undisturbed_one(make, warm_ranks, whole, tmp_path, feature):
    whole, again = whole(feature), cut(whole(feature), tmp_path / "again")
    warm_ranks.launch(make(*FEATURES[feature], f"run.dir={again}"))
    assert f"from {again}/checkpoints/{checkpoint.folder_name(MIDDLE)}" in (again / "train.log").read_text()
    assert "afresh" not in (again / "train.log").read_text()
    assert losses(again) == losses(whole)
    assert_equal(saved(again), saved(whole))
    assert len([record for record in losses(whole) if "loss" in record]) == STEPS


@pytest.mark.parametrize(
    ("feature", "more"),
    [
        *((feature, ()) for feature in RESHARDED),
        ("packed", (TWO, "launch.context_parallel=2", "trainer.micro_batch_size=4")),
    ],
)
def test_a_run_resumes_on_another_number_of_ranks(make, warm_ranks, whole, tmp_path, feature, more):
    whole, again = whole(feature), cut(whole(feature), tmp_path / "again")
    options = [option for option in FEATURES[feature] if option != TWO]
    warm_ranks.launch(make(*options, *more, f"run.dir={again}"))
    assert "start from zero" not in (again / "train.log").read_text()
    # Muon and the custom optimizer round to bf16.
    tolerance = 1e-3 if feature in ("muon", "custom optimizer and callbacks") else 1e-5
    for ours, theirs in zip(losses(again), losses(whole), strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() & {"loss", "validation_loss", "smooth_loss"}:
            assert ours[key] == pytest.approx(theirs[key], rel=tolerance), key


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [["trainer.precision=fp8", "model.hidden_size=128"], ["trainer.cuda_graph=true"]]
)
def test_a_run_on_a_gpu_resumes_exactly(make: Make, tmp_path: Path, options: list[str]):
    options = ["launch.device=cuda", "launch.num_processes=1", "trainer.micro_batch_size=8", *options]
    whole, again = tmp_path / "whole", tmp_path / "again"
    launch(make(*options, f"run.dir={whole}"))
    cut(whole, again)
    launch(make(*options, f"run.dir={again}"))
    assert losses(again) == losses(whole)
    assert_equal(saved(again), saved(whole))
