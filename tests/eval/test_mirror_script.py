"""A mirror of any data set, laid out by the script and read by a task that names it."""

import json
from pathlib import Path
from types import ModuleType

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from fla_train.eval.harness import FlaTrainLM, run_tasks
from fla_train.eval.mirror import DatasetUnavailable, hub_datasets
from tests.eval.conftest import CHOICES, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("build_eval_mirror")


def write(file: Path, rows: list[dict]) -> None:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")


@pytest.fixture(params=["jsonl", "parquet"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, quiz: list[dict]) -> Path:
    """Questions as people keep them: a split in two files, and one with more than the split in its name."""
    place = tmp_path / "rows"
    place.mkdir()
    write(place / f"train-00000-of-00002.{request.param}", quiz[:5])
    write(place / f"train-00001-of-00002.{request.param}", quiz[5:8])
    write(place / f"quiz.dev.{request.param}", quiz[8:])
    (place / "README.md").write_text("not read")
    return place


def rows_of(mirror: Path, name: str, config: str | None) -> dict[str, list]:
    with hub_datasets(mirror):
        return {split: list(rows) for split, rows in datasets.load_dataset(name, config).items()}


def test_a_task_reads_any_set_from_the_mirror(
    script, folder, quiz, write_task, scholar, tokenizer, tmp_path, capsys
) -> None:
    mirror = tmp_path / "mirror"
    command = [str(folder), str(mirror), "--hub", "someone/quiz"]
    assert script.main([*command, "--config", "hard", "--rows", "train=8", "validation=8"]) == 0
    assert "hard (train 8, validation 8)" in capsys.readouterr().out
    assert rows_of(mirror, "someone/quiz", "hard") == {"train": quiz[:8], "validation": quiz[8:]}
    place = {"dataset_path": "someone/quiz", "dataset_name": "hard", "dataset_kwargs": {}}
    tasks = write_task("quiz", [], **CHOICES, **place, test_split="validation")
    lm = FlaTrainLM(scholar, tokenizer, batch_size=4)
    found = run_tasks(lm, ["quiz"], include_path=tasks, mirror=mirror, bootstrap_iters=0)
    scores = found["quiz"]["scores"]["quiz"]
    assert scores["acc"] == 1.0 and scores["examples"] == 8

    next(folder.glob("train-00001*")).unlink()
    assert script.main(command) == 0  # another config, beside the first
    assert len(rows_of(mirror, "someone/quiz", None)["train"]) == 5
    assert len(rows_of(mirror, "someone/quiz", "hard")["train"]) == 8


def test_a_file_that_was_cut_short_does_not_load(script, folder, quiz, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    assert script.main([str(folder), str(mirror), "--hub", "someone/quiz"]) == 0
    (file,) = (mirror / "someone/quiz/default").glob("quiz.dev.*")
    write(file, quiz[8:13])
    with pytest.raises(DatasetUnavailable, match=r"other numbers of rows than its README\.md says"):
        rows_of(mirror, "someone/quiz", None)


def test_what_cannot_be_laid_out_is_a_line(script, folder, tmp_path: Path, capsys) -> None:
    mirror, hub = tmp_path / "mirror", ["--hub", "someone/quiz"]

    def refused(*arguments: str) -> str:
        assert script.main([str(folder), str(mirror), *arguments]) == 2
        assert not mirror.exists()
        return capsys.readouterr().err

    assert "8 rows of train for 9" in refused(*hub, "--rows", "train=9")
    assert "0 rows of test for 3" in refused(*hub, "--rows", "test=3")
    assert "org/name" in refused("--hub", "../quiz")
    assert "a/b is no config" in refused(*hub, "--config", "a/b")
    (folder / "more.jsonl").write_text("{}\n")
    assert "more.jsonl: its name must hold one of train" in refused(*hub)
    (folder / "more.jsonl").rename(folder / "test.jsonl")
    if list(folder.glob("*.parquet")):
        assert "holds .jsonl and .parquet files" in refused(*hub)
        return
    (folder / "test.jsonl").write_text('{"a": 1}\n{"a": \n')
    assert "test.jsonl, line 2" in refused(*hub)
    (folder / "test.jsonl").write_text('{"question": [1]}\n')  # other columns than the other splits'
    assert script.main([str(folder), str(mirror), *hub]) == 2
    assert "does not load" in capsys.readouterr().err and not (mirror / "someone/quiz/default").exists()
