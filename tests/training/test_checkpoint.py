"""Choosing a checkpoint, without an engine; `test_resume.py` covers saving and loading."""

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fla_train.training import checkpoint
from fla_train.utils import filesystem


def make(folder: Path, step: int, world_size: int = 1) -> Path:
    """A checkpoint as rank 0 leaves it, with made-up content."""
    path = folder / checkpoint.folder_name(step)
    (path / "deepspeed").mkdir(parents=True)
    content = f"weights of {step}".encode()
    (path / "deepspeed" / "weights.pt").write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"step": step, "world_size": world_size, "files": {"deepspeed/weights.pt": entry}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    path.write_bytes(b"X" + path.read_bytes()[1:])


DAMAGE = {
    "cut short": lambda path: cut(path / "deepspeed" / "weights.pt"),
    "changed": lambda path: flip(path / "deepspeed" / "weights.pt"),
    "file lost": lambda path: (path / "deepspeed" / "weights.pt").unlink(),
    "manifest cut short": lambda path: cut(path / "manifest.json"),
    "manifest lost": lambda path: (path / "manifest.json").unlink(),
}


def test_auto_takes_the_newest(tmp_path: Path):
    make(tmp_path, 3)
    newest = make(tmp_path, 12)
    assert checkpoint.choose("auto", tmp_path) == newest


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage):
    before = make(tmp_path, 3)
    damage(make(tmp_path, 6))
    assert checkpoint.choose("auto", tmp_path) == before
    assert "step-0000006 is corrupt" in caplog.text


def test_a_half_written_one_is_never_seen_and_is_cleaned_away(tmp_path: Path):
    complete = make(tmp_path, 3)
    make(tmp_path, 6).rename(tmp_path / ".writing-step-0000006")
    make(tmp_path, 1).rename(tmp_path / ".deleting-step-0000001")
    assert checkpoint.choose("auto", tmp_path) == complete
    checkpoint.clean(tmp_path)
    assert list(tmp_path.iterdir()) == [complete]


def test_when_none_is_intact_nothing_is_thrown_away_silently(tmp_path: Path):
    cut(make(tmp_path, 3) / "manifest.json")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is intact"):
        checkpoint.choose("auto", tmp_path)


def test_none_starts_from_the_beginning_but_not_over_an_earlier_run(tmp_path: Path):
    assert checkpoint.choose("none", tmp_path) is None
    assert checkpoint.choose("auto", tmp_path) is None
    make(tmp_path, 3)
    with pytest.raises(ValueError, match=r"holds step-0000003 .* trainer.resume=auto"):
        checkpoint.choose("none", tmp_path)


def test_a_given_path_must_be_intact(tmp_path: Path):
    path = make(tmp_path / "other", 3)
    assert checkpoint.choose(str(path), tmp_path) == path
    cut(path / "deepspeed" / "weights.pt")
    with pytest.raises(ValueError, match=r"weights.pt has 9 bytes instead of 12"):
        checkpoint.choose(str(path), tmp_path)


def test_going_back_does_not_leave_later_checkpoints_for_auto(tmp_path: Path):
    early, _ = make(tmp_path, 3), make(tmp_path, 6)
    with pytest.raises(ValueError, match="holds step-0000006, which comes after"):
        checkpoint.choose(str(early), tmp_path)


def test_another_number_of_processes_is_no_fault(tmp_path: Path):
    path = make(tmp_path, 3, world_size=2)
    assert checkpoint.choose("auto", tmp_path) == path
    assert checkpoint.world_size(path) == 2


def test_corrupt_later_ones_do_not_push_out_the_newest(tmp_path: Path):
    newest = [make(tmp_path, step) for step in (3, 6, 7)][-1]
    cut(make(tmp_path, 9) / "deepspeed" / "weights.pt")
    checkpoint.prune(newest, keep=0)
    assert len(checkpoint.checkpoints(tmp_path)) == 4
    checkpoint.prune(newest, keep=1)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-0000007", "step-0000009"]
    assert checkpoint.choose("auto", tmp_path) == newest


def test_a_copy_under_another_name_is_neither_used_nor_deleted(tmp_path: Path):
    newest = [make(tmp_path, step) for step in (3, 6)][-1]
    copies = [tmp_path / "step-0000003-good", tmp_path / "step-0000006.bak"]
    for copy in copies:
        shutil.copytree(newest, copy)
    assert checkpoint.choose("auto", tmp_path) == newest
    checkpoint.prune(newest, keep=1, keep_every=5)
    assert sorted(tmp_path.iterdir()) == sorted([newest, *copies])


def test_a_checkpoint_of_another_model_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Engine:
        checkpoint_engine, optimizer = None, SimpleNamespace(param_groups=[])

        def load_checkpoint(self, *arguments: object, **options: object) -> None:
            torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 2).state_dict())

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    with pytest.raises(
        ValueError, match=r"^\S+step-0000003 is of another model: size mismatch for weight.*$"
    ):
        checkpoint.load(Engine(), make(tmp_path, 3))


def test_a_checkpoint_that_is_deleted_while_it_is_verified_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    older = make(tmp_path, 3)
    newest = make(tmp_path, 6)
    checksum = filesystem.sha256

    def lose(path: Path) -> str:
        if newest in path.parents:
            shutil.rmtree(newest)
        return checksum(path)

    monkeypatch.setattr(filesystem, "sha256", lose)
    assert checkpoint.newest_intact(tmp_path) == older
