"""Throughput, statistics of a step, watchdog and profiles, each against something worked out by hand."""

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import pytest
import torch
from warm_ranks import TWO_RANKS

from fla_train.data.sampler import Batch, pack
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.mixers import DeltaProductMixer, registry
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.training.failures import report
from fla_train.training.features.statistics import Statistics
from fla_train.utils.records import read_metrics
from fla_train.utils.throughput import Throughput, peak_flops
from fla_train.utils.watchdog import Watchdog

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "precision", "override", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", None, 989.4),
        ("NVIDIA A100-SXM4-40GB", "fp32", None, None),
        ("NVIDIA A10", "bf16", None, 125.0),
        ("NVIDIA A10G", "bf16", None, None),
        ("cpu", "fp32", 2.0, 2.0),
    ],
)
def test_the_peak_is_known_by_name_or_given(name: str, precision: str, override: float, tflops: float):
    expected = None if tflops is None else tflops * 1e12
    assert peak_flops(name, precision, override) == expected


def test_a_meter_counts_training_only(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Throughput(flops_per_token=50.0, peak=1000.0, device=CPU)
    for _ in range(2):
        meter.start()
        with meter.waiting():
            now[0] += 0.5
        now[0] += 1.5
        meter.stop(tokens=20)
        now[0] += 100.0  # evaluation, checkpoint
    record = meter.read()
    assert record["tokens_per_second"] == 40 / 4
    assert record["data_wait"] == 1 / 4
    assert record["mfu"] == pytest.approx(10 * 50 / 1000)
    assert record["memory_gib"] > 0
    assert meter.read()["tokens_per_second"] == 0.0
    assert "mfu" not in Throughput(50.0, None, CPU).read()


@pytest.mark.parametrize("gated", [True, False])
def test_statistics_are_those_of_the_step_and_its_first_sequence(alone: None, gated: bool, monkeypatch):
    """In a hybrid, with a mixer that turns beta into 2 - beta."""
    other = {"operator_inputs": lambda self, q, k, v, beta, g: (q, k, v, 2 - beta, g)}
    monkeypatch.setattr(registry, "DeltaProductMixer", type("Other", (DeltaProductMixer,), other))
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "num_heads": 2, "head_dim": 8}
    types = ["linear_attention", "full_attention", "linear_attention"]
    model = DeltaProductForCausalLM(DeltaProductConfig(**sizes, layer_types=types, use_forget_gate=gated))
    model.model.layers[1].attn.gates = torch.nn.Linear(1, 1)  # no gates of our operator
    partitions = [torch.arange(4.0), torch.ones(3)]
    optimizer = SimpleNamespace(single_partition_of_fp32_groups=partitions)
    trainer = SimpleNamespace(
        engine=SimpleNamespace(optimizer=optimizer),
        model=model,
        mesh=SimpleNamespace(context=None),
        is_observed=lambda step: True,
    )
    statistics, values = Statistics(), {}
    statistics.attach(trainer)
    ids = torch.arange(24).view(2, 12)
    batch = pack(ids, [[], []]) if gated else Batch(ids, ids)
    statistics.before_step(1, [batch])
    model(input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens)
    model(input_ids=ids.flip(0))  # a second micro-batch changes nothing
    partitions[0].add_(3.0)
    partitions[1].sub_(1.0)
    statistics.after_step(1, values)
    assert values["param_norm"] == pytest.approx((9 + 16 + 25 + 36) ** 0.5)
    assert values["update_norm"] == pytest.approx((4 * 9 + 3) ** 0.5)

    assert {f"beta/{layer}" for layer in (0, 2)} == {name for name in values if name.startswith("beta/")}
    outputs = model(input_ids=ids[:1], output_hidden_states=True)
    for layer in (0, 2):
        block = model.model.layers[layer]
        x, attn = block.attn_norm(outputs.hidden_states[layer]), block.attn
        beta = 2 - 2 * attn.b_proj(x).sigmoid()
        assert values[f"beta/{layer}"] == pytest.approx(beta.mean().item(), rel=1e-5)
        assert values[f"beta_above_1/{layer}"] == pytest.approx((beta > 1).double().mean().item())
        assert (f"decay/{layer}" in values) == gated
        if gated:
            g = -attn.A_log.exp() * torch.nn.functional.softplus(attn.a_proj(x) + attn.dt_bias)
            assert values[f"decay/{layer}"] == pytest.approx(g.exp().mean().item(), rel=1e-5)


@pytest.mark.parametrize(("kind", "patience"), [("step", 10), (None, 50)])
def test_a_watchdog_barks_once_progress_stops(monkeypatch, capfd, kind, patience):
    """Work without a kind, which waits for disks, may always take five times as long."""
    barked: list[BaseException] = []
    watches: list = []
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: watches.append(thread.run))
    dog = Watchdog(10, barked.append)

    def seconds():
        for _ in range(3):  # kernels are compiled
            dog.beat("in step 1", kind)
            yield from [False] * 50
        for _ in range(8):
            dog.beat("in step 7", kind)
            yield from [False] * patience
        assert not barked
        yield False

    monkeypatch.setattr(threading.Event, "wait", partial(next, seconds()))
    with pytest.raises(SystemExit):
        watches[0]()
    assert [str(error) for error in barked] == [f"no progress for {patience} s while in step 7"]
    assert "test_a_watchdog_barks" in capfd.readouterr().err  # the stacks of all threads


def test_a_suspended_process_has_not_hung():
    code = "import sys; from fla_train.utils.watchdog import Watchdog\n"
    code += "dog = Watchdog(0.2, print); dog.beat('it')\n"
    code += "print('begun', flush=True); sys.stdin.read()"

    with Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        assert process.communicate() == (b"", None)
    assert process.returncode == 0


def test_a_run_tells_all_that_it_is_asked_for(make_config, warm_ranks, tmp_path):
    more = ["trainer.max_steps=4", "trainer.profile_steps=[3]", "trainer.stats_every=2"]
    more += ["trainer.eval_buckets=2", "launch.peak_tflops=0.001", "logger.tensorboard=true"]
    more += ["trainer.activation_checkpointing=selective"]  # recomputes what the statistics observe
    warm_ranks.launch(make_config(*TWO_RANKS, *more, f"run.dir={tmp_path}"))
    always = {"step", "tokens", "loss", "lr", "grad_norm", "skipped_steps"}
    always |= {"tokens_per_second", "mfu", "memory_gib", "data_wait"}
    gates = {f"{key}/{layer}" for key in ("beta", "beta_above_1", "decay") for layer in range(2)}
    at = {record["step"]: record for record in read_metrics(tmp_path / "metrics.jsonl") if "loss" in record}
    assert at.keys() == {2, 4}
    flops = json.loads((tmp_path / "plan.json").read_text())["flops_per_token"]
    for step, record in at.items():
        assert record["tokens"] == 256 * step
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / 2e9, abs=1e-4)
        assert record.keys() == always | gates | {"param_norm", "update_norm"}
        assert 0 < record["update_norm"] < record["param_norm"]
        assert all(0 < record[key] < 2 for key in gates if not key.startswith("beta_above"))
    weights = torch.load(tmp_path / "checkpoints" / "step-0000004" / "weights.pt")
    del weights["lm_head.weight"]  # tied
    norm = torch.nn.utils.get_total_norm(weights.values()).item()
    assert at[4]["param_norm"] == pytest.approx(norm, rel=1e-5)
    (validation,) = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "validation_loss" in r]
    assert {
        "validation_perplexity",
        "validation_loss_at/1-15",
        "validation_loss_at/16-31",
    } <= validation.keys()
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {
        f"step-0000003-rank-{rank}{kind}" for rank in (0, 1) for kind in (".json", "-operators.txt")
    }
    assert list((tmp_path / "tensorboard").glob("events.*"))
    last = next(line for line in (tmp_path / "train.log").read_text().splitlines() if "step 4/4  " in line)
    assert "tokens/s  MFU " in last and last.endswith("ETA 0:00:00")


def test_a_report_holds_the_line_and_a_full_disk_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "rank-0.json"))
    assert report(ValueError("a fault\nof the config")) == 2
    assert json.loads((tmp_path / "rank-0.json").read_text())["message"] == "a fault of the config"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "a full disk" / "rank-0.json"))
    assert report(OSError("no room")) == 1  # and raises nothing
