"""`fla-bench` on tiny CPU shapes: what it prints, what it writes, what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fla_train.cli import bench

SMALL = ["--batch", "1", "--tokens", "24", "--heads", "2", "--head-dim", "16", "--rounds", "1"]
CEILINGS = ["--peak-tflops", "1", "--bandwidth", "0.1"]
MACHINES = ["launch.num_processes=2", "launch.num_machines=2", "run.dir=runs/none"]
STEP = ["trainer.seq_len=16", "trainer.micro_batch_size=2", "trainer.global_batch_tokens=64"]


def test_kernels(tmp_path, capsys) -> None:
    file = tmp_path / "kernels.json"
    bench.run(["kernels", *SMALL, *CEILINGS, "--num-householder", "1", "3", "--peers", "--json", str(file)])
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2 * 2 * 2  # header; n_h, gate, implementation
    assert {line.count("|") for line in table} == {13}
    content = json.loads(file.read_text())
    assert content["ceilings"] == {"flops": 1e12, "bandwidth": 1e11, "source": "given"}
    assert content["environment"]["packages"]["torch"]
    assert content["threads"] >= 1
    assert content["settings"]["tokens"] == 24
    for row in content["rows"]:
        assert (
            row["shape"]["num_householder"] == row["num_householder"]
            and row["shape"]["gated"] == row["gated"]
        )
        if row["kernel"] == "fla_train chunk":
            assert row["refused"] is None
            assert row["both_ms"] > 0 and row["forward_ms"] > 0  # which is longer, a busy machine decides
            assert row["memory_bytes"] > 0
            assert row["both_bound_ms"] > row["forward_bound_ms"] > 0
            assert set(row["errors"]) == {"o", "dq", "dk", "dv", "dbeta"} | (
                {"dg"} if row["gated"] else set()
            )
    assert sum(row["refused"] is None for row in content["rows"]) == 6  # the peer at n_h = 1 only


@pytest.mark.gpu
def test_gpu_graphs(capsys) -> None:
    bench.run(["kernels", *SMALL, *CEILINGS, "--num-householder", "2", "--graphs", "--recompute"])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| fla_train")]
    assert len(table) == 2 * 2 and not any("no speed" in line for line in table)


def test_little_kept_for_the_backward(tmp_path, capsys) -> None:
    file = tmp_path / "kernels.json"
    options = ["--num-householder", "1", "--gate", "--backends", "chunk", "--recompute", "--json", str(file)]
    bench.run(["kernels", *SMALL, "--tokens", "512", *CEILINGS, *options])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| fla_train")]
    names = [line.split(" | ")[0] for line in table]
    assert names == ["| fla_train chunk", "| fla_train chunk, recomputed"]
    assert all(row["both_ms"] > 0 for row in json.loads(file.read_text())["rows"])


def test_one_gate_other_dims_and_dtype(capsys) -> None:
    options = ["--no-gate", "--no-norm", "--dtype", "bf16", "--value-dim", "8", "--num-householder", "2"]
    bench.run(["kernels", *SMALL, *CEILINGS, *options, "--backends", "chunk", "recurrent"])
    out = capsys.readouterr().out
    assert "K=16 V=8, bfloat16, unit vectors" in out
    assert "| fla_train recurrent | 2 | no |" in out and "| yes |" not in out


def test_grouped_heads(tmp_path) -> None:
    """Shared heads of q and k count once; errors are those against the recurrence."""
    file = tmp_path / "kernels.json"
    options = ["--no-gate", "--num-householder", "1", "--backends", "chunk", "--json", str(file)]
    bench.run(["kernels", *SMALL, *CEILINGS, *options, "--group", "2"])
    (row,) = json.loads(file.read_text())["rows"]
    shape = row["shape"]
    values = shape["batch"] * shape["tokens"] * shape["heads"]
    count = 4 * values * (shape["key_dim"] + shape["value_dim"])  # fp32: half a q, half a k, and a v
    assert shape["group"] == 2 and max(row["errors"].values()) < 1e-4
    assert row["ps_per_byte"] == pytest.approx(1e9 * row["both_ms"] / count)
    with pytest.raises(ValueError, match="multiple of --group 3"):
        bench.run(["kernels", *SMALL, *CEILINGS, *options, "--group", "3"])


def test_deepspeed_is_not_imported_before_the_device_is_chosen() -> None:
    code = "import sys, fla_train.bench.training; print('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.long
def test_train_with_a_peer(tmp_path, capfd) -> None:
    file = tmp_path / "train.json"
    peers = ["--peers", "llama", "--steps", "1", "--json", str(file)]
    bench.run(["train", *peers, *CEILINGS, *STEP, "--"])
    out = capfd.readouterr().out
    assert out.count("### ") == 2
    ours, llama = json.loads(file.read_text())["rows"]
    assert (ours["model"], llama["model"]) == ("ours", "llama")
    assert ours["tokens_per_step"] == 64
    assert abs(ours["parameters"] / llama["parameters"] - 1) < 0.1
    for row in (ours, llama):
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["step_ms"])
        assert row["mfu"] >= 0 and row["memory_bytes"] > 2**20
        assert {"operator", "matmuls", "elementwise", "loss", "optimizer", "data"} <= row["parts"].keys()
    assert ours["parts"]["operator"]["floor_ms"] > 0
    assert out.lstrip().startswith(("1 CPU", "2 CPU"))  # and nothing that the engine prints


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or none")
def test_train_on_two_ranks(tmp_path, capfd) -> None:
    file = tmp_path / "train.json"
    bench.run(["train", "--steps", "1", "--json", str(file), *CEILINGS, *STEP, "launch.num_processes=2"])
    assert "parameters, 2 processes" in capfd.readouterr().out
    (row,) = json.loads(file.read_text())["rows"]
    assert row["tokens_per_step"] == 64 and row["processes"] == 2
    assert row["parts"]["communication"]["ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "--tokens", "0"], "--tokens: must be at least 1"),
        (["kernels", "--num-householder", "0"], "--num-householder"),
        (["kernels", "--patience", "-1"], "--patience"),
        (["kernels", "--patience", "nan"], "--patience"),
        (["kernels", *SMALL, "--bandwidth", "-1"], "must be positive"),
        (["kernels", *SMALL, "--backends", "fast"], "choose auto, recurrent"),
        pytest.param(
            ["kernels", *SMALL, "--graphs"],
            "--graphs needs a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes it"),
        ),
        (["train", "--peers", "gpt", "--", *STEP], "choose from fla, fla-compiled, llama"),
        (["train", *CEILINGS, "trainer.global_batch_tokens=7"], "trainer.global_batch_tokens"),
        (["train", *CEILINGS, *MACHINES], "one machine"),
        (["train", "trainer.no_such_key=1"], "no_such_key"),
        (["decode", "--json", "."], "is a folder"),
        (["decode", "--peers", "llama"], "--peers is for decode with"),
        (["decode", "--model", "gated_delta_product/tiny", "--heads", "2"], "--heads is for decode without"),
        (["fused_ops", "--hidden", "6", "--head-dim", "3"], "rotary needs an even one"),
    ],
)
def test_a_wrong_request_is_one_line(arguments, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["fla-bench", *arguments])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not Path("no").exists()
