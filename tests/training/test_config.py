"""The config: errors named with what would do, what "auto" stands for, and what a resumed run keeps."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_train.cli.app import compose
from fla_train.training.checkpoint import TrainState
from fla_train.training.config import (
    TrainConfig,
    accumulation_steps,
    register,
    resolve,
    to_config,
    to_yaml,
    validate,
    with_batch,
    with_run_paths,
    with_vocabulary,
)
from fla_train.training.launch import launch
from fla_train.training.resume import newest_readable, recorded, with_saved_sizes

Make = Callable[..., TrainConfig]
SIZES = {"micro_batch_size": st.integers(1, 32), "seq_len": st.integers(2, 4096)}


def test_the_example_config_has_no_error(make_config: Make):
    config = make_config()
    validate(config)
    assert accumulation_steps(config) == 256 // (32 * 2)
    for override in ("schedule=constant", "trainer.global_batch_tokens=auto"):
        validate(make_config(override))


@pytest.mark.parametrize(
    ("text", "value"), [("'true'", True), ("'False'", False), ("selective", "selective")]
)
def test_a_text_that_says_true_or_false_counts_as_that(make_config: Make, text: str, value: bool | str):
    assert make_config(f"trainer.activation_checkpointing={text}").trainer.activation_checkpointing == value


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("trainer.global_batch_tokens=300", "use 256 or 320"),
        ("trainer.micro_batch_size=6", "use 192 or 384, or trainer.micro_batch_size=4"),
        ("trainer.global_batch_tokens=10", "use 64"),
        ("launch.num_processes=3", "use 192 or 384"),
        ("schedule.warmup_steps=13", "trainer.max_steps=12"),
        ("schedule.decay_steps=3", "schedule.decay_steps=3 is for schedule=wsd only"),
        ("schedule=wsd schedule.decay_steps=13", "schedule.decay_steps=13 must lie in 0..12"),
        ("schedule=constant schedule.min_ratio=0.5", "schedule.min_ratio=0.5 has no effect"),
        ("optimizer.momentum=0.9", "optimizer.momentum=0.9 must be"),
        ("trainer.global_batch_tokens=1024 launch.num_processes=3", "or launch.num_processes=2"),
        ("trainer.profile_steps=[0,3,13]", "trainer.profile_steps=[0, 13] must lie in 1..12"),
        ("trainer.cuda_graph=true", "several micro-batches"),
        ("hub.push_every=2", "hub.repo_id must be set"),
        ("hub.repo_id=a/b/c", "hub.repo_id=a/b/c is not a name"),
        ("trainer.activation_checkpointing=some", "must be one of true, false, selective"),
        (
            "trainer.activation_checkpointing=selective launch.num_processes=2 launch.context_parallel=2",
            "not supported with trainer.activation_checkpointing=selective",
        ),
        ("trainer.cuda_graph=true launch.num_processes=2", "launch.num_processes above 1"),
        ("trainer.cuda_graph=true data.document_boundaries=true", "data.document_boundaries"),
        ("trainer.keep_checkpoints=0 trainer.keep_every=4", "trainer.keep_every has no effect"),
        ("trainer.resume=/no/such/checkpoint", "trainer.resume=/no/such/checkpoint"),
        ("launch.machine_rank=1", "launch.machine_rank=1 must lie in 0..0"),
        ("data.path=null", "data.path must be set"),
        ("model.num_heads=0", "num_heads must be an integer >= 1"),
    ],
)
def test_keys_that_contradict_others_are_named_with_what_would_do(make_config: Make, keys: str, message: str):
    with pytest.raises(ValueError) as caught:
        validate(make_config(*keys.split()))
    assert message in str(caught.value)


def test_a_run_folder_is_no_checkpoint_to_resume(make_config: Make, tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="is a run folder"):
        validate(make_config(f"trainer.resume={tmp_path}"))


@pytest.mark.parametrize(
    "override",
    [
        *("trainer.precision=fp16", "trainer.max_steps=0", "trainer.seq_len=1", "trainer.hang_timeout=-1.0"),
        *("trainer.global_batch_tokens=automatic", "trainer.global_batch_tokens=0", "seed=-1"),
        *("trainer.global_batch_tokens=-1", "launch.num_processes=0", "launch.num_processes=many"),
        *("optimizer.lr=-1.0", "optimizer.lr=nan", "optimizer.weight_decay=inf", "optimizer.beta2=1.0"),
        *("optimizer.eps=0.0", "schedule.min_ratio=1.5", "schedule.start_ratio=-0.1"),
        *("launch.rendezvous_timeout=inf", "launch.rendezvous_timeout=nan", "launch.peak_tflops=0.0"),
        *("launch.rendezvous_timeout=-1.0", "launch.rendezvous_timeout=10000000000.0"),
        *("launch.peak_tflops=inf", "launch.main_process_port=70000", "model.expand_v=inf"),
        *(f"seed={2**65}", "schedule.warmup_steps=-1"),
    ],
)
def test_values_outside_their_limits_are_named(make_config: Make, override: str):
    with pytest.raises(ValueError) as caught:
        validate(make_config(override))
    assert any(line.strip().startswith(override) for line in str(caught.value).splitlines())


def test_muon_needs_its_momentum(make_config: Make):
    for momentum in ("null", "1.0"):
        with pytest.raises(ValueError, match=r"optimizer\.momentum="):
            validate(make_config("optimizer=muon", f"optimizer.momentum={momentum}"))


def test_all_errors_are_reported_together(make_config: Make):
    with pytest.raises(ValueError) as caught:
        validate(
            make_config(
                "trainer.precision=fp16", "optimizer.beta1=2", "data.shard_bytes=0", "model.num_heads=0",
                "trainer.resume=/no/such",
                "launch.rendezvous_timeout=inf",
            )
        )  # fmt: skip
    for part in (
        "trainer.precision", "optimizer.beta1", "data.shard_bytes", "num_heads",
        "trainer.resume", "launch.rendezvous_timeout",
    ):  # fmt: skip
        assert part in str(caught.value)


def test_a_push_needs_a_token_before_data_are_prepared(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nonexistent")
    run, cache = tmp_path / "run", tmp_path / "cache"
    with pytest.raises(ValueError, match="no Hub token"):
        launch(make_config("hub.repo_id=user/tiny", f"run.dir={run}", f"data.cache_dir={cache}"))
    assert not run.exists() and not cache.exists()


def test_several_machines_need_a_shared_folder_and_an_even_split(make_config: Make):
    with pytest.raises(ValueError) as caught:
        validate(make_config("launch.num_machines=2", "launch.num_processes=1", "run.dir=x"))
    assert "not a multiple of launch.num_machines=2" in str(caught.value)


def test_a_gpu_is_asked_for_where_there_is_none(make_config: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no usable GPU: use launch.device=cpu"):
        validate(make_config("launch.device=cuda"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("launch.device=cpu", "not supported with launch.device=cpu"),
        ("launch.device=cuda", "compute capability 8.9 (Ada, Hopper) or later, this one has 8.0"),
        ("model=hf/llama/tiny", "not supported with a model of another library"),
    ],
)
def test_float8_needs_a_card_that_has_it_and_a_model_of_this_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, override: str, message: str
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    overrides = ["data=local", f"data.path={tmp_path}", "logger=none", "trainer.precision=fp8", override]
    register()
    with pytest.raises(ValueError) as caught:
        validate(to_config(compose("train", overrides)))
    assert sum(message in line for line in str(caught.value).splitlines()) == 1


def test_more_gpus_are_asked_for_than_there_are(make_config: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"asks for 2 GPUs .* has 1: use launch.num_processes=1"):
        validate(make_config("launch.num_processes=2"))


@pytest.fixture(scope="module")
def auto(make_config: Make) -> TrainConfig:
    return make_config("trainer.global_batch_tokens=auto")


@given(**SIZES, target=st.integers(1, 2**21), processes=st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_auto_is_the_nearest_batch_that_ranks_and_micro_batch_divide(
    auto: TrainConfig, micro_batch_size: int, seq_len: int, target: int, processes: int
):
    trainer = replace(
        auto.trainer, micro_batch_size=micro_batch_size, seq_len=seq_len, target_batch_tokens=target
    )
    launch = replace(auto.launch, num_processes=processes)
    found = with_batch(replace(auto, trainer=trainer, launch=launch))
    unit, tokens = micro_batch_size * seq_len * processes, found.trainer.global_batch_tokens
    assert tokens == unit * accumulation_steps(found)
    below = target // unit  # the nearest multiple is this one or the next, but for 0
    assert all(abs(tokens - target) <= abs(n * unit - target) for n in (max(1, below), below + 1))


@pytest.mark.parametrize("size", ["340m", "1.3b"])
@pytest.mark.parametrize("processes", [1, 2, 4, 8, 16])
def test_the_large_models_train_on_the_papers_batch(make_config: Make, size: str, processes: int):
    keys = ("seq_len", "global_batch_tokens", "micro_batch_size", "activation_checkpointing")
    given = [f"model=delta_net/{size}", f"launch.num_processes={processes}", "logger=none"]
    config = to_config(compose("train", given))
    validate(config)
    trainer = with_batch(config).trainer
    assert tuple(getattr(trainer, key) for key in keys) == (2048, 524288, 16 if size == "340m" else 8, False)


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [(["name=bytes"], 320), (["name=bpe", "vocab_size=300"], 320), (["name=bpe", "vocab_size=4096"], 4096)],
    ids=str,
)
def test_the_vocabulary_follows_the_tokenizer(make_config: Make, tokenizer: list[str], size: int):
    config = make_config("model.vocab_size=null", *(f"data.tokenizer.{key}" for key in tokenizer))
    validate(config)
    assert with_vocabulary(config).model["vocab_size"] == size


def test_a_given_vocabulary_stays_or_is_refused(make_config: Make):
    assert with_vocabulary(make_config("model.vocab_size=259")).model["vocab_size"] == 259
    with pytest.raises(ValueError, match=r"model\.vocab_size=320"):
        with_vocabulary(make_config("model.vocab_size=258"))


def test_a_tokenizer_that_is_not_here_leaves_the_usual_size(
    make_config: Make, capfd: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = make_config("model.vocab_size=null", "data.tokenizer.name=nobody/nothing")
    assert with_vocabulary(config, offline=True).model["vocab_size"] == 32000
    assert "nobody/nothing is not on this machine" in capfd.readouterr().out
    with pytest.raises(ValueError, match="nobody/nothing"):
        with_vocabulary(config)


def record(config: TrainConfig, checkpoint: Path) -> None:
    """Write the state of a checkpoint, which records its run's config."""
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(asdict(TrainState(config=recorded(config)))))


def test_a_resumed_run_keeps_what_it_was_begun_with(make_config: Make, tmp_path: Path):
    run = tmp_path / "run"
    begun = make_config("schedule.warmup_steps=2", "trainer.global_batch_tokens=512", "model.vocab_size=384")
    record(begun, run / "checkpoints" / "step-0000003")
    open_ = ["trainer.global_batch_tokens=auto", "model.vocab_size=null", "launch.num_processes=4"]
    kept = with_saved_sizes(make_config(*open_, f"run.dir={run}"))
    assert (kept.schedule.warmup_steps, kept.trainer.global_batch_tokens) == (2, 512)
    assert kept.model["vocab_size"] == 384
    given = make_config("schedule.warmup_steps=1", f"run.dir={run}")
    assert with_saved_sizes(given) == given
    with pytest.raises(ValueError, match="init_from="):  # not a batch that does not fit
        with_saved_sizes(make_config(*open_, "trainer.seq_len=64", f"run.dir={run}"))
    elsewhere = make_config(*open_, f"run.dir={tmp_path / 'new'}")
    assert with_saved_sizes(elsewhere) == elsewhere


def test_a_tilde_in_run_dir_is_the_home_folder(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Before anything is looked for in it: the command that began the run resumes it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    record(make_config("model.vocab_size=384"), tmp_path / "run" / "checkpoints" / "step-0000003")
    config = with_run_paths(make_config("model.vocab_size=null", "run.dir='~/run'"))
    assert config.run.dir == f"{tmp_path}/run"
    assert with_saved_sizes(config).model["vocab_size"] == 384


def test_a_branch_needs_its_beginning_no_more_once_it_has_checkpoints(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trunk" / "checkpoints" / "step-0000003").mkdir(parents=True)
    asked = make_config("trainer.resume=trunk/checkpoints/step-0000003", f"run.dir={tmp_path / 'branch'}")
    config = with_run_paths(asked)
    validate(config)
    (tmp_path / "trunk").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match="is no checkpoint folder"):
        validate(config)
    newest = tmp_path / "branch" / "checkpoints" / "step-0000004"
    newest.mkdir(parents=True)
    (newest / "state.json").write_text(json.dumps({"step": 4}))
    (tmp_path / "branch" / "config.yaml").write_text(to_yaml(config))
    validate(config)
    assert newest_readable(config) == newest


def test_paths_become_absolute_so_that_a_run_is_resumed_from_any_folder(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "export").mkdir()
    given = ["data.path=text/*.jsonl", "data.tokenizer.name=tokenizer", "init_from=export"]
    config = resolve(make_config(*given))
    assert config.data.path == str(tmp_path / "text" / "*.jsonl")
    assert config.data.tokenizer.name == str(tmp_path / "tokenizer")
    assert config.init_from == str(tmp_path / "export")
    named = resolve(make_config("data.tokenizer.name=user/tokenizer", "init_from=user/model"))
    assert (named.data.tokenizer.name, named.init_from) == ("user/tokenizer", "user/model")
