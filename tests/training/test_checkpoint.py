"""The checkpoint format and the choice of a checkpoint, without an engine."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fla_train.training import checkpoint
from fla_train.training.load_checkpoint import load_checkpoint
from fla_train.utils import filesystem

WEIGHTS = "deepspeed/mp_rank_00_model_states.pt"


def make(folder: Path, step: int, world_size: int = 1, *, legacy: bool = False, **state: object) -> Path:
    """A checkpoint as a run leaves it, with made-up content; `legacy`: as commit 867e849 wrote it."""
    path = folder / checkpoint.folder_name(step)
    contents = {"state.json": json.dumps({"step": step, "tokens": 10 * step, **state}).encode()}
    contents[WEIGHTS] = f"weights of {step}".encode()
    for rank in range(world_size):
        contents[f"rng-{rank}.pt"] = b"random"
        contents[f"features-{rank}.pt"] = b"states"
        contents[f"deepspeed/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = b"moments"
    files = {}
    for name, content in contents.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"step": step, "tokens": 10 * step, "world_size": world_size}
    manifest |= {"versions": {"torch": "2.13.0"}, "files": files}
    if not legacy:
        compact = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
        checksum = hashlib.sha256(compact.encode()).hexdigest()
        manifest = {"version": 2, "sha256": checksum, "content": manifest}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    path.write_bytes(b"X" + path.read_bytes()[1:])


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """A damage that puts something else in the place of a file, or of the checkpoint itself."""

    def damage(path: Path) -> None:
        old = path / name
        shutil.rmtree(old) if old.is_dir() else old.unlink()
        make(old)

    return damage


def edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """A damage that rewrites the manifest as `change` of its content leaves it, checksum included."""

    def damage(path: Path) -> None:
        file = path / "manifest.json"
        manifest = json.loads(file.read_text())
        change(manifest.get("content", manifest))
        if "content" in manifest:
            compact = json.dumps(manifest["content"], sort_keys=True, separators=(",", ":"))
            manifest["sha256"] = hashlib.sha256(compact.encode()).hexdigest()
        file.write_text(json.dumps(manifest))

    return damage


OTHER = "../step-0000003/manifest.json"
DAMAGE = {
    "cut short": lambda path: cut(path / WEIGHTS),
    "changed": lambda path: flip(path / WEIGHTS),
    "file lost": lambda path: (path / WEIGHTS).unlink(),
    "manifest cut short": lambda path: cut(path / "manifest.json"),
    "manifest lost": lambda path: (path / "manifest.json").unlink(),
    "manifest a named pipe": instead("manifest.json", os.mkfifo),  # which nobody will ever write
    "manifest a folder": instead("manifest.json", Path.mkdir),
    "manifest a link to itself": instead("manifest.json", lambda path: path.symlink_to(path.name)),
    "manifest nested deep": lambda path: (path / "manifest.json").write_bytes(b"[" * 100_000),
    "manifest of another": instead("manifest.json", lambda path: path.symlink_to(OTHER)),
    "weights a named pipe": instead(WEIGHTS, os.mkfifo),
    "weights a folder": instead(WEIGHTS, Path.mkdir),
    "weights a link to nothing": instead(WEIGHTS, lambda path: path.symlink_to("gone")),
    "weights with a byte more": lambda path: os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size + 1),
    "folder of weights deleted": lambda path: shutil.rmtree(path / "deepspeed"),
    "all files deleted": instead("", Path.mkdir),
    "a link to another": instead("", lambda path: path.symlink_to("step-0000003")),
}
# What no checksum of the manifest would tell, with a word of the line that says so
WRONG_CONTENT = {
    "no files": (lambda content: content["files"].clear(), "files"),
    "a file is not listed": (lambda content: content["files"].pop("rng-0.pt"), "rng-0.pt"),
    "the state is not listed": (lambda content: content["files"].pop("state.json"), "state.json"),
    "another file": (lambda content: content["files"].update({"../x": content["files"]["rng-0.pt"]}), "../x"),
    "an entry without a checksum": (lambda content: content["files"]["rng-0.pt"].pop("sha256"), "rng-0.pt"),
    "an entry that is text": (lambda content: content["files"].update({"rng-0.pt": "6"}), "rng-0.pt"),
    "a size that is text": (lambda content: content["files"]["rng-0.pt"].update(bytes="6"), "rng-0.pt"),
    "a checksum that is a number": (
        lambda content: content["files"]["rng-0.pt"].update(sha256=1),
        "rng-0.pt",
    ),
    "more ranks": (lambda content: content.update(world_size=3), "rank_1"),
    "no ranks": (lambda content: content.update(world_size=0), "world_size"),
    "very many ranks": (lambda content: content.update(world_size=10**12), "world_size"),
    "true ranks": (lambda content: content.update(world_size=True), "world_size"),
    "a step that is text": (lambda content: content.update(step="6"), "step"),
    "a step below zero": (lambda content: content.update(step=-6), "step"),
    "another step": (lambda content: content.update(step=7), "step 7"),
    "other tokens": (lambda content: content.update(tokens=7), "state.json"),
    "no step": (lambda content: content.pop("step"), "step"),
    "one more field": (lambda content: content.update(more=1), "fields"),
    "files that are a list": (lambda content: content.update(files=[]), "files"),
    "versions that are numbers": (lambda content: content.update(versions={"torch": 2}), "versions"),
}


def flipped(content: bytes) -> Iterator[bytes]:
    """`content` with one bit changed, each in turn."""
    for i in range(len(content)):
        for bit in range(8):
            yield content[:i] + bytes([content[i] ^ 1 << bit]) + content[i + 1 :]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage):
    before = make(tmp_path, 3)
    damage(make(tmp_path, 6))
    assert checkpoint.choose("auto", tmp_path) == before
    assert "step-0000006 is not used" in caplog.text


@pytest.mark.parametrize("legacy", [False, True], ids=["version 2", "legacy"])
@pytest.mark.parametrize(("change", "word"), WRONG_CONTENT.values(), ids=WRONG_CONTENT)
def test_a_manifest_that_cannot_be_true_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable, word: str, legacy: bool
):
    before = make(tmp_path, 3)
    edit(change)(make(tmp_path, 6, legacy=legacy))
    assert checkpoint.choose("auto", tmp_path) == before
    (line,) = caplog.messages
    assert "step-0000006 is not used" in line and "manifest.json" in line and word in line


def test_a_manifest_that_is_no_object_is_damaged(tmp_path: Path):
    path = make(tmp_path, 3)
    for content in (b"", b"null", b"[]", b"3", b'"text"', b"\xff", b"[" * 100_000, b'{"step": NaN}'):
        (path / "manifest.json").write_bytes(content)
        assert "manifest.json" in checkpoint.find_error(path)


@pytest.mark.parametrize("legacy", [False, True], ids=["version 2", "legacy"])
def test_no_bit_of_a_manifest_fools(tmp_path: Path, legacy: bool):
    """Whichever flips, the checkpoint is refused, or the manifest means the same.

    In a legacy one, which has no checksum, the versions of the packages, for people to read, are not covered.
    """
    path = make(tmp_path, 11, world_size=1, legacy=legacy)
    content, manifest = (path / "manifest.json").read_bytes(), checkpoint.read_manifest(path)
    if legacy:
        del manifest["versions"]
    refused = 0
    for changed in flipped(content):
        (path / "manifest.json").write_bytes(changed)
        if checkpoint.find_error(path) is not None:
            refused += 1
        else:
            assert checkpoint.read_manifest(path).items() >= manifest.items(), changed
    assert refused > 8 * len(content) - (400 if legacy else 1)


def test_a_legacy_checkpoint_is_taken(tmp_path: Path):
    path = make(tmp_path, 3, world_size=2, legacy=True)
    assert set(json.loads((path / "manifest.json").read_text())) == {
        *("step", "tokens", "world_size", "versions", "files")
    }
    assert checkpoint.choose("auto", tmp_path) == path
    assert checkpoint.world_size(path) == 2 and checkpoint.read_state(path).step == 3


def test_a_version_2_never_counts_as_legacy(tmp_path: Path):
    """Not even if the damage takes all of the checksum, or of the version."""
    whole = json.loads((make(tmp_path, 3) / "manifest.json").read_text())
    versions = [1, "2", None, True, 3, 1.0]
    cases = [{key: value for key, value in whole.items() if key != lost} for lost in whole]
    cases += [whole | {"version": version} for version in versions]
    cases += [whole | {"sha256": wrong} for wrong in (None, "", whole["sha256"].upper())]
    cases += [whole["content"] | {"version": 2}, whole["content"] | {"sha256": whole["sha256"]}]
    for manifest in cases:
        (tmp_path / "step-0000003/manifest.json").write_text(json.dumps(manifest))
        assert "manifest.json" in checkpoint.find_error(tmp_path / "step-0000003"), manifest


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path):
    path = make(tmp_path, 3, world_size=2)
    expected = checkpoint.read_manifest(path)
    (path / "manifest.json").unlink()
    checkpoint.write_manifest(path, expected)
    assert checkpoint.read_manifest(path) == expected and checkpoint.find_error(path) is None


def test_a_copy_of_another_step_is_none_of_that_step(tmp_path: Path):
    make(tmp_path, 3).rename(tmp_path / "step-0000004")
    assert "step 3" in checkpoint.find_error(tmp_path / "step-0000004")


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
    cut(path / WEIGHTS)
    with pytest.raises(ValueError, match=r"model_states.pt has 9 bytes instead of 12"):
        checkpoint.choose(str(path), tmp_path)


def test_going_back_does_not_leave_later_checkpoints_for_auto(tmp_path: Path):
    early, _ = make(tmp_path, 3), make(tmp_path, 6)
    with pytest.raises(ValueError, match="holds step-0000006, which comes after"):
        checkpoint.choose(str(early), tmp_path)


def test_corrupt_later_ones_do_not_push_out_the_newest(tmp_path: Path):
    newest = [make(tmp_path, step) for step in (3, 6, 12)][-1]
    assert checkpoint.choose("auto", tmp_path) == newest
    cut(make(tmp_path, 15) / WEIGHTS)
    checkpoint.prune(newest, keep=0)
    assert len(checkpoint.checkpoints(tmp_path)) == 4
    checkpoint.prune(newest, keep=1)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-0000012", "step-0000015"]
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
        load_checkpoint(Engine(), make(tmp_path, 3))


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


def test_what_can_not_be_deleted_is_deleted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """NFS keeps a file that a reader has open."""
    newest = [make(tmp_path, step) for step in (3, 6)][-1]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        checkpoint.prune(newest, keep=1)
    assert checkpoint.checkpoints(tmp_path) == [newest]
    being_written = tmp_path / ".writing-step-0000009-1"
    being_written.mkdir()
    checkpoint.clean(tmp_path, keep=being_written.name)
    assert sorted(tmp_path.iterdir()) == [being_written, newest]


@pytest.mark.parametrize("make_it", [Path.touch, lambda path: path.symlink_to("gone"), Path.mkdir])
def test_what_has_a_checkpoint_s_name_gives_way_to_one(tmp_path: Path, make_it: Callable[[Path], object]):
    make_it(tmp_path / "step-0000003")
    make_it(tmp_path / ".deleting-step-0000009")
    filesystem.remove_folder(tmp_path / "step-0000003")
    checkpoint.clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path: Path) -> None:
    lines: list[str] = []
    own, _ = make(tmp_path, 3, run="this"), make(tmp_path, 6, run="another")
    assert checkpoint.choose("auto", tmp_path, lines.append, run="this") == own
    assert len(lines) == 1 and "step-0000006" in lines[0]


def test_a_checkpoint_that_cannot_be_deleted_does_not_stop_pruning(tmp_path: Path, monkeypatch) -> None:
    first, second, newest = (make(tmp_path, step) for step in (3, 6, 9))
    remove = checkpoint.remove_folder

    def refuse(folder: Path) -> None:
        if folder == first:
            raise PermissionError(13, "Permission denied")
        remove(folder)

    monkeypatch.setattr(checkpoint, "remove_folder", refuse)
    assert first.name in checkpoint.prune(newest, keep=1)
    assert first.exists() and newest.exists() and not second.exists()
