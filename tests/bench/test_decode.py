"""`fla-bench decode`: sizes, errors, and what it refuses."""

import json

import pytest
import torch

from fla_train.bench import decode
from fla_train.bench.decode import HEADER, bench_decode
from fla_train.cli import bench

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("state", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_a_row_has_times_and_errors(state: torch.dtype, error: float):
    row = bench_decode(6, 32, 16, 2, torch.float32, state, DEVICE, rounds=1)
    assert row.microseconds > 0 and row.copy_microseconds > 0
    assert row.error < 1e-6 and 0 < row.state_error < error
    assert row.markdown().count("|") == HEADER[0].count("|")


def test_a_wrong_step_gets_no_time(monkeypatch: pytest.MonkeyPatch):
    sound = decode.delta_product_step

    def wrong(*, backend="auto", **inputs):
        o, state = sound(backend=backend, **inputs)
        return o, state if backend == "recurrent" else state * 1.05

    monkeypatch.setattr(decode, "delta_product_step", wrong)
    with pytest.raises(ValueError, match=r"wrong by .* in the state"):
        bench_decode(2, 16, 16, 1, torch.float32, torch.float32, DEVICE, rounds=1)


def test_the_command(tmp_path, capsys):
    file = tmp_path / "decode.json"
    sizes = ["--heads", "2", "4", "--head-dim", "16", "--num-householder", "1", "3", "--dtype", "fp32"]
    bench.run(["decode", *sizes, "--state-dtype", "bf16", "--json", str(file)])
    printed = capsys.readouterr().out
    assert printed.count("| bfloat16 |") == 4 and file.with_suffix(".md").read_text() == printed
    rows = json.loads(file.read_text())["rows"]
    assert [(row["heads"], row["num_householder"]) for row in rows] == [(2, 1), (2, 3), (4, 1), (4, 3)]
    with pytest.raises(SystemExit, match="2"):
        bench.run(["decode", "--heads", "0"])


def test_generation_beside_a_peer(tmp_path, capsys):
    file = tmp_path / "generation.json"
    sizes = [
        "--model",
        "gated_delta_product/tiny",
        "--batch",
        "1",
        "3",
        "--contexts",
        "16",
        "--new-tokens",
        "2",
    ]
    bench.run(["decode", *sizes, "--peers", "llama", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["model"], row["batch"]) for row in rows] == [
        *(("ours", 1), ("ours", 3)),
        *(("llama", 1), ("llama", 3)),
    ]
    assert all(row["milliseconds"] > 0 for row in rows)
    for peer in ("gpt", "ours-compiled"):  # no static cache of states
        with pytest.raises(ValueError, match=peer):
            bench.run(["decode", *sizes, "--peers", peer])
    with pytest.raises(ValueError, match="llama"):
        bench.run(["decode", "--model", "hf/llama/tiny"])


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path, capsys):
    with pytest.raises(ValueError, match="absent"):
        bench.run(["decode", "--json", str(tmp_path / "absent" / "file.json")])
    assert capsys.readouterr().out == ""
