from collections.abc import Callable

import pytest
import torch

from fla_train.training.config import TrainConfig
from fla_train.training.resolve import accumulation_steps
from fla_train.training.validate import validate

Make = Callable[..., TrainConfig]


def test_the_example_config_has_no_fault(make_config: Make):
    config = make_config()
    validate(config)
    assert accumulation_steps(config) == 256 // (32 * 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.global_batch_tokens=300", "use 256 or 320"),
        ("trainer.global_batch_tokens=10", "use 64"),
        ("launch.num_processes=3", "use 192 or 384"),
        ("trainer.precision=fp8", "trainer.precision=fp8 is not one of auto, bf16, fp32"),
        ("schedule.warmup_steps=13", "longer than the run: use at most trainer.max_steps=12"),
        ("trainer.max_steps=0", "trainer.max_steps=0 must be at least 1"),
        ("trainer.seq_len=1", "use at least 2"),
        ("optimizer.lr=-1", "optimizer.lr=-1.0 must not be negative"),
        ("optimizer.lr=nan", "optimizer.lr=nan must be a finite number"),
        ("optimizer.weight_decay=inf", "optimizer.weight_decay=inf must be a finite number"),
        ("launch.rendezvous_timeout=inf", "launch.rendezvous_timeout=inf must be a finite number"),
        ("launch.rendezvous_timeout=nan", "launch.rendezvous_timeout=nan must be positive, at most 1e.09"),
        ("launch.rendezvous_timeout=-1", "launch.rendezvous_timeout=-1.0 must be positive"),
        ("launch.rendezvous_timeout=1e10", "at most 1e.09 seconds"),
        ("launch.peak_tflops=inf", "launch.peak_tflops=inf must be a finite number"),
        (f"seed={2**65}", rf"seed={2**65} must lie in -2\^63\.\.2\^63 - 1"),
        (
            "trainer.profile_steps=[9223372036854775808]",
            r"trainer.profile_steps=9223372036854775808 must lie",
        ),
        ("model.expand_v=inf", "model.expand_v=inf must be a finite number"),
        ("optimizer.beta2=1", r"optimizer.beta2=1.0 must lie in \[0, 1\)"),
        ("schedule.min_ratio=1.5", r"schedule.min_ratio=1.5 must lie in \[0, 1\]"),
        ("schedule.start_ratio=-0.1", r"schedule.start_ratio=-0.1 must lie in \[0, 1\]"),
        ("schedule.decay_steps=3", "schedule.decay_steps=3 is for schedule=wsd only"),
        ("optimizer.eps=0", r"optimizer.eps=0.0 must be positive"),
        ("optimizer.momentum=0.9", "optimizer.momentum=0.9 is for optimizer=muon only"),
        ("launch.peak_tflops=0", "launch.peak_tflops=0.0 must be positive"),
        ("trainer.profile_steps=[0,3,13]", r"trainer.profile_steps=\[0, 13\] must lie in 1..12"),
        ("trainer.hang_timeout=-1", "trainer.hang_timeout=-1.0 must not be negative"),
        (
            "trainer.cuda_graph=true",
            "trainer.cuda_graph=true cannot be had with several micro-batches a step",
        ),
        ("trainer.resume=/no/such/checkpoint", "is no checkpoint folder"),
        ("launch.machine_rank=1", r"launch.machine_rank=1 must lie in 0..0"),
        ("launch.main_process_port=70000", "must lie in 1..65535"),
        ("data.path=null", "needs data.path"),
        ("model.num_heads=0", "num_heads must be an integer >= 1"),
    ],
)
def test_each_fault_is_named_with_what_would_do(make_config: Make, override: str, message: str):
    with pytest.raises(ValueError, match=message):
        validate(make_config(override))


def test_a_key_that_the_schedule_would_ignore_is_refused(make_config: Make):
    validate(make_config("schedule=constant"))
    with pytest.raises(ValueError, match=r"min_ratio=0.5 has no effect with schedule=constant"):
        validate(make_config("schedule=constant", "schedule.min_ratio=0.5"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["schedule=wsd", "schedule.decay_steps=13"], r"decay_steps=13 must lie in 0\.\.12"),
        (["optimizer=muon", "optimizer.momentum=1"], r"momentum=1.0 must lie in \[0, 1\)"),
        (["trainer.keep_checkpoints=0", "trainer.keep_every=4"], "keep_every has no effect"),
        (
            ["trainer.cuda_graph=true", "trainer.activation_checkpointing=true"],
            "cannot be had with trainer.activation_checkpointing: set it to false",
        ),
        (["trainer.cuda_graph=true", "launch.num_processes=2"], "launch.num_processes above 1: set it"),
        (["trainer.cuda_graph=true", "data.document_boundaries=true"], "with data.document_boundaries: set"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(make_config: Make, more: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        validate(make_config(*more))


def test_all_faults_are_reported_together(make_config: Make):
    with pytest.raises(ValueError) as caught:
        validate(
            make_config(
                "trainer.precision=fp8", "optimizer.beta1=2", "data.shard_tokens=0", "model.num_heads=0",
                "trainer.global_batch_tokens=300", "trainer.resume=/no/such", "launch.machine_rank=7",
                "launch.rendezvous_timeout=inf", f"seed={2**65}",
            )
        )  # fmt: skip
    for part in (
        "trainer.precision", "optimizer.beta1", "data.shard_tokens", "num_heads", "use 256 or 320",
        "trainer.resume", "launch.machine_rank", "launch.rendezvous_timeout", "seed",
    ):  # fmt: skip
        assert part in str(caught.value)


def test_several_machines_need_a_shared_folder_and_an_even_split(make_config: Make):
    with pytest.raises(ValueError) as caught:
        validate(make_config("launch.num_machines=2", "launch.num_processes=1"))
    assert "needs run.dir" in str(caught.value)
    assert "not a multiple of launch.num_machines=2" in str(caught.value)


def test_a_gpu_is_asked_for_where_there_is_none(make_config: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no usable GPU: use launch.device=cpu"):
        validate(make_config("launch.device=cuda"))


def test_more_gpus_are_asked_for_than_there_are(make_config: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"asks for 2 GPUs .* has 1: use launch.num_processes=1"):
        validate(make_config("launch.num_processes=2"))
