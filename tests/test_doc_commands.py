"""Every command in README and docs is accepted by its program as it is written, in bash and in zsh."""

import ast
import builtins
import json
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from fla_train.api import check_suite
from fla_train.cli import app, comparison_config, doctor, export, generate, prepare, runs, train_list
from fla_train.cli import eval as eval_command
from fla_train.cli.base import with_base
from fla_train.cli.bench import parse
from fla_train.cli.overrides import quote_values
from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.hub.export import export_model
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.run.resolve import resolve
from fla_train.training.config import register, to_config
from fla_train.utils.keys import find_errors

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "tutorial.ipynb"]
QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"")
# Commands with one of these print and end.
ANSWERED = {"--help", "--version", "--cfg"}
# A reader replaces these.
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]+\b|[<|]")
# zsh expands or refuses these, and takes no comments in typed commands.
GLOB = re.compile(r"[][*?{}()<>|^#]")


def text_of(page: Path) -> str:
    if page.suffix == ".md":
        return page.read_text()
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(page.read_text())["cells"]]
    cells = [(kind, text.removeprefix("%%writefile reflections.py\n")) for kind, text in cells]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells)


def lines() -> Iterator[tuple[str, str]]:
    """Yield (page, command) for each line in ```sh and ```bash fences and for commands in prose."""
    for page in PAGES:
        text = text_of(page)
        for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.S | re.M):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip():
                    yield page.name, line.strip()
        prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
        for command in re.findall(r"`(fla-\w+ [^`]*=[^\s`][^`]*)`", prose):
            if not PLACEHOLDER.search(command):
                yield page.name, " ".join(command.split())


COMMANDS = {command: page for page, command in sorted(set(lines()))}
# scripts/train.slurm and scripts/train_hosts.sh append these overrides.
SCRIPTS_ADD = ("launch.num_machines=2", "launch.main_process_ip=10.0.0.1", "launch.main_process_port=29500")


def test_shells_read_commands_as_they_are():
    for command, page in COMMANDS.items():
        bare = re.sub(r" > [\w./]+$", "", QUOTED.sub("", command))
        assert not GLOB.search(bare), f"{page}: quote {command}"
        for script in re.findall(r"\b(?:scripts|tests)/[\w./-]+", command):
            assert (ROOT / script).exists(), f"{page}: {script}"


@pytest.fixture(scope="module")
def folder_with_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with runs/first, first-in-fla and docs/examples, which the commands read."""
    folder = tmp_path_factory.mktemp("docs")
    size = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 1, "head_dim": 16}
    tokenizer = load_tokenizer(TokenizerConfig(name="bytes"))
    model = DeltaProductForCausalLM(DeltaProductConfig(**size))
    export_model(model, tokenizer, folder / "runs" / "first" / "hf" / "step-0000020")
    export_model(model, tokenizer, folder / "first-in-fla", format="fla")
    shutil.copytree(ROOT / "docs" / "examples", folder, dirs_exist_ok=True)
    return folder


@pytest.fixture
def in_a_folder_with_a_run(folder_with_a_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the working directory. The commands are only checked, and write nothing."""
    monkeypatch.chdir(folder_with_a_run)
    monkeypatch.setattr(sys, "path", list(sys.path))


def check(words: list[str]) -> None:
    """Raise the error that the program would print before it starts its work."""
    match words:
        case ["fla-train", *overrides]:
            register()
            options = ["--config-dir", None]
            if "--config-dir" in overrides:
                at = overrides.index("--config-dir")
                options, overrides = overrides[at : at + 2], [*overrides[:at], *overrides[at + 2 :]]
            plain = [text for text in overrides if text != "-m"]
            for job in app.sweep_jobs(plain) if "-m" in overrides else [plain]:
                given, written = {"config_dir": options[1]}, quote_values("train", job)
                config = to_config(app.compose("train", with_base(written, **given), **given))
                resolve(config)
                if config.trainer.suite_every:
                    check_suite(config.trainer.suite, config.trainer.suite_options)
        case ["torchrun" | "accelerate", *options] if "-m" in options:
            _, module, *overrides = options[options.index("-m") :]
            check([module.replace("fla_train.cli.", "fla-"), *overrides])
        case ["sbatch", *options]:
            script = options.index("scripts/train.slurm")
            job = ["run.job=0"] if any(option.startswith("--array") for option in options[:script]) else []
            check(["fla-train", *options[script + 1 :], *job, *SCRIPTS_ADD])
        case [hosts, "bash", "scripts/train_hosts.sh", *overrides] if hosts.startswith("HOSTS="):
            check(["fla-train", *overrides, *SCRIPTS_ADD])
        case ["fla-prepare", *overrides]:
            prepare.register()
            config = app.compose("prepare", with_base(quote_values("prepare", overrides)))
            assert not find_errors(OmegaConf.to_object(config.data), "data.")
        case ["fla-eval", "compare", *places]:
            assert len([place for place in places if "=" not in place]) > 1
        case ["fla-eval", *overrides]:
            eval_command.register()
            config = OmegaConf.to_object(app.compose("eval", quote_values("eval", overrides)))
            assert config.checkpoint and not find_errors(config.suite, "suite.")
        case ["fla-export", *overrides]:
            export.register()
            config = OmegaConf.to_object(app.compose("export", quote_values("export", overrides)))
            assert config.checkpoint and (config.output or config.hub.repo_id)
        case ["fla-generate", *overrides]:
            generate.register()
            config = app.compose("generate", quote_values("generate", overrides))
            assert not find_errors(OmegaConf.to_object(config))
        case ["fla-bench", *arguments]:
            options = parse(arguments)
            if overrides := getattr(options, "overrides", None):
                register()
                resolve(to_config(app.compose("train", overrides)))
        case ["fla-doctor", *arguments]:
            doctor.build_parser().parse_args(arguments)
        case ["fla-runs", "train", *arguments]:
            request = train_list.build_parser().parse_intermixed_args(arguments)
            if (ROOT / request.list).exists():
                assert train_list.read_list(ROOT / request.list)
        case ["fla-runs", "compare", *arguments]:
            request = comparison_config.build_parser().parse_intermixed_args(arguments)
            assert comparison_config.read_comparison(ROOT / request.file, request.overrides)
        case ["fla-runs", *arguments]:
            runs.build_parser().parse_args(arguments)
        case _:
            raise AssertionError(f"no program is called {words[0]}")


PROGRAMS = ("fla-", "torchrun ", "accelerate ", "sbatch ", "HOSTS=")


def ours() -> Iterator[object]:
    """Yield our commands, as `long` if longer ones have their keys and options: composing takes a while."""
    seen: set[tuple[str, str]] = set()
    for command in sorted(COMMANDS, key=len, reverse=True):
        if command.startswith(PROGRAMS):
            program, *words = shlex.split(command)
            keys = [word.partition("=")[0] for word in words]
            new = {(program, key if "." in key else word) for key, word in zip(keys, words, strict=True)}
            marks = () if new - seen else pytest.mark.long
            yield pytest.param(command, marks=marks, id=f"{COMMANDS[command]}-{command[:60]}")
            seen |= new


@pytest.mark.usefixtures("in_a_folder_with_a_run")
@pytest.mark.parametrize("command", [*ours()])
def test_it_is_accepted_as_written(command: str, run_command: Callable, monkeypatch: pytest.MonkeyPatch):
    words = shlex.split(command)
    if "trainer.precision=fp8" in words:  # It needs a GPU with float8.
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    if ANSWERED & set(words):
        assert run_command(*words)[0] == 0
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_a_page_parses_and_says_where_its_names_come_from(page: Path):
    blocks = re.findall(r"^```python\n(.*?)^```", text_of(page), re.S | re.M)
    nodes = list(ast.walk(ast.parse("\n".join(blocks))))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {name.id for name in names if isinstance(name.ctx, ast.Store)} | set(dir(builtins))
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    known |= {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
    assert {name.id for name in names} <= known
