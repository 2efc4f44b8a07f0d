"""The checkpoint format and the choice of a checkpoint, without an engine."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fla_train.training import checkpoint
from fla_train.training.checkpoint import CheckpointStore

WEIGHTS = "weights.pt"


def make(folder: Path, step: int, world_size: int = 1, **state: object) -> Path:
    """Write a checkpoint as a run leaves it, with made-up content."""
    path = folder / checkpoint.folder_name(step)
    contents = {"state.json": json.dumps({"step": step, "tokens": 10 * step, **state}).encode()}
    contents[WEIGHTS] = f"weights of {step}".encode()
    for rank in range(world_size):
        contents[f"rank-{rank}.pt"] = b"moments"
    files = {}
    for name, content in contents.items():
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"step": step, "world_size": world_size, "files": files}
    compact = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(compact.encode()).hexdigest()
    manifest = {"version": 1, "sha256": checksum, "content": manifest}
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
        change(manifest["content"])
        compact = json.dumps(manifest["content"], sort_keys=True, separators=(",", ":"))
        manifest["sha256"] = hashlib.sha256(compact.encode()).hexdigest()
        file.write_text(json.dumps(manifest))

    return damage


OTHER = "../step-0000003/manifest.json"
DAMAGE = {
    "cut short": lambda path: cut(path / WEIGHTS),
    "changed": lambda path: flip(path / WEIGHTS),
    "file lost": lambda path: (path / WEIGHTS).unlink(),
    "manifest lost": lambda path: (path / "manifest.json").unlink(),
    "manifest a named pipe": instead("manifest.json", os.mkfifo),  # which nobody will ever write
    "manifest a folder": instead("manifest.json", Path.mkdir),
    "manifest nested deep": lambda path: (path / "manifest.json").write_bytes(b"[" * 100_000),
    "manifest of another": instead("manifest.json", lambda path: path.symlink_to(OTHER)),
    "weights a named pipe": instead(WEIGHTS, os.mkfifo),
    "all files deleted": instead("", Path.mkdir),
    "a link to another": instead("", lambda path: path.symlink_to("step-0000003")),
}
# Changes of the content that its checksum covers, as a stranger might make them
WRONG_CONTENT = {
    "no files": lambda content: content["files"].clear(),
    "a file is not listed": lambda content: content["files"].pop("rank-0.pt"),
    "another file": lambda content: content["files"].update({"../x": content["files"]["rank-0.pt"]}),
    "an entry that is text": lambda content: content["files"].update({"rank-0.pt": "6"}),
    "more ranks": lambda content: content.update(world_size=3),
    "very many ranks": lambda content: content.update(world_size=10**12),
    "another step": lambda content: content.update(step=7),
    "one more field": lambda content: content.update(more=1),
}


@pytest.mark.parametrize(
    "damage", [*DAMAGE.values(), *map(edit, WRONG_CONTENT.values())], ids=[*DAMAGE, *WRONG_CONTENT]
)
def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, damage: Callable[[Path], object]):
    before, lines = make(tmp_path, 3), []
    damage(make(tmp_path, 6))
    assert CheckpointStore(tmp_path).choose("auto", lines.append) == before
    assert len(lines) == 1 and "step-0000006 is not used" in lines[0]


def test_no_bit_of_a_manifest_may_flip(tmp_path: Path):
    """The checkpoint fails verification, or the manifest has an equal meaning."""
    path = make(tmp_path, 11)
    content, manifest = (path / "manifest.json").read_bytes(), checkpoint.read_manifest(path)
    refused = 0
    for i, byte in enumerate(content):
        (path / "manifest.json").write_bytes(content[:i] + bytes([byte ^ 1 << i % 8]) + content[i + 1 :])
        if checkpoint.find_error(path) is not None:
            refused += 1
        else:
            assert checkpoint.read_manifest(path) == manifest
    assert refused > len(content) - 9  # a space may become another separator


def test_manifests_without_a_true_checksum_are_refused(tmp_path: Path):
    file = make(tmp_path, 3) / "manifest.json"
    whole = json.loads(file.read_text())
    cases = [{key: value for key, value in whole.items() if key != lost} for lost in whole]
    cases += [whole | {"version": version} for version in (0, 2, "1", None)]
    cases += [whole["content"], None, [], 3, "text", whole | {"sha256": whole["sha256"].upper()}]
    for manifest in cases:
        file.write_text(json.dumps(manifest))
        assert "manifest.json" in checkpoint.find_error(file.parent), manifest


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path):
    path = make(tmp_path, 3, world_size=2)
    expected = checkpoint.read_manifest(path)
    (path / "manifest.json").unlink()
    checkpoint.write_manifest(path, expected)
    assert checkpoint.read_manifest(path) == expected and checkpoint.find_error(path) is None
    assert checkpoint.world_size(path) == 2 and checkpoint.read_state(path).step == 3


def test_half_written_folders_are_never_seen_and_are_cleaned_away(tmp_path: Path):
    complete, store = make(tmp_path, 3), CheckpointStore(tmp_path)
    make(tmp_path, 6).rename(tmp_path / ".writing-step-0000006")
    make(tmp_path, 1).rename(tmp_path / ".deleting-step-0000001")
    (tmp_path / ".deleting-step-0000009").symlink_to("gone")
    being_written = tmp_path / ".writing-step-0000009-1"
    being_written.mkdir()
    assert store.choose("auto") == complete
    store.clean(keep=being_written.name)
    assert sorted(tmp_path.iterdir()) == [being_written, complete]


def test_which_checkpoint_a_run_starts_from(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run", run="this")
    assert store.choose("none") is None and store.choose("auto") is None
    assert store.newest_state() is None and store.newest_state("none") is None
    trunk, other = (str(make(tmp_path / name, 3)) for name in ("trunk", "other"))
    assert store.choose(trunk) == Path(trunk) == store.newest_state(trunk)[0]
    # A batch system gives the same command again: the run continues from its newest checkpoint.
    first = make(store.folder, 4, run="this", config={"trainer.resume": trunk})
    make(store.folder, 5, run="another")
    assert store.choose(trunk) == store.choose("auto") == first == store.newest_state(trunk)[0]
    later = "step-0000005 comes after"
    for resume, message in ((other, later), (str(first), later), ("none", "step-0000005 exists")):
        with pytest.raises(ValueError, match=message):
            store.choose(resume)
    with pytest.raises(ValueError, match="is not a checkpoint"):
        store.newest_state(str(tmp_path))
    cut(Path(other) / WEIGHTS)
    with pytest.raises(ValueError, match=r"weights\.pt .*9.*12"):
        CheckpointStore(tmp_path / "new").choose(other)
    cut(first / "manifest.json")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is intact"):
        store.choose("auto")


def test_the_newest_state_needs_no_whole_checkpoint(tmp_path: Path):
    first, second = (make(tmp_path, step) for step in (3, 6))
    cut(first / WEIGHTS)
    (second / "state.json").write_text('{"torn": 1}')
    assert CheckpointStore(tmp_path).newest_state()[0] == first


def test_pruning_keeps_the_newest_intact_one_and_copies_by_other_names(tmp_path: Path):
    newest, store = [make(tmp_path, step) for step in (3, 5, 6, 12)][-1], CheckpointStore(tmp_path)
    copies = [tmp_path / "step-0000003-good", tmp_path / "step-0000006.bak"]
    for copy in copies:
        shutil.copytree(newest, copy)
    corrupt = make(tmp_path, 15)
    cut(corrupt / WEIGHTS)
    assert store.prune(newest, keep=0) is None and len(store.list()) == 5
    store.prune(newest, keep=1, keep_every=5)
    assert store.list() == [tmp_path / "step-0000005", newest, corrupt] and all(map(Path.exists, copies))
    assert store.choose("auto") == newest
