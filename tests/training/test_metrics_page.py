"""docs/metrics.md lists the files, metrics and log lines that runs write, and no others."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warm_ranks import TWO_RANKS, WarmRanks

from fla_train.cli.app import compose
from fla_train.training.config import TrainConfig, to_config
from fla_train.training.launch import launch
from fla_train.utils.records import read_metrics
from tests.training.test_data_modes import two_parts
from tests.training.test_task_training import SMALL

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
PLACEHOLDERS = {
    "0000100": r"\d{7}",
    "0001": r"\d{4}",
    "*": ".*",
    "rank-N": r"rank-\d+",
    "LAYER": r"\d+",
    "FIRST-LAST": r"\d+-\d+",
    "PART": r"\w+",
    "TEST/METRIC": r"(train_length|longer)/\w+",
    "SET/NUMBER": ".+",
    "SUITE-": r"\w+-",
    "100/600": r"\d+/\d+",
    "100:": r"\d+:",
}
# What the runs here can't write: without a suite, a Hub, W&B, a full disk, a loss that is NaN.
ELSEWHERE = {
    *("NAME/step-0000100/", "eval/SUITE-*/", "wandb/", "pushes.jsonl", "logs/push.log"),
    *("evaluated_step", "eval/SET/NUMBER"),
    *("step 100: skipped", "NO CHECKPOINT", "NO EXPORT", "NOT PUSHED"),
}


def listed(heading: str) -> list[str]:
    """What the first column of the table below a heading of the page names."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", section, re.M)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def pattern(name: str) -> re.Pattern[str]:
    """What a name of the page stands for; a folder stands for all that it holds."""
    found = re.escape(name)
    for placeholder, meaning in PLACEHOLDERS.items():
        found = found.replace(re.escape(placeholder), meaning)
    return re.compile(found + ".*" * name.endswith("/"))


def files(run: Path) -> Iterator[str]:
    return (str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def keys(run: Path) -> set[str]:
    return {key for record in read_metrics(run / "metrics.jsonl") for key in record}


@pytest.fixture(scope="module")
def runs(
    make_config: Callable[..., TrainConfig],
    warm_ranks: WarmRanks,
    corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Path]:
    """A run on a mixture with two ranks and all that a run may record, and one on a task."""
    folder = tmp_path_factory.mktemp("runs")
    options = [
        *TWO_RANKS,
        *("trainer.max_steps=6", "trainer.stats_every=2", "trainer.eval_buckets=2", "launch.peak_tflops=1"),
        *("trainer.profile_steps=[3]", "trainer.check_backend=true", "logger.tensorboard=true"),
    ]
    text = make_config(*options, f"run.dir={folder / 'text'}")
    launch(two_parts(text, corpus, folder))  # warm ranks have no logs of their own
    warm_ranks.launch(to_config(compose("train", [*SMALL, f"run.dir={folder / 'task'}"])))
    return [folder / "text", folder / "task"]


@pytest.mark.slow
@pytest.mark.parametrize(("heading", "of"), [("The run folder", files), ("metrics.jsonl", keys)])
def test_the_page_lists_what_runs_write_and_nothing_else(
    runs: list[Path], heading: str, of: Callable[[Path], Iterator[str]]
) -> None:
    written = {name for run in runs for name in of(run)}
    names = listed(heading)
    unknown = [name for name in written if not any(pattern(p).fullmatch(name) for p in names)]
    assert not unknown, f"not on the page: {', '.join(sorted(unknown))}"
    absent = {p for p in names if not any(pattern(p).fullmatch(name) for name in written)}
    assert absent == ELSEWHERE & set(names)


@pytest.mark.slow
def test_every_line_has_what_the_page_says(runs: list[Path]) -> None:
    assert all(
        {"step", "tokens"} <= record.keys() for run in runs for record in read_metrics(run / "metrics.jsonl")
    )


@pytest.mark.slow
def test_the_log_has_the_lines_of_the_page(runs: list[Path]) -> None:
    log = (runs[0] / "train.log").read_text()
    found = {name for name in listed("train.log") if re.search(rf"^{pattern(name).pattern}", log, re.M)}
    assert found == set(listed("train.log")) - ELSEWHERE
