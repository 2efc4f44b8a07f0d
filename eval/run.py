"""Run an evaluation: load a checkpoint, run its suite, write the report."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fla_train.eval.compare import flat_metrics
from fla_train.eval.config import EvalConfig, SuiteConfig
from fla_train.eval.likelihood import position_limit
from fla_train.eval.mirror import mirror_folder
from fla_train.eval.needle import run_needle
from fla_train.eval.paper import paper_row
from fla_train.eval.parallel import ALONE, Ranks
from fla_train.eval.report import check_checkpoint, check_output, output_lock, write_report
from fla_train.eval.result_cache import ResultCache
from fla_train.eval.sweep import run_sweep
from fla_train.hub.load import load_model, recorded_length, resolve_checkpoint, trained_length
from fla_train.hub.paths import own_name, run_folder
from fla_train.models.flops import count_parameters
from fla_train.utils.device import pick_device, pick_dtype
from fla_train.utils.environment import describe_environment
from fla_train.utils.keys import require_valid

TASK_OPTIONS = (  # of a suite, for `run_tasks`
    *("include_path", "num_fewshot", "limit", "gen_kwargs"),
    *("apply_chat_template", "system_instruction", "seed"),
)
LOG_SECONDS = 60.0  # between two lines of a progress bar in a log
DEFINITIONS = (".yaml", ".py", ".jsonl", ".parquet")  # what tasks of the user's own are made of


def evaluate(config: EvalConfig, progress: bool = True, ranks: Ranks = ALONE) -> tuple[Path, dict]:
    """Run `config.suite` on `config.checkpoint` and write the report.

    Sets and tasks that an earlier call finished in the same `output`, with the same checkpoint and settings,
    are read from there.

    Returns:
        The evaluation's folder and what results.json holds (on rank 0; the others hold a part of it).

    Raises:
        ValueError: the request cannot work, or another evaluation writes to the same output; says what to
            change.
        OSError: the disk is full or gone; finished parts are kept.
        KeyboardInterrupt: with the folder, where one was begun.
    """
    check_request(config)
    with ranks.together():
        source = resolve_checkpoint(config.checkpoint)
        model, tokenizer = load_model(
            source,
            pick_device(ranks.device(config.device)),
            pick_dtype(config.dtype),
            mixer=config.mixer,
            trust_remote_code=config.trust_remote_code,
        )
    folder = ranks.share(output_folder(config, source))  # its name has the time in it
    check_output(folder)
    identity = {"checkpoint": str(source), "files": _checkpoint_stamp(source, model)}
    check_checkpoint(folder, identity, run_folder(source))
    try:
        with ExitStack() as held:
            with ranks.together():
                if ranks.rank == 0:
                    held.enter_context(output_lock(folder))
            record = evaluate_model(
                model,
                tokenizer,
                config.suite,
                folder,
                name=_name(source),
                identity=identity,
                run=run_folder(source),
                trained=recorded_length(model),
                mirror=config.mirror,
                ranks=ranks,
                progress=progress,
            )
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(str(folder)) from stop  # whoever asked for no folder learns its name
    except OSError as failure:
        if failure.errno and failure.filename is None:  # a disk that fills up while a file is written
            failure.filename = str(folder)
        raise
    return folder, record


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    suite: SuiteConfig,
    folder: Path,
    *,
    name: str,
    identity: dict,
    run: Path | None,
    trained: int | None,
    mirror: str | None = None,
    ranks: Ranks = ALONE,
    progress: bool = True,
) -> dict:
    """Run `suite` on a loaded model and write the report to `folder`.

    Args:
        model: in eval mode; its weights are read only.
        tokenizer: of the model.
        suite: what to run; without errors (`find_errors`).
        folder: of the report; finished parts that it holds are used again if `identity` and the settings are
            the same.
        name: what tables and figures call the model.
        identity: plain JSON that tells these weights from others.
        run: run folder, whose validation split `suite.perplexity.sets=[]` means; None: there is none.
        trained: length of the training sequences (tokens), which the report marks; None: not known.
        mirror: folder of the data sets, or None for the Hub or its cache.
        ranks: that evaluate together, each with the same model.
        progress: show progress bars.

    Returns:
        What results.json holds.

    Raises:
        ValueError: the request cannot work; says what to change.
    """
    mirror_folder(mirror)  # fail before the work
    window = _window(model, suite, trained or trained_length(model)) if suite.tasks else None
    started, count = time.time(), count_parameters(model)
    dtype = str(model.dtype).removeprefix("torch.")
    cache = ResultCache(folder / "parts", identity | {"dtype": dtype}, ranks)
    progress = progress and ranks.rank == 0
    record = {
        "name": name,
        **identity,
        "model": {
            "type": model.config.model_type,
            "parameters": count.total,
            "parameters_embedding_once": count.embedding_once,
            "positions": position_limit(model),
        },
        "trained_length": trained,
        "window": window,
        "suite": asdict(suite),
        "mirror": mirror,
        "perplexity": {},
        "needle": {},
        "tasks": {},
        "paper_row": {},
        "environment": {**describe_environment(str(model.device)), "dtype": dtype},
    }
    with progress_bars(progress):
        if suite.perplexity is not None:
            record["perplexity"] = run_sweep(
                *(model, tokenizer, suite.perplexity),
                run=run,
                trained=trained,
                mirror=mirror,
                cache=cache,
                progress=progress,
            )
        if suite.needle is not None:
            record["needle"] = run_needle(model, tokenizer, suite.needle, cache=cache, progress=progress)
        if suite.tasks:
            record["tasks"] = _tasks(model, tokenizer, suite, mirror, cache, window, folder / "samples")
            record["paper_row"] = paper_row(record["tasks"])
    record["metrics"] = flat_metrics(record)
    record["seconds"] = round(time.time() - started, 1)
    if ranks.rank == 0:
        write_report(folder, record)
    return record


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Hide all progress bars in the block unless `shown`, also those of lm-eval that have no switch.

    Where there is no terminal a bar is written once a minute, and not at all if it ends within one.
    """
    plain = tqdm.__init__
    changed: dict[str, Any] = {"disable": True}
    if shown:
        names = () if sys.stderr.isatty() else ("mininterval", "maxinterval", "delay")
        changed = dict.fromkeys(names, LOG_SECONDS)

    def init(self: tqdm, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options | changed)

    tqdm.__init__ = init
    try:
        yield
    finally:
        tqdm.__init__ = plain


def _tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    suite: SuiteConfig,
    mirror: str | None,
    cache: ResultCache,
    window: int,
    samples: Path,
) -> dict:
    from fla_train.eval.harness import FlaTrainLM, run_tasks  # lm-eval takes seconds to import

    lm = FlaTrainLM(model, tokenizer, max_length=window, batch_size=suite.batch_size, ranks=cache.ranks)
    options = {key: getattr(suite, key) for key in TASK_OPTIONS}
    settings = options | {key: getattr(suite, key) for key in ("max_length", "save_samples")}
    settings |= {"mirror": mirror, "definitions": _definitions(suite.include_path)}
    return run_tasks(
        lm,
        suite.tasks,
        mirror=mirror,
        samples=samples if suite.save_samples else None,
        part=lambda name, work: cache(name, settings, work),
        **options,
    )


def _window(model: PreTrainedModel, suite: SuiteConfig, trained: int) -> int:
    """Tokens of a task's prompt and answer together: `suite.max_length`, else those of training."""
    limit = position_limit(model)
    if limit is None:
        return suite.max_length or trained
    if suite.max_length and suite.max_length > limit:
        raise ValueError(
            f"suite.max_length={suite.max_length}: the model has positions for {limit:,} tokens only"
        )
    return suite.max_length or min(trained, limit)


def check_request(config: EvalConfig) -> None:
    """Raise a ValueError if the checkpoint is missing, the suite has errors or the output cannot be one."""
    if not config.checkpoint:
        raise ValueError(
            "give checkpoint=RUN: a run folder, an exported folder, or a Hub name such as user/model"
        )
    require_valid(config.suite, "suite.")
    if config.output:
        check_output(Path(config.output).expanduser())


def output_folder(config: EvalConfig, source: Path | str) -> Path:
    """`config.output`, else a new folder named by suite and time, in the run folder if there is one."""
    if config.output:
        return Path(config.output).expanduser()
    run = run_folder(source)
    home = run / "eval" if run else Path("evaluations") / own_name(source)
    return home / f"{config.suite.name}-{datetime.now():%Y%m%d-%H%M%S}"


def _name(source: Path | str) -> str:
    """`run/step-0000100` for an export of a run, else the folder's or the Hub's name."""
    run = run_folder(source)
    if run:
        return f"{run.name}/{own_name(source)}"
    return source if isinstance(source, str) else own_name(source)


def _checkpoint_stamp(source: Path | str, model: PreTrainedModel) -> list:
    """Name, size and time of each file that results depend on, or the Hub's commit.

    New weights are another checkpoint, and so are a new tokenizer and another prefix of documents.
    """
    if isinstance(source, str):
        return [getattr(model.config, "_commit_hash", None)]
    return _stamps(f for f in source.iterdir() if f.is_file() and f.suffix not in (".md", ".png", ".py"))


def _definitions(include_path: str | None) -> list:
    """Name, size and time of the files behind tasks of the user's own: edited ones are other tasks."""
    if include_path is None:
        return []
    return _stamps(f for f in Path(include_path).rglob("*") if f.suffix in DEFINITIONS)


def _stamps(files: Iterable[Path]) -> list:
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(files)]
