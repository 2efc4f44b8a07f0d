"""Resolve requests: errors, default values, and the settings that a resumed run keeps."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_train.cli.app import compose
from fla_train.run.launch import launch
from fla_train.run.resolve import resolve
from fla_train.training.checkpoint import TrainState
from fla_train.training.config import TrainConfig, to_config
from fla_train.training.plan import read_plan
from fla_train.training.resume import recorded
from fla_train.utils.keys import find_errors, rule

Make = Callable[..., TrainConfig]
SIZES = {"micro_batch_size": st.integers(1, 32), "seq_len": st.integers(2, 4096)}


def test_the_example_config_has_no_error(make_config: Make):
    assert resolve(make_config()).config.num_accumulated == 256 // (32 * 2)
    for override in ("schedule=constant", "trainer.global_batch_tokens=auto"):
        resolve(make_config(override))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        # Limits of a key: each must be named with its value
        *((key, key) for key in ("trainer.precision=fp16", "trainer.max_steps=0", "trainer.seq_len=1")),
        *((key, key) for key in ("trainer.global_batch_tokens=many", "launch.num_processes=0", "seed=-1")),
        *((key, key) for key in ("optimizer.lr=nan", "optimizer.weight_decay=inf", "optimizer.beta2=1.0")),
        *((key, key) for key in ("launch.rendezvous_timeout=10000000000.0", f"seed={2**65}")),
        # Keys of a section
        ("optimizer.momentum=0.9", "optimizer.momentum=0.9"),
        ("schedule.decay_steps=3", "schedule.decay_steps=3"),
        ("schedule=constant schedule.min_ratio=0.5", "schedule.min_ratio=0.5"),
        ("trainer.keep_checkpoints=0 trainer.keep_every=4", "trainer.keep_every"),
        ("hub.push_every=2", "hub.repo_id"),
        ("data.path=null", "data.path"),
        ("data=stdlib data.path=null data.text_column=body", "data.text_column=body"),
        ("model.num_heads=0", "num_heads"),
        # Keys that must fit others
        ("trainer.global_batch_tokens=300", "256 or 320"),
        ("launch.num_processes=3", "192 or 384"),
        ("launch.num_machines=2 launch.num_processes=1 run.dir=x", "launch.num_machines=2"),
        ("schedule.warmup_steps=13", "trainer.max_steps=12"),
        ("schedule=wsd schedule.decay_steps=13", "0..12"),
        ("trainer.profile_steps=[0,3,13]", "trainer.profile_steps=[0, 13]"),
        ("trainer.max_steps=null trainer.max_tokens=100", "trainer.max_tokens"),
        ("trainer.max_tokens=1000", "max_steps, max_tokens, epochs"),
        # The table of options that exclude each other
        ("trainer.cuda_graph=true", "several micro-batches"),
        ("trainer.precision=fp8", "launch.device=cpu"),
    ],
)
def test_errors_name_the_key(make_config: Make, keys: str, message: str):
    with pytest.raises(ValueError) as caught:
        resolve(make_config("launch.device=cpu", *keys.split()))
    assert message in str(caught.value)


def test_all_errors_are_reported_together(make_config: Make):
    wrong = "trainer.precision=fp16 optimizer.beta1=2 data.shard_bytes=0 model.num_heads=0"
    with pytest.raises(ValueError) as caught:
        resolve(make_config(*wrong.split()))
    assert len(str(caught.value).splitlines()) == 4


def test_a_key_that_a_program_misspells_is_an_error(make_config: Make):
    config = make_config()
    config.trainer.max_step = 3
    assert find_errors(config) == ["trainer.max_step is not a key: see docs/configuration.md"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("model.hidden_size", "fixed"), ("model.backend", "free"), ("launch.num_processes", "free")),
        *(("data.path", "data"), ("data.mixture.web.path", "data"), ("data.contiguous", "fixed")),
        *(("data.num_workers", "free"), ("task.options.group", "fixed"), ("task.stop_at", None)),
        *(("trainer.max_steps", None), ("trainer.resume", "free"), ("seed", "fixed")),
    ],
)
def test_resume_rules(name: str, expected: str | None):
    assert rule(TrainConfig, "resume", name) == expected


def test_a_push_needs_a_token_before_data_are_prepared(make_config, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    run, cache = tmp_path / "run", tmp_path / "cache"
    with pytest.raises(ValueError, match="no Hub token"):
        launch(make_config("hub.repo_id=user/tiny", f"run.dir={run}", f"data.cache_dir={cache}"))
    assert not run.exists() and not cache.exists()


@pytest.mark.parametrize(
    ("gpus", "override", "message"),
    [
        (0, "launch.device=cuda", "launch.device=cpu"),
        (1, "launch.num_processes=2", "launch.num_processes=1"),
        (1, "trainer.precision=fp8", "trainer.precision=fp8"),
        (1, "trainer.precision=fp8 model=hf/llama/tiny", "trainer.precision=fp8 .* another library"),
    ],
)
def test_what_a_machine_lacks(make_config: Make, monkeypatch, gpus: int, override: str, message: str):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match=message):
        resolve(to_config(compose("train", ["logger=none", *override.split()])))


@pytest.fixture(scope="module")
def auto(make_config: Make) -> TrainConfig:
    return make_config("trainer.global_batch_tokens=auto", "launch.device=cuda", "dry_run=true")


@given(**SIZES, target=st.integers(1, 2**21), processes=st.integers(1, 64))
@settings(max_examples=30, deadline=None)
def test_auto_is_the_nearest_batch_that_ranks_and_micro_batch_divide(
    auto: TrainConfig, micro_batch_size: int, seq_len: int, target: int, processes: int
):
    sizes = {"micro_batch_size": micro_batch_size, "seq_len": seq_len, "target_batch_tokens": target}
    launch = replace(auto.launch, num_processes=processes)
    plan = resolve(replace(auto, trainer=replace(auto.trainer, **sizes), launch=launch))
    unit, tokens = micro_batch_size * seq_len * processes, plan.config.trainer.global_batch_tokens
    assert tokens == unit * plan.config.num_accumulated
    below = target // unit  # the nearest multiple is this one or the next, but for 0
    assert all(abs(tokens - target) <= abs(n * unit - target) for n in (max(1, below), below + 1))


def test_tokens_and_epochs_are_alternatives_to_steps(make_config: Make, tmp_path: Path):
    """A length on the command line replaces that of the recipe."""
    asked = ["trainer.max_tokens=4000000"]
    assert to_config(compose("train", asked), asked).trainer.max_steps is None
    steps = "trainer.max_steps=null"
    assert resolve(make_config(steps, "trainer.max_tokens=1000")).config.trainer.max_steps == 1000 // 256
    plan = resolve(make_config(steps, "trainer.epochs=2.5"), data="prepare")
    assert plan.config.trainer.max_steps == int(2.5 * plan.training_tokens) // 256
    assert plan.epochs == pytest.approx(2.5, rel=0.02)
    assert plan.config.schedule.warmup_steps == int(0.05 * plan.config.trainer.max_steps)
    with pytest.raises(ValueError, match="needs prepared data"):
        resolve(make_config(steps, "trainer.epochs=2.5"))
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    assert read_plan(file) == plan


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [(["name=bytes"], 320), (["name=bpe", "vocab_size=300"], 320), (["name=bpe", "vocab_size=4096"], 4096)],
    ids=str,
)
def test_the_vocabulary_follows_the_tokenizer(make_config: Make, tokenizer: list[str], size: int):
    config = make_config("model.vocab_size=null", *(f"data.tokenizer.{key}" for key in tokenizer))
    assert resolve(config).config.model["vocab_size"] == size
    assert config.model["vocab_size"] is None


def test_a_given_vocabulary_stays_or_is_refused(make_config: Make):
    assert resolve(make_config("model.vocab_size=259")).config.model["vocab_size"] == 259
    with pytest.raises(ValueError, match=r"model\.vocab_size=320"):
        resolve(make_config("model.vocab_size=258"))


def record(config: TrainConfig, checkpoint: Path, data: str | None = None) -> None:
    """Write the state of a checkpoint, which records its run's config and data."""
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(asdict(TrainState(config=recorded(config), data=data))))


def test_a_resumed_run_has_the_same_text_in_a_mixture(make_config: Make, corpus: Path, tmp_path: Path):
    text = shutil.copytree(corpus, tmp_path / "text")
    mixture = f"+data.mixture={{a: {{weight: 1, path: {text}}}, b: {{weight: 2, path: {corpus}}}}}"
    options = ["data=mixture", "data.path=null", f"data.cache_dir={tmp_path}", mixture]
    plan = resolve(make_config(*options), data="prepare")
    record(plan.config, tmp_path / "run" / "checkpoints" / "step-0000003", Path(plan.data_folder).name)
    again = make_config(*options, f"run.dir={tmp_path / 'run'}")
    assert resolve(again, data="prepare").data_folder == plan.data_folder
    with (text / "documents.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(ValueError, match="step-0000003"):
        resolve(again, data="prepare")


def test_a_resumed_run_keeps_what_it_was_begun_with(make_config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = ["schedule.warmup_steps=2", "trainer.global_batch_tokens=512", "model.vocab_size=384"]
    record(resolve(make_config(*asked)).config, tmp_path / "run" / "checkpoints" / "step-0000003")
    open_ = ["trainer.global_batch_tokens=auto", "model.vocab_size=null", "launch.num_processes=4"]
    kept = resolve(make_config(*open_, "run.dir='~/run'"), data="find").config
    assert (kept.schedule.warmup_steps, kept.trainer.global_batch_tokens) == (2, 512)
    assert kept.model["vocab_size"] == 384
    with pytest.raises(
        ValueError, match=r"trainer\.seq_len=64 .*init_from="
    ):  # not a batch that does not fit
        resolve(make_config(*open_, "trainer.seq_len=64", "run.dir='~/run'"), data="find")
    elsewhere = resolve(make_config(*open_, "run.dir='~/new'"), data="find").config
    assert elsewhere.model["vocab_size"] == 320


def test_paths_become_absolute_so_that_a_run_is_resumed_from_any_folder(make_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "export").mkdir()
    plan = resolve(make_config("data.path=text/*.jsonl", "init_from=export"))
    for config in (plan.request, plan.config):
        assert config.data.path == str(tmp_path / "text" / "*.jsonl")
        assert config.init_from == str(tmp_path / "export")
    assert resolve(make_config("init_from=user/model")).config.init_from == "user/model"
