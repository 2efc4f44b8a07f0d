"""checksums.json of an exported folder: write it, and find files that are missing, cut short or changed."""

import json
import math
import os
from pathlib import Path
from typing import Any

from fla_train.utils.filesystem import describe, find_damage
from fla_train.utils.safe_files import read_json

CARD = "README.md"  # has no checksum, because people edit it
CHECKSUMS = "checksums.json"
REMEDY = f"export or download it again (if you changed it yourself, delete {CHECKSUMS})"


def visible_files(folder: Path) -> list[str]:
    """List the files of an export, including subfolders, relative to it. Hidden files do not belong to it.

    Raises:
        ValueError: a link leaves the export, so its target must not be copied or published.
    """
    root = folder.resolve()
    # In the Hub's cache the files of snapshots/COMMIT are links to blobs.
    allowed = (root, root.parent.parent / "blobs")
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_symlink() and (path.is_dir() or not any(map(path.resolve().is_relative_to, allowed))):
            raise ValueError(f"{path} is a link to {os.readlink(path)}: replace it by a copy of its target")
        if path.is_file():
            names.append(name.as_posix())
    return names


def write_checksums(folder: Path) -> None:
    """Write size and sha256 of every file in `folder` except the card. Keep the entries of listed files."""
    known = exported_files(folder)
    names = [name for name in visible_files(folder) if name not in (CHECKSUMS, CARD)]
    files = {name: known.get(name) or describe(folder / name) for name in names}
    (folder / CHECKSUMS).write_text(json.dumps({"files": files}, indent=2) + "\n")


def exported_files(folder: Path) -> dict[str, Any]:
    """Return what checksums.json lists, name -> size and sha256; empty if it cannot be read."""
    try:
        files = read_json(folder / CHECKSUMS)["files"]
        return {name: {key: entry[key] for key in ("bytes", "sha256")} for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def find_export_damage(folder: Path, *, hashed_bytes: float = math.inf) -> str | None:
    """Describe the first file that is missing, cut short or changed; None if all are intact.

    A folder without checksums.json comes from another program and is not checked.

    Args:
        hashed_bytes: compare the checksums of files up to this size, and only the sizes of larger files.
    """
    if not (folder / CHECKSUMS).is_file():
        return None
    files = exported_files(folder)
    return find_damage(folder, files, hashed_bytes=hashed_bytes) if files else f"{CHECKSUMS} is damaged"
