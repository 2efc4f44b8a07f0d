"""One evaluation: load a checkpoint, run the suite part by part, write the report."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig, set_name, suite_faults
from fla_train.eval.documents import file_documents, longest, run_data, validation_documents
from fla_train.eval.paper import paper_row
from fla_train.eval.perplexity import Estimate, bucket_edges, loss_table
from fla_train.eval.report import write_report
from fla_train.hub.device import pick_device, pick_dtype
from fla_train.hub.environment import describe_environment
from fla_train.hub.load import document_prefix, load_model, resolve_checkpoint, run_folder, trained_length
from fla_train.models.accounting import count_parameters

VALIDATION = "validation"


def evaluate(config: EvalConfig, progress: bool = True) -> tuple[Path, dict]:
    """Run `config.suite` on `config.checkpoint` and write results.json, table.md and the figures.

    Parts that a former call finished into the same `output` with the same checkpoint and settings are not run
    again.

    Returns:
        The evaluation's folder and what results.json holds.

    Raises:
        ValueError: the request cannot work; says what to change.
    """
    if not config.checkpoint:
        raise ValueError(
            "give checkpoint=RUN: a run folder, an exported folder, or a Hub name such as user/model"
        )
    if faults := suite_faults(config.suite):
        raise ValueError("\n  ".join(faults))
    source = resolve_checkpoint(config.checkpoint)
    device = pick_device(config.device)
    model, tokenizer = load_model(source, device, pick_dtype(config.dtype))
    folder = Path(config.output).expanduser() if config.output else _default_folder(source, config.suite.name)
    started, count = time.time(), count_parameters(model)
    record = {
        "checkpoint": str(source),
        "model": {
            "type": model.config.model_type,
            "parameters": count.total,
            "parameters_embedding_once": count.embedding_once,
        },
        "trained_length": trained_length(model),
        "suite": asdict(config.suite),
        "mirror": config.mirror,
        "perplexity": {},
        "tasks": {},
        "paper_row": {},
        "environment": {**describe_environment(device), "dtype": str(model.dtype).removeprefix("torch.")},
    }
    parts = Parts(
        folder / "parts",
        {"checkpoint": str(source), "weights": _weights_stamp(source), "dtype": str(model.dtype)},
    )
    if config.suite.perplexity is not None:
        run = run_folder(source)
        record["perplexity"] = _perplexity(model, tokenizer, config.suite.perplexity, run, parts, progress)
    if config.suite.tasks:
        record["tasks"] = _tasks(model, tokenizer, config.suite, config.mirror, parts)
        record["paper_row"] = paper_row(record["tasks"])
    record["seconds"] = round(time.time() - started, 1)
    write_report(folder, record)
    return folder, record


class Parts:
    """Finished parts of an evaluation on disk: one JSON file each, used again only for the same request."""

    def __init__(self, folder: Path, identity: dict) -> None:
        self.folder = folder
        self.identity = identity

    def __call__(self, name: str, settings: dict, work: Callable[[], dict]) -> dict:
        """The result of `work()`, or of the earlier call with equal `settings`; a failure is not kept."""
        file = self.folder / (re.sub(r"[^\w.-]", "_", name) + ".json")
        request = json.loads(json.dumps(self.identity | {"part": name} | settings))
        if file.is_file():
            kept = json.loads(file.read_text())
            if kept["request"] == request:
                return kept["result"]
        result = work()
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".writing")
        aside.write_text(json.dumps({"request": request, "result": result}))
        aside.replace(file)
        return result


def _perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: PerplexityConfig,
    run: Path | None,
    parts: Parts,
    progress: bool,
) -> dict[str, dict]:
    """By set: the sweep over lengths and the curve over positions, as plain numbers."""
    edges, longest_length = bucket_edges(config.lengths, config.bucket), max(config.lengths)
    prefix = document_prefix(model, tokenizer)

    def sweep(path: str | None) -> dict:
        stream = (
            validation_documents(run_data(run))
            if path is None
            else file_documents(path, tokenizer, config.text_column)
        )
        documents = longest(stream, config.documents, longest_length, config.scan, progress)
        table = loss_table(
            model,
            documents,
            edges,
            prefix=prefix,
            chunk=config.chunk,
            batch_size=config.batch_size,
            progress=progress,
        )
        found = {length: table.up_to(length) for length in sorted(config.lengths)}
        reached = [length for length, estimate in found.items() if estimate]
        if not reached:
            raise ValueError(
                f"no document of {path or 'the validation split'} has {min(config.lengths)} tokens: "
                "lower suite.perplexity.lengths"
            )
        return {
            "lengths": [{"length": length, **_numbers(found[length])} for length in reached],
            "positions": [
                {"start": a, "end": b, **_numbers(e)} for a, b, e in table.by_position(max(reached))
            ],
            "not_reached": [length for length in found if length not in reached],
        }

    sets = {set_name(path): path for path in config.sets} or {VALIDATION: None}
    settings = {key: value for key, value in asdict(config).items() if key != "sets"}
    return {
        name: parts(f"perplexity-{name}", settings | {"path": path}, lambda path=path: sweep(path))
        for name, path in sets.items()
    }


def _numbers(estimate: Estimate) -> dict:
    low, high = estimate.interval or (None, None)
    return asdict(estimate) | {"perplexity": estimate.perplexity, "low": low, "high": high}


def _tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    suite: SuiteConfig,
    mirror: str | None,
    parts: Parts,
) -> dict:
    from fla_train.eval.harness import FlaTrainLM, run_tasks  # lm-eval takes seconds to import

    lm = FlaTrainLM(model, tokenizer, max_length=suite.max_length, batch_size=suite.batch_size)
    settings = {key: getattr(suite, key) for key in ("include_path", "num_fewshot", "limit", "max_length")}
    settings["mirror"] = mirror
    return run_tasks(
        lm,
        suite.tasks,
        include_path=suite.include_path,
        mirror=mirror,
        num_fewshot=suite.num_fewshot,
        limit=suite.limit,
        part=lambda name, work: parts(name, settings, work),
    )


def _default_folder(source: Path | str, suite: str) -> Path:
    run = run_folder(source)
    home = run / "eval" if run else Path("evaluations") / Path(source).name
    return home / f"{suite}-{datetime.now():%Y%m%d-%H%M%S}"


def _weights_stamp(source: Path | str) -> list:
    """Name, size and time of each weights file: a checkpoint that was written again is another one."""
    files = sorted(Path(source).glob("*.safetensors")) if isinstance(source, Path) else []
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
