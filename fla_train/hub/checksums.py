"""checksums.json of an exported folder: write it, and find files that are missing, cut short or changed."""

import json
import math
import os
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from safetensors import SafetensorError, safe_open

from fla_train.hub.published_card import CARD
from fla_train.utils.filesystem import describe, find_damage
from fla_train.utils.safe_files import parse_json, read_json

CHECKSUMS = "checksums.json"
EDITED = (CARD,)  # which is for people to edit
REMEDY = f"export or download it again (after a change of your own, delete {CHECKSUMS})"


def visible_files(folder: Path) -> list[str]:
    """Return the files of an export, those in folders too, relative to it; hidden ones are not part of it.

    Raises:
        ValueError: one is a link that leaves the export, whose content must not be copied or published.
    """
    root = folder.resolve()
    # The Hub's cache keeps the files of snapshots/COMMIT in blobs.
    allowed = (root, root.parent.parent / "blobs")
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_symlink() and (path.is_dir() or not any(map(path.resolve().is_relative_to, allowed))):
            raise ValueError(f"{path} is a link to {os.readlink(path)}: put there what it leads to")
        if path.is_file():
            names.append(name.as_posix())
    return names


def write_checksums(folder: Path) -> None:
    """Write size and sha256 of every file in `folder` but the card; a file that is listed keeps its entry."""
    known = exported_files(folder)
    names = [name for name in visible_files(folder) if name not in (CHECKSUMS, *EDITED)]
    files = {name: known.get(name) or describe(folder / name) for name in names}
    (folder / CHECKSUMS).write_text(json.dumps({"files": files}, indent=2) + "\n")


def exported_files(folder: Path) -> dict[str, Any]:
    """What checksums.json of an export lists: name -> size and sha256; nothing where it can't be read."""
    try:
        return listed_files((folder / CHECKSUMS).read_bytes())
    except OSError:
        return {}


def listed_files(content: bytes) -> dict[str, Any]:
    """`exported_files` by the content of checksums.json."""
    try:
        return dict(parse_json(content, CHECKSUMS)["files"])
    except (ValueError, KeyError, TypeError):
        return {}


def find_export_damage(folder: Path, *, hashed_bytes: float = math.inf) -> str | None:
    """The first file of an export that is missing, cut short or changed, and how; None if there is none.

    Of an export without checksums.json, as earlier versions wrote it, only the weights' lengths are checked.

    Args:
        hashed_bytes: of files up to this size compare sizes and checksums; of larger ones the sizes only.
    """
    if not (folder / CHECKSUMS).is_file():
        return _find_cut_weights(folder)
    try:
        files = dict(read_json(folder / CHECKSUMS)["files"])
        return find_damage(folder, files, hashed_bytes=hashed_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
        return f"{CHECKSUMS} is damaged ({type(failure).__name__})"


def _find_cut_weights(folder: Path) -> str | None:
    """Compare the length of safetensors files with what their headers say; find the end of torch's files."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and not any(folder.glob("*.bin")):
        return "model.safetensors is missing"
    for file in weights:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as failure:
            return f"{file.name} is damaged or cut short ({' '.join(str(failure).split())})"
    for file in sorted(folder.glob("pytorch_model*.bin")):
        with file.open("rb") as stream:
            pickled = stream.read(1) == b"\x80"  # by torch before 1.6; later it wrote zip files
        if not (pickled or is_zipfile(file)):
            return f"{file.name} is damaged, cut short or a pointer of Git LFS"
    return None
