"""Results of single sets and tasks on disk: an interrupted evaluation resumes after the last one."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fla_train.eval.parallel import ALONE, Ranks
from fla_train.eval.result import EvalResult, Measured
from fla_train.utils.filesystem import write_whole
from fla_train.utils.safe_files import read_json


@dataclass(frozen=True)
class Job:
    """One set or task to measure.

    Attributes:
        section: `perplexity`, `needle` or `tasks`.
        name: of the set or task, in errors and in the name of its file.
        settings: everything that the result depends on besides the checkpoint. Plain JSON.
        work: measures it. All ranks call it together.
    """

    section: str
    name: str
    settings: dict[str, Any]
    work: Callable[[], Measured]


class ResultCache:
    """A folder with one JSON file for each finished job. A result is used again for an equal request only.

    Args:
        folder: made when the first result is written.
        identity: what all results have in common: the checkpoint, its files, the dtype. Plain JSON.
        ranks: that evaluate together; rank 0 reads and writes the files.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], ranks: Ranks = ALONE) -> None:
        self.folder = folder
        self.identity = identity
        self.ranks = ranks

    def run(self, job: Job) -> Measured:
        """Return the result of the job, from disk if an equal one has finished. A failure is not kept."""
        file = self.folder / (re.sub(r"[^\w.-]", "_", f"{job.section}-{job.name}") + ".json")
        request = json.loads(json.dumps(self.identity | {"job": [job.section, job.name]} | job.settings))
        kept = self.ranks.share(_read(file, request) if self.ranks.rank == 0 else None)
        if kept is not None:
            return Measured.from_json(kept)
        measured = job.work()
        if self.ranks.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps({"request": request, "result": asdict(measured)}))
        return measured


def run_jobs(jobs: Iterable[Job], cache: ResultCache, result: EvalResult) -> None:
    """Add what each job measures to `result`, or its error. A user error of one rank ends the job on all."""
    for job in jobs:
        try:
            with cache.ranks.together():
                result.add(cache.run(job))
        except ValueError as failure:
            result.errors[job.name] = str(failure)


def _read(file: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of this request, or None if the file is missing, damaged or of another request."""
    try:
        content = read_json(file)
    except (FileNotFoundError, ValueError):
        return None
    return content["result"] if content["request"] == request else None
