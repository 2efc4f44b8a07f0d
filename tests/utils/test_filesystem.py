"""A failure or a kill while a folder is replaced leaves the former or the new content, never a mix."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from fla_train.utils import filesystem
from fla_train.utils.filesystem import (
    move_folder,
    replaced_file,
    replaced_folder,
    save_tokenizer,
    write_whole,
)


def make(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "file").write_text(content)
    return folder


def contents(parent: Path) -> dict[str, str]:
    return {str(file.relative_to(parent)): file.read_text() for file in parent.rglob("*") if file.is_file()}


def test_no_two_writers_share_a_half_written_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines may write one file of a shared disk at the same time."""
    file, halves = tmp_path / "file", []
    monkeypatch.setattr(filesystem, "sync", lambda _: halves.extend(tmp_path.glob("file.*.tmp")))
    for content in ("one", "two"):
        write_whole(file, content)
    assert len(halves) == len(set(halves)) == 2
    assert contents(tmp_path) == {"file": "two"}


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    file = make(tmp_path / "folder", "former") / "file"
    with pytest.raises(OSError, match="folder/file"), replaced_file(file):
        os.write(os.open("/dev/full", os.O_WRONLY), b"new")
    assert contents(tmp_path) == {"folder/file": "former"}


def test_a_finished_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    (make(tmp_path / "final", "former") / "further").write_text("")
    make(tmp_path / ".deleting-final", "left by a kill")
    move_folder(make(tmp_path / "aside", "new"), tmp_path / "final")
    assert contents(tmp_path) == {"final/file": "new"} and len(list(tmp_path.iterdir())) == 1


def test_a_folder_is_replaced_if_its_new_content_was_written(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "former")
    with pytest.raises(RuntimeError), replaced_folder(folder) as aside:
        (aside / "file").write_text("half")
        raise RuntimeError
    assert contents(tmp_path) == {"folder/file": "former"}
    with replaced_folder(folder) as aside:
        (aside / "file").write_text("new")
        assert contents(folder) == {"file": "former"}
    assert contents(tmp_path) == {"folder/file": "new"} and len(list(tmp_path.iterdir())) == 1


def test_the_target_of_a_link_is_replaced(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "former")
    (tmp_path / "link").symlink_to(folder)
    for content in ("new", "newer"):
        with replaced_folder(tmp_path / "link") as aside:
            (aside / "file").write_text(content)
        assert contents(folder) == {"file": content}
        assert {path.name for path in tmp_path.iterdir()} == {"folder", "link"}
        assert (tmp_path / "link").is_symlink()


def test_the_former_folder_comes_back_after_a_kill_between_both_moves(tmp_path: Path) -> None:
    make(tmp_path / ".deleting-folder", "former")
    make(tmp_path / ".writing-folder", "new")
    with pytest.raises(RuntimeError), replaced_folder(tmp_path / "folder"):
        raise RuntimeError
    assert contents(tmp_path) == {"folder/file": "former"}


def test_a_second_writer_of_a_folder_is_refused(tmp_path: Path) -> None:
    with replaced_folder(tmp_path / "folder") as aside:
        with pytest.raises(ValueError, match="another process writes"):
            replaced_folder(tmp_path / "folder").__enter__()
        (aside / "file").touch()
    assert (tmp_path / "folder" / "file").is_file()


def test_files_of_a_tokenizer_are_flushed_and_a_full_disk_is_an_error_of_the_system(tmp_path, monkeypatch):
    flushed: list[Path] = []
    monkeypatch.setattr(filesystem, "sync", flushed.append)
    save_tokenizer(SimpleNamespace(save_pretrained=lambda folder: make(folder / "more", "")), tmp_path)
    assert flushed == [tmp_path / "more", tmp_path / "more" / "file", tmp_path]

    def fail(folder: Path) -> None:
        # Rust raises a bare `Exception`.
        raise Exception("No space left on device (os error 28)")

    with pytest.raises(OSError, match="No space left"):
        save_tokenizer(SimpleNamespace(save_pretrained=fail), tmp_path)
