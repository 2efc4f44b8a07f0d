"""docs/cli.md agrees with the commands, and errors name pages that exist."""

import re
import tomllib
from pathlib import Path

import pytest

from fla_train.cli import app, error_pages, help
from fla_train.training.preemption import EXIT_CODE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text()
COMMANDS = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])


def test_the_page_lists_every_command_flag_and_exit_status() -> None:
    assert sorted(re.findall(r"^\| `(fla-\w+)` \|", PAGE, re.M)) == sorted(COMMANDS)
    assert help.USAGE.format(name="train") in PAGE
    rows = [(int(code), meaning) for code, meaning in re.findall(r"^\| (\d+) \| (.+) \|$", PAGE, re.M)]
    assert rows == list(help.EXIT_STATUS.items())
    assert set(help.EXIT_STATUS) == {0, 1, 2, EXIT_CODE, app.INTERRUPTED}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_version(run_command, command: str) -> None:
    code, out, _ = run_command(command, "--version")
    names = re.findall(r"(\w+) [^\s,]+(?:, |\n)", out)
    assert (code, names) == (0, ["fla_train", "commit", "torch", "triton", "transformers"])


def test_pages_of_errors_exist() -> None:
    assert all((ROOT / page).is_file() for page in error_pages.PAGES)


@pytest.mark.parametrize(
    ("words", "pages"),
    [
        (["fla-train", "data.validation_fraction=2", "trainer.max_steps=0"], ["configuration", "data"]),
        (["fla-train", "launch.num_machines=2"], ["launching"]),
        (["fla-train", "model.mixer=no_such:Mixer"], ["mixers"]),
        (["fla-eval", "suite=tasks"], ["exports"]),  # checkpoint= is missing
        (["fla-export", "checkpoint=x", "hub.repo_id=/"], ["exports"]),
        (["fla-prepare", "data.tokenizer.name=/no/where"], ["data"]),
        (["fla-train", "trainer.max_step=3"], []),  # the line says what to write
    ],
    ids=lambda words: " ".join(words),
)
def test_an_error_ends_with_the_page_that_explains_it(run_command, words, pages) -> None:
    code, _, err = run_command(*words)
    assert code == 2
    lines = err.removeprefix("error: ").splitlines()
    found = [name for line in lines for name in re.findall(r" \(see docs/(\w+)\.md\)$", line)]
    assert sorted(found) == pages
