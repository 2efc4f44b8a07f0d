"""Results of single sets and tasks on disk: an interrupted evaluation resumes after the last one."""

import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fla_train.data.files import describe_files
from fla_train.eval.parallel import ALONE, Ranks
from fla_train.eval.result import EvalResult, Measurements
from fla_train.utils.filesystem import write_whole
from fla_train.utils.safe_files import find_json


@dataclass(frozen=True)
class EvalJob:
    """One set or task to measure.

    Attributes:
        section: `perplexity`, `needle`, `tasks` or `expressivity`.
        name: of the set or task, in errors and in the name of its file.
        settings: everything that the result depends on besides the checkpoint. Plain JSON.
        work: measures it. All ranks call it together.
    """

    section: str
    name: str
    settings: dict[str, Any]
    work: Callable[[], Measurements]


def run_eval_jobs(
    jobs: Iterable[EvalJob], result: EvalResult, folder: Path, identity: dict[str, Any], ranks: Ranks = ALONE
) -> None:
    """Add what each job measures to `result`, or its error. A user error of one rank ends the job on all.

    Args:
        jobs: in the order of the report.
        result: is changed.
        folder: gets one JSON file for each finished job. It is used again for an equal request only.
        identity: what all jobs have in common: checkpoint, files, dtype, versions. Plain JSON.
        ranks: that evaluate together; rank 0 reads and writes the files.
    """
    for job in jobs:
        file = folder / (re.sub(r"[^\w.-]", "_", f"{job.section}-{job.name}") + ".json")
        request = json.loads(json.dumps(identity | {"job": [job.section, job.name]} | job.settings))
        try:
            with ranks.together():
                content = find_json(file) if ranks.rank == 0 else None
                kept = ranks.share(content["result"] if content and content["request"] == request else None)
                measured = job.work() if kept is None else Measurements.from_json(kept)
                if kept is None and ranks.rank == 0:
                    folder.mkdir(parents=True, exist_ok=True)
                    write_whole(file, json.dumps({"request": request, "result": asdict(measured)}))
                result.add(measured)
        except ValueError as failure:
            result.errors[job.name] = str(failure)


def describe_code(target: type) -> list[dict[str, Any]]:
    """Return the identity of the file that defines a class: edited code has other results."""
    return describe_files([(target.__name__, Path(inspect.getfile(target)))])
