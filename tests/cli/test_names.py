"""Wrong overrides and flags have answers, text values stay literal, and --help and completion work."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fla_train.cli import app, prepare, train
from fla_train.cli.overrides import quote_values

ROOT = Path(__file__).resolve().parents[2]

# Command -> a substring of the error line of each of its last words, in their order.
WRONG = {
    "fla-train model=gated_deltaproduct": ["gated_delta_product/340m"],
    "fla-train model=llama experiment=deltanet_340m": ["hf/llama/tiny", "paper/deltanet_340m"],
    "fla-train data=finweb trainer.max_step=3": ["fineweb", "did you mean trainer.max_steps"],
    "fla-train max_steps=3 modle=x wandb=y": ["trainer.max_steps", "did you mean model", "logger.wandb"],
    "fla-train +trainer.eval_evry=3": ["trainer.eval_every"],
    "fla-train 'trainer={log_evry: 3}'": ["trainer.log_every"],
    "fla-train model.num_householders=3 task.batch_size=8": ["model.num_householder", "task=NAME"],
    "fla-train model=hf/llama/tiny model.num_heads=3": ["model.config.FIELD"],
    "fla-train seed=1,2 seed": ["multirun", "KEY=VALUE"],
    "fla-train -m experiment=demo,dem": ["did you mean demo"],
    "fla-train -m optimizer.lr=1,x trainer.max_step=3 seed=1,y": ["max_steps", "seed=y", "lr=x"],
    "fla-train -m seed=1,2 x": ["KEY=VALUE"],
    "fla-train experiment=mad/any scale=cpu": ["paper, fast"],
    "fla-train -m seed=1,2 hydra/launcher=basic hydra.a=1 optimizer.lr=x": ["run.job", "run.dir", "lr=x"],
    "fla-train -m model=glob(nothing/*)": ["glob"],
    "fla-train --config-path x": ["--config-dir"],
    "fla-train --experimental-rerun x.pickle": ["pickle"],
    f"fla-eval {ROOT}": [f"checkpoint={ROOT}"],
    "fla-eval suite=tasks suite.tasks=piqa": ["suite.tasks=[piqa]"],
    "fla-train model= --seed=1": ["unrecognized arguments: --seed=1"],
    "fla-train model=": ["unknown option"],
    "fla-eval suite.nonsense=1 suite.perplexity.bucket=wide": ["suite.nonsense", "suite.perplexity.bucket"],
    "fla-prepare data.pth=x": ["did you mean data.path"],
    "fla-export repo_id=a/b": ["hub.repo_id"],
}


@pytest.mark.parametrize("command", WRONG)
def test_every_wrong_name_is_answered(run_command, command: str) -> None:
    code, out, err = run_command(*shlex.split(command))
    assert code == 2 and not out and "Traceback" not in err and "Config search path" not in err
    lines = [line for line in err.splitlines() if not re.match(r" {4}|usage|\[", line)]
    assert all(part in line for part, line in zip(WRONG[command], lines, strict=True)), err


def test_names_are_checked_without_heavy_imports() -> None:
    code = """
import sys
from fla_train.cli.train import main
for words, status in ((["trainer.max_step=3", "model=lama"], 2), (["--help", "experiment=demo"], 0),
                      (["--version"], 0), (["-sc", "query=bash"], 0)):
    sys.argv = ["fla-train", *words]
    try: main()
    except SystemExit as end: assert (end.code or 0) == status, words
assert not {"torch", "transformers", "wandb", "datasets"} & set(sys.modules)
"""
    environment = {"PYTHONPATH": str(ROOT), "COMP_LINE": "fla-train seed=3 trainer.max_st"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "trainer.max_steps="


def test_help_lists_options_and_the_config(run_command) -> None:
    code, out, _ = run_command("fla-train", "--help", "experiment=state_tracking/s3", "scale=cpu")
    assert code == 0 and "state_tracking/s5" in out and "max_steps: 400" in out
    assert "COMMAND" not in out and "scales=" not in out
    assert app.USAGE.format(name="train") in out
    assert app.USAGE.format(name="train") in (ROOT / "docs" / "cli.md").read_text()


def test_options_of_the_users_folder(run_command, tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    text = "# @package _global_\ntrainer: {max_steps: 7}\n"
    text += "scales: {cpu: {from: fast, seed: 3}, fast: {trainer: {log_every: 9}}}\n"
    (folder / "mine.yaml").write_text(text)
    (folder / "broken.yaml").write_text("# @package _global_\ntrainer: {max_step: 7}\n")
    words = ["fla-train", "--config-dir", str(tmp_path)]
    code, out, _ = run_command(*words, "experiment=mine", "scale=cpu", "trainer.log_every=4", "--cfg", "job")
    config = OmegaConf.create(out)
    assert (code, config.seed, config.trainer.max_steps, config.trainer.log_every) == (0, 3, 7, 4)
    jobs = app.sweep_jobs(["experiment=glob(min*)", "model=glob(delta_net/*)"], str(tmp_path))
    assert [job[0] for job in jobs] == ["experiment=mine"] * 3
    assert {job[1] for job in jobs} == {f"model=delta_net/{size}" for size in ("tiny", "340m", "1.3b")}
    assert "did you mean mine" in run_command(*words, "experiment=mien")[2]
    assert "trainer.max_step" in run_command(*words, "experiment=broken")[2]


LIKE_NUMBERS = ("12e4567", "1.10", "1_000", "007", "1e3", "true", "a,b", "[D]/a", "{D}/a", "(1)", "${seed}")
READ = {"null": None, "": "", "'${seed}'": "0", "'a,b'": "a,b"}  # as Hydra reads it
KEYS = ("data.revision", "hub.license", "run.dir", "init_from")


def test_text_is_taken_literally() -> None:
    train.register()
    left = [*zip(LIKE_NUMBERS, LIKE_NUMBERS, strict=True), *READ.items()]
    while left:  # A config takes most of a second, so each has a text per key.
        texts, left = left[: len(KEYS)], left[len(KEYS) :]
        asked = [(key, *text) for key, text in zip(KEYS, texts, strict=False)]
        config = app.compose("train", quote_values("train", [f"{key}={text}" for key, text, _ in asked]))
        for key, text, value in asked:
            assert OmegaConf.select(config, key) == value, text


def test_text_in_mappings_and_sweeps() -> None:
    prepare.register()
    words = ["data=mixture", "+data.mixture={x: {weight: 2}}", "data.mixture.x.path=1.10"]
    config = app.compose("prepare", quote_values("prepare", words))
    assert (config.data.mixture.x.path, config.data.mixture.x.weight) == ("1.10", 2)
    words = ["data.name='1.10',x", "seed=1,2", "run.dir=1e3", "data.split=choice(a,b)"]
    assert quote_values("prepare", words, sweep=True) == [*words[:2], "run.dir='1e3'", words[-1]]
