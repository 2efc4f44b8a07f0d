"""The fla-train command: whole runs, and each way to ask for the impossible."""

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import warm_ranks as ranks
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

import fla_train.models.auto
import fla_train.models.modeling
from fla_train.cli import train as command
from fla_train.data.prepare import prepare
from fla_train.run.launch import launch
from fla_train.training.callback import Callback
from fla_train.training.config import TrainConfig
from fla_train.training.failures import describe_failure
from fla_train.utils.records import read_metrics

BATCH_2, BATCH_8 = "0-trainer.micro_batch_size=2", "1-trainer.micro_batch_size=8"  # folders of its jobs
SWEEP = ["trainer.micro_batch_size=2,8", "trainer.max_steps=4", "trainer.precision=fp32"]
Command = Callable[..., tuple[int, str, str]]
LINE_KEYS = {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second"}


@pytest.fixture
def fla_train(overrides: list[str], run_command: Command) -> Command:
    """`fla_train("key=value", ...)` runs the command in this process: (exit code, stdout, stderr)."""
    return partial(run_command, "fla-train", *overrides)


def refused(result: tuple[int, str, str]) -> str:
    """Return the error that a command printed."""
    code, _, stderr = result
    assert code == 2
    assert stderr.startswith("error: ") and "Traceback" not in stderr
    return stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.path=/no/where", "/no/where"),
        ("trainer.suite_options=['suite.limt=3']", "trainer.suite_options: "),
        ("trainer.suite_options=['suite.limit=0']", "suite.limit=0"),
        ("trainer.suite=expressivity", "trainer.suite"),
        ("run.job=1", "run.job=1"),
    ],
)
def test_a_request_that_cannot_work_starts_nothing(fla_train, tmp_path: Path, override: str, message: str):
    run = tmp_path / "run"
    assert message in refused(fla_train("trainer.suite_every=4", override, f"run.dir={run}"))
    assert not run.exists()


MIXTURE = "{a: {weight: 0.5, path: PATH}, b: {weight: 0.5, path: PATH}}"


@pytest.mark.parametrize(
    "data",
    [
        [],
        ["data.stream=true"],
        ["data=mixture", f"+data.mixture={MIXTURE}"],
        ["data.tokenizer.name=someone/tokenizer"],
        ["data=hub", "data.path=someone/texts"],  # no Hub is reached by tests
    ],
    ids=["files", "stream", "mixture", "tokenizer", "hub"],
)
def test_a_dry_run_fetches_and_writes_nothing(fla_train, corpus: Path, tmp_path: Path, data: list[str]):
    cache = tmp_path / "cache"
    data = [option.replace("PATH", str(corpus)) for option in data]
    if "data=mixture" in data:
        data.append("data.path=null")
    code, stdout, stderr = fla_train("dry_run=true", f"data.cache_dir={cache}", *data)
    assert code == 0, stderr
    assert "data         not prepared yet" in stdout and "3,072 = 12 steps x 256\n" in stdout
    assert not cache.exists()


def test_a_damaged_shard_is_found_before_the_start(fla_train, make_config, tmp_path: Path):
    here = [f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={tmp_path / 'run'}"]
    prepare(make_config(*here).data, log=lambda line: None)
    (shard,) = (tmp_path / "cache").glob("*/shard-00000.bin")
    shard.write_bytes(shard.read_bytes()[:-2])
    assert str(shard) in refused(fla_train(*here))
    assert not (tmp_path / "run").exists()


def test_an_impossible_job_does_not_stop_a_sweep(fla_train, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLA_TRAIN_TRACEBACK", "1")
    code, stdout, stderr = fla_train("trainer.micro_batch_size=2,3,8", "dry_run=true", "-m")
    assert code == 2 and stderr.count("Traceback") == 1
    assert stderr.count("error: ") == 1 and "micro_batch_size 3" in stderr
    assert stdout.count("parameters ") == 2
    assert not list(tmp_path.iterdir())  # nor does Hydra write a record


def test_a_closed_terminal_does_not_end_the_jobs_of_a_sweep(fla_train):
    closed = io.TextIOWrapper(io.FileIO(os.open(os.devnull, os.O_RDONLY)))  # any write to it is an error
    with contextlib.redirect_stdout(closed):
        assert fla_train("seed=1,2", "dry_run=true", "-m")[0] == 0
    closed.detach().close()


def test_output_of_a_job_is_in_its_file_and_its_failure_on_the_terminal_too(tmp_path, capfd):
    with pytest.raises(ValueError), command.output_to(tmp_path):
        print("step 1")
        raise ValueError
    print("next job")
    first, second = capfd.readouterr().out.splitlines()
    assert first and second == "next job"
    assert (tmp_path / "output.txt").read_text() == "step 1\n"


@pytest.fixture(scope="module")
def sweep(
    overrides: list[str], warm_ranks: ranks.WarmRanks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Two runs of one sweep that differ only in accumulation: their folder, and the launcher's output."""
    folder = tmp_path_factory.mktemp("sweep")
    words = ["fla-train", "-m", *overrides, *SWEEP, f"run.dir={folder / 'runs'}"]
    with (
        warm_ranks.as_workers(),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as stdout,
    ):
        patch.setattr(sys, "argv", words)
        command.main()
    return folder / "runs", stdout.getvalue()


def test_a_sweep_gives_each_job_its_run_and_accumulation_changes_nothing(sweep: tuple[Path, str]):
    folder, stdout = sweep
    assert len(stdout.splitlines()) == 3  # a line for each job, and how to compare them
    assert "trainer.micro_batch_size=8" in stdout
    assert sorted(path.name for path in folder.iterdir()) == [BATCH_2, BATCH_8]
    first, second = (
        [r["loss"] for r in read_metrics(folder / job / "metrics.jsonl") if "loss" in r]
        for job in (BATCH_2, BATCH_8)
    )
    assert len(first) == 4
    assert first == pytest.approx(second, rel=1e-4)
    assert first[-1] < first[0]


def test_the_run_folder_is_complete(sweep: tuple[Path, str]):
    run = sweep[0] / BATCH_2
    config = OmegaConf.load(run / "config.yaml")
    assert config.trainer.micro_batch_size == 2
    environment = json.loads((run / "environment.json").read_text())
    assert {"packages", "devices", "commit", "command"} <= set(environment)
    records = read_metrics(run / "metrics.jsonl")
    assert all(set(r) >= LINE_KEYS for r in records if "loss" in r)
    assert [r["tokens"] for r in records if "loss" in r] == [256, 512, 768, 1024]
    assert [r["step"] for r in records if "validation_loss" in r] == [4]
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step-0000003", "step-0000004"]
    assert (run / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    log = (run / "train.log").read_text()
    for part in ("fla-generate checkpoint=", "fla-eval checkpoint=", "run.dir="):
        assert part in log
    assert "parameters " in (run / "output.txt").read_text()


def test_the_same_sweep_again_resumes_each_job(sweep, fla_train, warm_ranks):
    """The first is complete; the second has lost its last checkpoint and what comes after it."""
    folder, _ = sweep
    before = read_metrics(folder / BATCH_8 / "metrics.jsonl")
    for lost in ("checkpoints/step-0000004", "hf"):
        shutil.rmtree(folder / BATCH_8 / lost)
    with warm_ranks.as_workers():
        code, _, _ = fla_train(*SWEEP, f"run.dir={folder}", "-m")
    assert code == 0
    assert f"{folder / BATCH_2} is complete: 4 steps" in (folder / BATCH_2 / "output.txt").read_text()
    begun = f"{folder / BATCH_8}, from {folder / BATCH_8 / 'checkpoints' / 'step-0000003'}"
    assert begun in (folder / BATCH_8 / "train.log").read_text()
    after = read_metrics(folder / BATCH_8 / "metrics.jsonl")
    assert [r.get("loss") for r in after] == [r.get("loss") for r in before]
    assert (folder / BATCH_8 / "hf" / "step-0000004").is_dir()
    starts = [
        json.loads((folder / BATCH_8 / "starts" / f"{n:04d}" / "start.json").read_text()) for n in (1, 2)
    ]
    assert [(s["step"], s["tokens"], s["processes"]) for s in starts] == [(0, 0, 1), (3, 768, 1)]


def test_a_run_knows_its_text_wherever_it_lies(sweep, fla_train, corpus, tmp_path):
    run = [*SWEEP[1:], "trainer.micro_batch_size=2", f"run.dir={sweep[0] / BATCH_2}"]
    moved = shutil.copytree(corpus, tmp_path / "moved")
    for cache in ([], [f"data.cache_dir={tmp_path / 'cache'}"]):
        code, stdout, _ = fla_train(*run, f"data.path={moved}", *cache)
        assert code == 0 and "is complete" in stdout
    with (moved / "documents.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert f"belongs to another run: data.path={moved}" in refused(fla_train(*run, f"data.path={moved}"))


def train_until_it_fails(plan: Path) -> tuple[str, bool]:
    """Return, on a rank, the line of the failure, and whether it is final."""
    with pytest.raises(Exception) as failure:
        ranks.train_plan(plan)
    return describe_failure(failure.value)


class FirstIsSpike(Callback):
    """Makes the loss of the first step a spike: before it, 200 losses seem to have been near 0."""

    def before_step(self, step, micro_batches):
        losses = torch.tensor([200, 0, 1e-4] if step == 1 else [0, 0, 0], dtype=torch.float64)
        if step < 3:
            self.trainer.bad_steps.load_state_dict([{"losses": losses}])


def test_a_diverging_run_stops_with_one_line_which_is_final(make_config, warm_ranks, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(
        "fla_train.run.launch.run_workers",
        lambda arguments, config, **_: found.extend(
            warm_ranks.run(1, train_until_it_fails, Path(arguments[-1]))
        ),
    )
    more = ["optimizer.lr=1e30", "trainer.max_skipped_steps=3", "trainer.spike_deviations=9"]
    more += [f"trainer.callbacks=[{__name__}:FirstIsSpike]"]
    launch(make_config(f"run.dir={tmp_path / 'run'}", *more))
    ((line, final),) = found
    assert final and " 3 steps " in line and "optimizer.lr" in line
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert [r["skipped_steps"] for r in records] == [1, 1, 2, 3, 4]
    assert [r["grad_norm"] is None for r in records] == [False, False, True, True, True]


@pytest.mark.gpu
def test_a_run_on_a_gpu_is_exported(make_config: Callable[..., TrainConfig], tmp_path: Path):
    more = ["launch.device=cuda", "launch.num_processes=1", "trainer.precision=bf16"]
    more += ["trainer.profile_steps=[3]"]
    launch(make_config(f"run.dir={tmp_path}", *more))
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {
        f"step-0000003-rank-0{kind}" for kind in (".json", "-operators.txt", "-memory.pickle")
    }
    losses = [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl") if "loss" in r]
    assert len(losses) == 12 and losses[-1] < losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "step-0000012")
    assert next(model.parameters()).dtype == torch.float32
