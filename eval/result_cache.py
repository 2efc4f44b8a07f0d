"""Cache of finished results on disk: an evaluation that was interrupted resumes after the last one."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from fla_train.eval.parallel import ALONE, Ranks
from fla_train.utils.filesystem import write_whole
from fla_train.utils.safe_files import read_json


class ResultCache:
    """One JSON file per finished set or task, used again only for the same request.

    Args:
        folder: where the files are; made when the first result is written.
        identity: what all results have in common: the checkpoint, its weights, the dtype. Plain JSON.
        ranks: that call together; rank 0 reads and writes the files.
    """

    def __init__(self, folder: Path, identity: dict, ranks: Ranks = ALONE) -> None:
        self.folder = folder
        self.identity = identity
        self.ranks = ranks

    def __call__(self, name: str, settings: dict, work: Callable[[], dict]) -> dict:
        """The result of `work()`, or of the earlier call with equal `settings`; a failure is not kept."""
        file = self.folder / (re.sub(r"[^\w.-]", "_", name) + ".json")
        request = json.loads(json.dumps(self.identity | {"part": name} | settings))
        kept = self.ranks.share(_kept(file, request) if self.ranks.rank == 0 else None)
        if kept is not None:
            return kept
        result = work()
        if self.ranks.rank:
            return result
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"request": request, "result": result}))
        return result


def _kept(file: Path, request: dict) -> dict | None:
    """The result that the file holds of this request. None if there is none, or the file is damaged."""
    try:
        content = read_json(file)
    except (FileNotFoundError, ValueError):
        return None
    return content["result"] if content["request"] == request else None
