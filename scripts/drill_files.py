"""Damage to files at rest, for `fault_kinds.py`: to checkpoints, and to the other files of the run."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drill import Drill, Inject, Unnoticed

Damage = Callable[[Path, Path], object]  # of a checkpoint, given another, intact one
MODEL = "deepspeed/mp_rank_00_model_states.pt"
OPTIMIZER = "deepspeed/zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def flip(path: Path, at: int) -> None:
    """Invert the lowest bit of one byte: digits stay digits."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip_after(key: str) -> Damage:
    """Of the manifest, the first letter or digit of what follows `key`."""

    def damage(checkpoint: Path, other: Path) -> None:
        path = checkpoint / "manifest.json"
        text = path.read_text()
        begin = text.index(f'"{key}"') + len(key) + 2
        flip(path, next(at for at in range(begin, len(text)) if text[at].isalnum()))

    return damage


def forge(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the manifest's content, and make its own checksum right again."""

    def damage(checkpoint: Path, other: Path) -> None:
        path = checkpoint / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest["content"])
        canonical = json.dumps(manifest["content"], sort_keys=True, separators=(",", ":"))
        manifest["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
        path.write_text(json.dumps(manifest))

    return damage


def as_legacy(change: Callable[[dict[str, Any]], object] = lambda content: None) -> Damage:
    """The manifest as version 1, which has no checksum of its own."""

    def damage(checkpoint: Path, other: Path) -> None:
        path = checkpoint / "manifest.json"
        content = json.loads(path.read_text())["content"]
        change(content)
        path.write_text(json.dumps(content))

    return damage


def forge_state(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change state.json, and describe it anew in a manifest with the right checksum."""

    def damage(checkpoint: Path, other: Path) -> None:
        state = json.loads((checkpoint / "state.json").read_text())
        change(state)
        content = json.dumps(state).encode()
        (checkpoint / "state.json").write_bytes(content)
        entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        forge(lambda manifest: manifest["files"].update({"state.json": entry}))(checkpoint, other)

    return damage


def write(name: str, content: bytes) -> Damage:
    return lambda checkpoint, other: (checkpoint / name).write_bytes(content)


def instead(name: str, make: Callable[[Path, Path], object]) -> Damage:
    """Something else in place of a file: `make(path, the same file of the other checkpoint)`."""

    def damage(checkpoint: Path, other: Path) -> None:
        (checkpoint / name).unlink()
        make(checkpoint / name, other / name)

    return damage


def swap_random_states(checkpoint: Path, other: Path) -> None:
    first, second = checkpoint / "rng-0.pt", checkpoint / "rng-1.pt"
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)


def zero(checkpoint: Path, other: Path) -> None:
    path = checkpoint / OPTIMIZER.format(0)
    path.write_bytes(bytes(path.stat().st_size))


def first_file(content: dict[str, Any]) -> dict[str, Any]:
    return content["files"][MODEL]


# What is done to a checkpoint, each to one of its own. All must be found, and named when the run starts.
DAMAGES: dict[str, Damage] = {
    "manifest: a bit of the world size": flip_after("world_size"),
    "manifest: a bit of the step": flip_after("step"),
    "manifest: a bit of the number of tokens": flip_after("tokens"),
    "manifest: a bit of a file's size": flip_after("bytes"),
    "manifest: a bit of a package's version": flip_after("torch"),
    "manifest: a bit of a file's name": lambda c, other: flip(
        c / "manifest.json", (c / "manifest.json").read_text().index("rng-1.pt")
    ),
    "manifest: a bit of a file's sha256": lambda c, other: flip(
        c / "manifest.json", (c / "manifest.json").read_text().rindex('"sha256"') + 20
    ),
    "manifest: a bit of its own sha256": flip_after("sha256"),
    "manifest: a bit of its version": flip_after("version"),
    "manifest: empty": write("manifest.json", b""),
    "manifest: bytes that are no text": write("manifest.json", bytes(range(256))),
    "manifest: JSON of another kind": write("manifest.json", b"[null]"),
    "manifest: brackets nested 100,000 deep": write("manifest.json", b"[" * 100_000),
    "manifest: a folder": instead("manifest.json", lambda path, other: path.mkdir()),
    "manifest: that of another checkpoint": instead(
        "manifest.json", lambda path, other: shutil.copy(other, path)
    ),
    "manifest: a link to that of another checkpoint": instead(
        "manifest.json", lambda path, other: path.symlink_to(other.resolve())
    ),
    "manifest: a link to itself": instead("manifest.json", lambda path, other: path.symlink_to(path.name)),
    "manifest: a pipe without a writer": instead("manifest.json", lambda path, other: os.mkfifo(path)),
    "manifest, forged: more ranks": forge(lambda content: content.update(world_size=3)),
    "manifest, forged: fewer ranks": forge(lambda content: content.update(world_size=1)),
    "manifest, forged: no files": forge(lambda content: content["files"].clear()),
    "manifest, forged: a file outside": forge(
        lambda content: content["files"].update({"../../config.yaml": first_file(content)})
    ),
    "manifest, forged: a size as text": forge(
        lambda content: first_file(content).update(bytes=str(first_file(content)["bytes"]))
    ),
    "manifest, forged: step true": forge(lambda content: content.update(step=True)),
    "manifest, legacy: a wrong size": as_legacy(lambda content: first_file(content).update(bytes=7)),
    "manifest, legacy: fewer ranks": as_legacy(lambda content: content.update(world_size=1)),
    "state.json: empty": write("state.json", b""),
    "state.json, forged: another step": forge_state(lambda state: state.update(step=1)),
    "state.json, forged: an unknown field": forge_state(lambda state: state.update(colour=1)),
    "state.json, forged: a list": lambda c, other: (
        (c / "state.json").write_bytes(b"[]"),
        forge(
            lambda content: content["files"].update(
                {"state.json": {"bytes": 2, "sha256": hashlib.sha256(b"[]").hexdigest()}}
            )
        )(c, other),
    ),
    "random states swapped between ranks": swap_random_states,
    "optimizer state of another checkpoint": instead(
        OPTIMIZER.format(1), lambda path, other: shutil.copy(other, path)
    ),
    "optimizer state zeroed, as after a power cut": zero,
    "weights with a byte more": lambda c, other: os.truncate(c / MODEL, (c / MODEL).stat().st_size + 1),
    "weights: a link to nothing": instead(MODEL, lambda path, other: path.symlink_to("gone")),
    "weights: a pipe without a writer": instead(MODEL, lambda path, other: os.mkfifo(path)),
    "weights: a folder": instead(MODEL, lambda path, other: path.mkdir()),
    "folder of weights deleted": lambda c, other: shutil.rmtree(c / "deepspeed"),
    "all files deleted": lambda c, other: [shutil.rmtree(c), c.mkdir()],
    "a link to another checkpoint": lambda c, other: [shutil.rmtree(c), c.symlink_to(other.resolve())],
    "a copy of another checkpoint": lambda c, other: [shutil.rmtree(c), shutil.copytree(other, c)],
    "a link to nothing": lambda c, other: [shutil.rmtree(c), c.symlink_to("gone")],
    "a file by a checkpoint's name": lambda c, other: [shutil.rmtree(c), c.write_bytes(b"")],
}
NO_FOLDER = ("a link to nothing", "a file by a checkpoint's name")  # which is passed over in silence

# What leaves a checkpoint as good as it was.
HARMLESS: dict[str, Damage] = {
    "legacy manifest (version 1)": as_legacy(),
    "stray files and folders beside it": lambda c, other: [
        (c / "notes.txt").write_text("mine"),
        (c / "tmp").mkdir(),
    ],
    "moved elsewhere, a link in its place": lambda c, other: c.symlink_to(
        shutil.move(c, c.parents[1] / "moved")
    ),
}


def spoilt(name: str, spoil: Callable[[Path], object], codes: tuple[int, ...], said: str) -> Inject:
    """A file of the run is damaged: the start ends with a line that says so, until it is repaired."""

    def inject(drill: Drill) -> None:
        path, kept = drill.run / name, drill.run.with_name("kept")  # an empty name is the folder itself
        path.rename(kept)
        try:
            spoil(path)
            code = drill.launch("launch.max_restarts=0").wait(120)
            if code not in codes or said not in drill.text() or "Traceback" in drill.text():
                raise Unnoticed(f"a start ended with {code}:\n{drill.text()[-2000:]}")
        finally:
            delete(path)
            kept.rename(path)

    return inject


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# What the next start refuses, until it is repaired.
REFUSED: dict[str, Inject] = {
    "config.yaml is no text": spoilt(
        "config.yaml", lambda path: path.write_bytes(b"\xff{["), (2,), "config.yaml is no config"
    ),
    "`.lock` is a link": spoilt(
        ".lock", lambda path: path.symlink_to("nothing"), (2,), ".lock is a symbolic link: delete it"
    ),
    "`.lock` is a folder": spoilt(".lock", Path.mkdir, (2,), "can't be written (Is a directory)"),
    "metrics.jsonl is a folder": spoilt("metrics.jsonl", Path.mkdir, (1,), "metrics.jsonl"),
    "train.log is a folder": spoilt("train.log", Path.mkdir, (1,), "train.log"),
    "checkpoints is a file": spoilt("checkpoints", Path.touch, (2,), "can't be written"),
}


def append(name: str, content: bytes) -> Callable[[Path], object]:
    def spoil(run: Path) -> None:
        with (run / name).open("ab") as file:
            file.write(content)

    return spoil


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def spoil(run: Path) -> None:
        delete(run / name)
        make(run / name)

    return spoil


# What the next start goes on in spite of; all at once.
OUTLIVED: dict[str, Callable[[Path], object]] = {
    "config.yaml is a link to nothing": replaced("config.yaml", lambda path: path.symlink_to("nothing")),
    "environment.json is no JSON": replaced("environment.json", lambda path: path.write_bytes(b"\xff")),
    "plan.json is empty": replaced("plan.json", Path.touch),
    "metrics.jsonl ends with zeros, as after a power cut": append("metrics.jsonl", bytes(4096)),
    "train.log ends with bytes that are no text": append("train.log", bytes(range(256))),
    "logs of the other ranks deleted": lambda run: shutil.rmtree(run / "logs"),
    "starts is a file": replaced("starts", Path.touch),
    "an export of a later step": lambda run: (run / "hf" / "step-9999999").mkdir(parents=True),
}
