"""Names of groups, options, keys and flags: what a wrong one answers, what --help and completion offer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fla_train.cli import app, eval, export, generate, names, prepare, train
from fla_train.cli.config_files import ConfigFiles

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {"train": train, "prepare": prepare, "eval": eval, "export": export, "generate": generate}


def assert_error(result: tuple[int, str, str], *parts: str) -> None:
    """Status 2, an error of ours with these parts in it, nothing of Hydra's."""
    code, out, err = result
    assert code == 2 and not out
    assert err.startswith("error: ")
    for part in parts:
        assert part in err
    for foreign in ("Traceback", "HYDRA_FULL_ERROR", "Config search path", "Could not override", "usage:"):
        assert foreign not in err


MODELS = [
    f"{variant}/{size}"
    for variant in ("delta_net", "delta_product", "gated_delta_net", "gated_delta_product", "transformer")
    for size in ("tiny", "340m", "1.3b")
]
MODELS += [f"hybrid/{layers}/{size}" for layers in ("swa", "global2", "3to1") for size in ("tiny", "340m")]
LLAMAS = [f"model=hf/llama/{size}" for size in ("tiny", "340m", "1.3b")]


@pytest.mark.parametrize(
    ("words", "close", "listed"),
    [
        (
            ["fla-train", "model=gated_deltaproduct"],
            [f"model=gated_delta_product/{size}" for size in ("tiny", "340m", "1.3b")],
            MODELS,
        ),
        (["fla-train", "model=deltanet/340m"], ["model=delta_net/340m"], MODELS),
        (
            ["fla-train", "experiment=paper"],
            [f"experiment=paper/{path.stem}" for path in (ROOT / "configs/experiment/paper").iterdir()],
            ["state_tracking/a5", "mqar/based", "demo"],
        ),
        (["fla-train", "experiment=deltanet_340m"], ["experiment=paper/deltanet_340m"], ["gpu_340m"]),
        (["fla-train", "model=llama"], LLAMAS, MODELS),
        (["fla-train", "model/variant=delta_net"], [f"model={name}" for name in MODELS[:3]], MODELS),
        (["fla-train", "data=finweb"], ["data=fineweb"], ["stdlib", "local", "hub", "mixture"]),
        (["fla-prepare", "data=fine"], ["data=fineweb"], ["stdlib", "local", "hub", "mixture"]),
        (["fla-eval", "suite=perplxity"], ["suite=perplexity"], ["zero_shot", "recall", "paper"]),
        (["fla-bench", "train", "optimizer=adam"], ["optimizer=adamw"], ["muon"]),
    ],
)
def test_a_wrong_option_gets_the_closest_and_the_whole_list(run_command, words, close, listed) -> None:
    code, out, err = run_command(*words)
    assert_error((code, out, err), words[-1], *close)
    question, _, rest = err.partition("\n")
    assert question.endswith("?") and question.partition("did you mean ")[2].count("=") == len(close)
    names = rest.replace(",", " ").split()
    assert set(listed) <= set(names)
    assert not [name for name in names if "common" in name]


UNKNOWN = {
    "fla-train": {
        "trainer.max_step=3": "did you mean trainer.max_steps?",
        "+trainer.eval_evry=3": "did you mean trainer.eval_every?",
        "~trainer.max_step": "did you mean trainer.max_steps?",
        "trainer={log_evry: 3}": "did you mean trainer.log_every?",
        "max_steps=3": "write trainer.max_steps=3",
        "training.seq_len=64": "write trainer.seq_len=64",
        "model.num_householders=3": "did you mean model.num_householder?",
        "modle=delta_net/tiny": "did you mean model",
        "wandb.project=x": "write logger.wandb.project=x",
        "data.mixture.a={weight: 1}": "write +data.mixture={a: {weight: 1}}",
        "+data.mixture.c={weight: 1}": "write +data.mixture={c: {weight: 1}}",
        "data.mixture={b: {weight: 1}}": "write '+data.mixture={b: {weight: 1}}'",
        "task.batch_size=8": "no task is chosen",
        "task={batch_size: 8}": "no task is chosen",
        "init_from.path=runs/a": "no key init_from.path",
        "seed=1,2": "-m",
        "seed": "KEY=VALUE",
        "debug=null": "~debug",
        "optimizer=null": "--list optimizer",
        "zzz=1": "--help",
    },
    "fla-eval": {
        str(ROOT): f"write checkpoint={ROOT}",
        "model=x": "write checkpoint=x",
        "tasks=[piqa]": "write suite.tasks=[piqa]",
        "suite.needle.lengths=[64]": "add suite=needle",
        "suite.needle={lengths: [64]}": "add suite=needle",
        "+suite.needle={lengths: [64]}": "add suite=needle",
    },
    "fla-prepare": {"data.pth=x": "did you mean data.path?"},
    "fla-generate": {"max_tokens=3": "write max_new_tokens=3"},
    "fla-export": {"repo_id=a/b": "write hub.repo_id=a/b"},
    "fla-bench train": {"lr=1": "write optimizer.lr=1"},
    "fla-train task=code_trace": {
        "task.options.variable=3": "did you mean task.options.variables?",
        "task.options.zzz=3": "has no zzz yet: write +task.options={zzz: 3}",
    },
    "fla-eval suite=zero_shot": {
        "suite.perplexity={sets: [a.parquet]}": "length_extrapolation, perplexity",
    },
    "fla-train model=hf/llama/tiny": {
        "model.num_heads=3": "write model.config.num_attention_heads=3",
        "model.head_dim=3": "write model.config.head_dim=3",
        "model.vocabsize=3": "did you mean model.vocab_size",
    },
}


@pytest.mark.parametrize("command", UNKNOWN)
def test_an_unknown_key_gets_the_closest_keys(run_command, command: str) -> None:
    code, out, err = run_command(*command.split(), *UNKNOWN[command])
    assert_error((code, out, err))
    lines = err.removeprefix("error: ").splitlines()
    assert len(lines) == len(UNKNOWN[command])
    for line, (override, part) in zip(lines, UNKNOWN[command].items(), strict=True):
        assert line.strip().startswith(override) and part in line


# Of transformers' TrainingArguments, torchtitan, litgpt and flame, each with the key that does the same here.
THEIRS = {
    "learning_rate=1e-3": "optimizer.lr=1e-3",
    "lr=1e-3": "optimizer.lr=1e-3",
    "optimizer.learning_rate=1e-3": "optimizer.lr=1e-3",
    "weight_decay=0.1": "optimizer.weight_decay=0.1",
    "max_grad_norm=1": "optimizer.max_grad_norm=1",
    "lr_scheduler_type=cosine": "schedule=",
    "warmup_steps=10": "schedule.warmup_steps=10",
    "warmup_ratio=0.1": "schedule.warmup_steps=",
    "batch_size=8": "trainer.micro_batch_size=",
    "training.local_batch_size=8": "trainer.micro_batch_size=",
    "per_device_train_batch_size=8": "trainer.micro_batch_size=",
    "gradient_accumulation_steps=4": "trainer.global_batch_tokens=",
    "global_batch_size=4": "trainer.global_batch_tokens=",
    "max_steps=10": "trainer.max_steps=10",
    "num_train_epochs=1": "trainer.max_steps=",
    "training.steps=10": "trainer.max_steps=10",
    "seq_length=512": "trainer.seq_len=512",
    "block_size=512": "trainer.seq_len=512",
    "output_dir=out": "run.dir=out",
    "bf16=true": "trainer.precision=bf16",
    "fp8=true": "trainer.precision=fp8",
    "gradient_checkpointing=true": "trainer.activation_checkpointing=true",
    "activation_checkpoint.mode=selective": "trainer.activation_checkpointing=selective",
    "num_gpus=8": "launch.num_processes=8",
    "nproc_per_node=8": "launch.num_processes=8",
    "num_nodes=2": "launch.num_machines=2",
    "save_steps=10": "trainer.checkpoint_every=10",
    "report_to=wandb": "logger=wandb",
    "wandb=true": "logger=wandb",
    "wandb.project=mine": "logger.wandb.project=mine",
    "dataset_name=allenai/c4": "data=hub data.path=allenai/c4",
    "tokenizer=gpt2": "data.tokenizer.name=gpt2",
}


def test_names_of_other_trainers_point_to_ours() -> None:
    train.register()
    with pytest.raises(ValueError) as error:
        app.compose("train", list(THEIRS))
    for line, (theirs, ours) in zip(str(error.value).splitlines(), THEIRS.items(), strict=True):
        assert line.strip().startswith(theirs) and f"write {ours}" in line


def test_a_task_has_a_batch_size_of_its_own(run_command) -> None:
    assert_error(run_command("fla-train", "task=mqar", "batch_size=8"), "task.batch_size=8")


def test_the_table_of_other_names_points_to_keys_that_exist() -> None:
    keys = set()
    for name, module in COMMANDS.items():
        module.register()
        config = OmegaConf.to_container(app.compose(name), resolve=False)
        keys |= set(config) | set(ConfigFiles(name).defaults)
        nodes = [(key, node) for key, node in config.items() if isinstance(node, dict)]
        while nodes:
            prefix, node = nodes.pop()
            keys |= {f"{prefix}.{key}" for key in node}
            nodes += [(f"{prefix}.{key}", value) for key, value in node.items() if isinstance(value, dict)]
    for text in names.ELSEWHERE:
        for word in text.partition(" (")[0].split():
            key = word.partition("=")[0]
            assert key in keys or key.startswith("model.config."), text  # fields of another library's class


def test_names_are_checked_before_the_schemas_are_imported() -> None:
    """Else a misspelt name would be answered only after torch and transformers have been imported."""
    code = (
        "import sys; sys.argv[1:] = ['trainer.max_step=3', 'model=lama']\n"
        "from fla_train.cli.train import main\n"
        "try: main()\nexcept SystemExit as end: assert end.code == 2 and 'torch' not in sys.modules\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "trainer.max_steps" in found.stderr and "hf/llama/tiny" in found.stderr


def test_a_real_key_is_never_taken_for_another_name() -> None:
    """`batch_size`, `wandb` and `name` are other trainers' words too."""
    train.register()
    config = app.compose(
        "train", ["task=mqar", "task.batch_size=64", "logger.wandb={name: a}", "++model.vocab_size=64"]
    )
    assert (config.task.batch_size, config.logger.wandb.name, config.model.vocab_size) == (64, "a", 64)


@pytest.mark.parametrize(
    "flags",
    [["--config-dir", "."], ["--cfg", "job"], ["-m"], ["--multirun"], ["--info", "config"], ["--cfg=all"]],
    ids=" ".join,
)
def test_the_status_is_2_with_any_flag(run_command, flags: list[str]) -> None:
    assert_error(
        run_command("fla-train", "model=deltanet/tiny", *flags, "trainer.max_step=3"),
        "model=delta_net/tiny",
        "trainer.max_steps",
    )


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--lst"], "--list"),
        (["--max_steps", "60"], "KEY=VALUE"),
        (["--list", "modles"], "model,"),
        (["--cfg", "jobs"], "job"),
        (["--resolve"], "--cfg"),
        (["-m", "--cfg", "job"], "--cfg"),
        (["--config-dir", "no/such/folder"], "no/such/folder"),
        (["--config-name", "trainn"], "trainn"),
        (["--experimental-rerun", "config.pickle"], "pickle"),
        (["-m", "seed=interval(0,1)"], "seed=interval(0,1)"),
    ],
)
def test_wrong_flags_are_errors_of_ours(run_command, words: list[str], part: str) -> None:
    assert_error(run_command("fla-train", *words), part)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["seed=1,2", "trainer.max_steps=3,many", "model=llama,delta_net/tiny"], ["many", LLAMAS[0]]),
        (["seed=1,2", "trainer.max_step=3,4"], ["trainer.max_steps"]),
        (["task=mqar,compression", "task.options.power=1"], []),  # each fits by itself
    ],
)
def test_a_sweep_names_what_does_not_fit_before_a_job_runs(
    run_command, monkeypatch, tmp_path, words, parts
) -> None:
    monkeypatch.chdir(tmp_path)  # Hydra's record of a sweep
    monkeypatch.setattr("fla_train.training.launch.launch", lambda config: pytest.fail("a job ran"))
    assert_error(run_command("fla-train", "-m", *words), *parts)


def test_a_sweep_whose_record_cannot_be_written_is_not_the_requests_fault(run_command) -> None:
    code, _, err = run_command("fla-train", "-m", "seed=1,2", "hydra.sweep.dir=/proc/no")
    assert code == 1 and err.startswith("error: /proc/no")


def test_flags_may_stand_among_overrides(run_command) -> None:
    code, out, _ = run_command("fla-train", "seed=3", "--cfg", "job", "trainer.max_steps=7")
    config = OmegaConf.create(out)
    assert (code, config.seed, config.trainer.max_steps) == (0, 3, 7)


def test_options_of_a_folder_of_the_users(run_command, tmp_path: Path) -> None:
    folder = tmp_path / "my configs" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\n# Mine alone.\ntrainer:\n  max_steps: 7\n")
    (folder / "broken.yaml").write_text("# @package _global_\ntrainer:\n  max_step: 7\n")
    words = ["--config-dir", str(folder.parent)]
    code, out, _ = run_command("fla-train", "experiment=mine", *words, "--cfg", "job")
    assert code == 0 and OmegaConf.create(out).trainer.max_steps == 7
    assert_error(run_command("fla-train", *words, "experiment=mien"), "experiment=mine")
    assert_error(
        run_command("fla-train", *words, "experiment=broken"), "experiment=broken", "trainer.max_steps"
    )
    assert "Mine alone." in run_command("fla-train", *words, "--list", "experiment")[1]
    assert "max_steps: 7" in run_command("fla-train", *words, "--help", "experiment=mine")[1]


def test_help_shows_the_keys_of_what_is_chosen(run_command) -> None:
    _, tiny, _ = run_command("fla-train", "--help")
    _, shown, _ = run_command("fla-train", "--help", "experiment=paper/deltanet_340m")
    assert "hidden_size: 128 " in tiny and "hidden_size: 1024 " not in tiny
    for part in ("Groups (* is chosen)", "*gated_delta_product/tiny", "*stdlib", "gpu_340m"):
        assert part in tiny
    for key in ("max_steps: 1000 ", "num_householder: 2 ", "num_processes: auto ", "dir: null "):
        assert any(key in line and " # " in line for line in tiny.splitlines()), key
    assert "Hydra" not in tiny and "variant/" not in tiny
    assert "hidden_size: 1024 " in shown and "hidden_size: 128 " not in shown
    assert "# model=delta_net/340m" in shown and "*delta_net/340m" in shown
    assert "\n* max_steps: 28610 " in shown  # of the experiment
    assert "\n  keep_checkpoints: 2 " in shown  # which leaves this as it is
    _, shown, _ = run_command("fla-train", "--help", "model=delta_net/340m", "trainer.max_steps=7")
    assert "\n* seq_len: 2048 " in shown and "max_steps: 1000 " not in shown  # the model's batch; a key given
    _, shown, _ = run_command("fla-train", "--help", "experiment=paper/deltanet_340m", "model=delta_net/1.3b")
    assert "hidden_size: 2048 " in shown and "hidden_size: 1024 " not in shown
    _, shown, _ = run_command("fla-train", "--help", "experiment=state_tracking/a5")
    assert "task:    # task=group_words" in shown
    assert "num_heads: 12 " in shown  # of state_tracking/common, which a5 builds on
    assert_error(run_command("fla-train", "--help", "model=deltanet/tiny"), "model=delta_net/tiny")


def test_list_describes_every_option(run_command) -> None:
    code, out, _ = run_command("fla-train", "--list")
    assert code == 0
    group, listed = "", {}
    for line in out.splitlines():
        if line.endswith("="):
            group = line[:-1]
        elif line:
            option, about = line.split(maxsplit=1)
            listed.setdefault(group, []).append(option)
            assert line.startswith("  ") and len(line) <= 110 and len(about) > 10
    other = (ROOT / "configs/model").glob("*/**/*.yaml")
    found = {str(path.relative_to(ROOT / "configs/model").with_suffix("")) for path in other}
    parts = tuple(f"{name}/" for name in ("batch", "size", "variant", "zoo"))
    assert set(listed["model"]) == {name for name in found if not name.startswith(parts)} > set(MODELS)
    assert {"wsd", "cosine"} <= set(listed["schedule"])
    files = {
        path.relative_to(ROOT / "configs/experiment") for path in ROOT.glob("configs/experiment/**/*.yaml")
    }
    shared = {path for path in files if path.name.startswith("common")}
    assert len(shared) == 4
    assert {f"{name}.yaml" for name in listed["experiment"]} == {str(path) for path in files - shared}
    _, out, _ = run_command("fla-train", "--list", "data", "models", "suites")
    assert re.findall(r"^(\S+)=$", out, re.M) == ["model", "data", "trainer.suite"]
    suites = {path.stem for path in (ROOT / "configs/suite").glob("*.yaml")}
    assert set(re.findall(r"^  (\w+) ", run_command("fla-eval", "--list", "suites")[1], re.M)) == suites


def complete(line: str, bin: Path) -> list[str]:
    """What bash offers in place of what follows the last "=" or space of a line, by the installed script."""
    script = f"""eval "$(fla-train -sc install=bash)"
        COMP_LINE={line!r} COMP_POINT={len(line)}
        _fla_complete {line.split()[0]}; printf '%s\\n' "${{COMPREPLY[@]}}" """
    environment = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=120
    )
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_nested_options_and_keys(tmp_path: Path) -> None:
    command = tmp_path / "fla-train"
    command.write_text(f"#!{sys.executable}\nfrom fla_train.cli.train import main\nmain()\n")
    command.chmod(0o755)
    offered = complete("fla-train model=gated_delta_p", tmp_path)
    assert offered == [f"gated_delta_product/{size}" for size in ("1.3b", "340m", "tiny")]
    assert complete("fla-train seed=3 trainer.max_st", tmp_path) == ["trainer.max_steps="]
    assert complete("fla-train seed=3 trainer.suite=z", tmp_path) == ["zero_shot"]
    assert complete("fla-train --list exp", tmp_path) == ["experiment"]


LIGHT = """
import contextlib, importlib, os, sys
from fla_train.cli.train import main
os.environ["COMP_LINE"] = "fla-train experiment=paper/delta"
for name in ("doctor", "bench", "runs"):
    for flag in ("--help", "--version"):
        sys.argv = [f"fla-{name}", flag]
        with contextlib.suppress(SystemExit):
            importlib.import_module(f"fla_train.cli.{name}").main()
for words in (["--help", "experiment=demo"], ["--list"], ["--version"], ["-sc", "query=bash"]):
    sys.argv = ["fla-train", *words]
    with contextlib.suppress(SystemExit):
        main()
assert not {"torch", "transformers", "wandb", "datasets"} & set(sys.modules)
"""


def test_help_list_version_and_completion_import_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-3:]
    assert last == [f"experiment=paper/delta{end}" for end in ("net_1.3b", "net_340m", "product_340m")]
