"""What a config leaves open: the batch, the vocabulary, and what a continued run keeps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_train.training.config import TrainConfig
from fla_train.training.resolve import accumulation_steps, resolve, with_batch, with_saved, with_vocabulary
from fla_train.training.validate import validate

Make = Callable[..., TrainConfig]
SIZES = {"micro_batch_size": st.integers(1, 32), "seq_len": st.integers(2, 4096)}


@given(**SIZES, target=st.integers(1, 2**21), processes=st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_auto_is_the_nearest_batch_that_ranks_and_micro_batch_divide(
    make_config: Make, micro_batch_size: int, seq_len: int, target: int, processes: int
):
    config = make_config("trainer.global_batch_tokens=auto")
    trainer = replace(
        config.trainer, micro_batch_size=micro_batch_size, seq_len=seq_len, target_batch_tokens=target
    )
    launch = replace(config.launch, num_processes=processes)
    found = with_batch(replace(config, trainer=trainer, launch=launch))
    unit, tokens = micro_batch_size * seq_len * processes, found.trainer.global_batch_tokens
    assert tokens == unit * accumulation_steps(found)
    assert all(abs(tokens - target) <= abs(n * unit - target) for n in range(1, 2 + target // unit))


@pytest.mark.parametrize("size", ["340m", "1.3b"])
@pytest.mark.parametrize("processes", [1, 2, 4, 8, 16])
def test_the_large_models_train_on_the_papers_batch(make_config: Make, size: str, processes: int):
    keys = ("seq_len", "global_batch_tokens", "micro_batch_size", "activation_checkpointing")
    from fla_train.cli.app import compose
    from fla_train.training.config import to_config

    given = [f"model=delta_net/{size}", f"launch.num_processes={processes}", "logger=none"]
    config = to_config(compose("train", given))
    validate(config)
    trainer = with_batch(config).trainer
    expected = (2048, 524288, 16, False) if size == "340m" else (2048, 524288, 8, True)
    assert tuple(getattr(trainer, key) for key in keys) == expected


@pytest.mark.parametrize("value", ["automatic", "0", "-1"])
def test_a_batch_that_is_neither_a_number_nor_auto(make_config: Make, value: str):
    with pytest.raises(ValueError, match=f"trainer.global_batch_tokens={value} must be"):
        validate(make_config(f"trainer.global_batch_tokens={value}"))


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


def test_a_continued_run_keeps_what_it_was_begun_with(make_config: Make):
    saved = {"warmup_steps": 2, "global_batch_tokens": 512, "vocab_size": 384}
    open_ = make_config("trainer.global_batch_tokens=auto", "model.vocab_size=null", "launch.num_processes=4")
    kept = with_saved(open_, saved)
    assert (kept.schedule.warmup_steps, kept.trainer.global_batch_tokens) == (2, 512)
    assert kept.model["vocab_size"] == 384
    given = make_config("schedule.warmup_steps=1")
    assert with_saved(given, saved) == given


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
