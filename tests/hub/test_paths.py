"""What a folder is called where it is given as `.` or `..`."""

from pathlib import Path

import pytest

from fla_train.hub.load import resolve_checkpoint
from fla_train.hub.paths import own_name, run_folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for folder in ("hf/step-0000007", "eval/first"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    (tmp_path / "run/hf/step-0000007/config.json").touch()
    return tmp_path / "run"


def test_a_folder_has_its_own_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert [own_name(path) for path in (".", "..", "hf/..", "hf")] == ["run", run.parent.name, "run", "hf"]
    (run.parent / "linked").symlink_to(run)
    assert own_name(run.parent / "linked") == "linked"


@pytest.mark.parametrize("inside", [".", "eval", "eval/first", "hf", "hf/step-0000007"])
def test_a_run_is_found_from_within(run: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / inside)
    place = "/".join([".", *[".."] * (inside.count("/") + (inside != "."))])
    for checkpoint in (place, f"{place}/hf", "." if inside.startswith("hf") else place):
        source = resolve_checkpoint(checkpoint)
        assert (run_folder(source), own_name(source)) == (run, "step-0000007")
