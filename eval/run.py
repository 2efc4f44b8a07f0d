"""Run an evaluation: load a checkpoint, measure each set and task of its suite, write the report."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fla_train.eval.config import EvalConfig, SuiteConfig
from fla_train.eval.expressivity import expressivity_jobs, trained_task
from fla_train.eval.figures import draw_figures
from fla_train.eval.needle import needle_jobs
from fla_train.eval.parallel import ALONE, Ranks
from fla_train.eval.perplexity_sweep import perplexity_jobs
from fla_train.eval.result import EvalResult, find_result, unique
from fla_train.eval.result_cache import EvalJob, describe_code, run_eval_jobs
from fla_train.eval.session import Session
from fla_train.eval.sets import mirror_folder
from fla_train.eval.tables import write_tables
from fla_train.hub.checkpoint_config import resolve_checkpoint
from fla_train.hub.load import load_causal_lm, load_model, recorded_length, trained_length
from fla_train.hub.paths import last_component, run_folder
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.flops import count_parameters
from fla_train.utils.device import pick_device, pick_dtype
from fla_train.utils.environment import describe_environment
from fla_train.utils.import_class import import_object
from fla_train.utils.keys import require_valid
from fla_train.utils.locks import open_lock, try_lock

FEW = 30  # documents below which a note calls standard errors rough


def evaluate(config: EvalConfig, progress: bool = True, ranks: Ranks = ALONE) -> tuple[Path, EvalResult]:
    """Run `config.suite` on `config.checkpoint` and write the report.

    Sets and tasks that an earlier call finished in the same `output`, with the same version, checkpoint and
    settings, are read from there.

    Args:
        config: the request.
        progress: show progress bars.
        ranks: that evaluate together.

    Returns:
        The folder of the report and the result. Other ranks than 0 have only some of the scores.

    Raises:
        ValueError: the request cannot work, or another evaluation writes to the same output.
        KeyboardInterrupt: with the folder as its argument.
    """
    started = time.time()
    # Find wrong requests before the model is loaded.
    require_valid(config)
    mirror_folder(config.mirror)
    if config.output:
        check_output(Path(config.output).expanduser())
    with ranks.together():
        source = resolve_checkpoint(config.checkpoint)
        model, tokenizer = _load(config, source, ranks.device(config.device))
    folder = ranks.share(output_folder(config, source))  # its name has the time in it
    run, dtype = run_folder(source), str(model.dtype).removeprefix("torch.")
    length, progress = recorded_length(model), progress and ranks.rank == 0
    session = Session(model, tokenizer, run, length, config.mirror, ranks, progress)
    window = _task_window(session, config.suite) if config.suite.tasks else None
    result = EvalResult(
        name=f"{run.name}/{last_component(source)}" if run else str(config.checkpoint),
        checkpoint=str(source),
        files=_checkpoint_files(source, model),
        model={
            "type": model.config.model_type,
            "parameters": count_parameters(model).total,
            "positions": session.position_limit,
        },
        trained_length=length,
        window=window,
        suite=asdict(config.suite),
        environment=describe_environment(str(model.device)) | {"dtype": dtype},
    )
    # A `mixer` in the config of another library's model is not ours, and must not choose an import.
    mixer = model.config.mixer if isinstance(model.config, DeltaProductConfig) else None
    code = mixer and describe_code(import_object(mixer))
    identity = {"checkpoint": result.checkpoint, "files": result.files, "dtype": dtype, "mixer": code}
    identity["versions"] = result.environment["fla_train"], result.environment["packages"]["lm-eval"]
    try:
        with ExitStack() as held:
            with ranks.together():
                check_output(folder)
                _check_checkpoint(folder, result, run)
                if ranks.rank == 0:
                    held.enter_context(output_lock(folder))
            jobs = _jobs(session, config, result, folder)
            run_eval_jobs(jobs, result, folder / "parts", identity, ranks)
            if few := unique(score.data for score in result.scores if score.documents < FEW):
                names = ", ".join(few)
                result.notes.append(f"Fewer than {FEW} documents, so standard errors are rough: {names}.")
            result.seconds = round(time.time() - started, 1)
            if ranks.rank == 0:
                result.save(folder / "results.json")
                write_tables(folder, [result])
                draw_figures(folder, [result])
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(str(folder)) from stop
    return folder, result


def _load(
    config: EvalConfig, source: Path | str, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load the model in eval mode, and its tokenizer unless the suite is a task's, which needs none."""
    arguments = source, pick_device(device), pick_dtype(config.dtype)
    options = {"mixer": config.mixer, "trust_remote_code": config.trust_remote_code}
    if config.suite.expressivity is None:
        return load_model(*arguments, **options)
    return load_causal_lm(*arguments, **options), None


def _task_window(session: Session, suite: SuiteConfig) -> int:
    """Return the tokens of prompt and answer in tasks of lm-eval.

    Raises:
        ValueError: the model has fewer positions than `suite.max_length`.
    """
    limit = session.position_limit
    if limit is not None and (suite.max_length or 0) > limit:
        raise ValueError(f"suite.max_length={suite.max_length}: the model has {limit:,} positions only")
    length = session.trained_length or trained_length(session.model)
    return suite.max_length or min(length, limit or length)


def _jobs(session: Session, config: EvalConfig, result: EvalResult, folder: Path) -> list[EvalJob]:
    """Return the jobs of the suite, after every check that needs no work."""
    suite, jobs = config.suite, []
    if suite.expressivity is not None:
        permitted = suite.expressivity.task
        task = trained_task(session.model, result.checkpoint, permitted, config.trust_remote_code)
        jobs += expressivity_jobs(session, suite.expressivity, task)
    if suite.perplexity is not None:
        jobs += perplexity_jobs(session, suite.perplexity)
    if suite.needle is not None:
        jobs += needle_jobs(session, suite.needle)
    if suite.tasks:
        from fla_train.eval.harness import FlaTrainLM, task_jobs  # lm-eval takes seconds to import

        options = {"max_length": result.window, "batch_size": suite.batch_size, "ranks": session.ranks}
        samples = folder / "samples" if suite.save_samples else None
        lm = FlaTrainLM(session.model, session.tokenizer, **options)
        jobs += task_jobs(lm, suite, mirror=session.mirror, samples=samples)
    return jobs


def write_comparison(folder: Path, places: Sequence[str | Path]) -> None:
    """Write tables and figures of finished evaluations side by side. Places tell equal names apart.

    Args:
        folder: made if it does not exist.
        places: folders of evaluations, or run folders, whose newest evaluation counts. The first one is the
            reference.

    Raises:
        ValueError: fewer than two places, no evaluation in one, or a folder that cannot be written to.
    """
    if len(places) < 2:
        raise ValueError("give at least two evaluations to compare")
    check_output(folder)
    results = [find_result(place) for place in places]
    names = [result.name for result in results]
    for result, place in zip(results, places, strict=True):
        if names.count(result.name) > 1:
            result.name = f"{result.name} ({place})"
    with output_lock(folder):
        write_tables(folder, results)
        draw_figures(folder, results)


def output_folder(config: EvalConfig, source: Path | str) -> Path:
    """Return `config.output`, else a new folder named by suite and time, if possible in the run folder."""
    if config.output:
        return Path(config.output).expanduser()
    run = run_folder(source)
    home = run / "eval" if run else Path("evaluations") / last_component(source)
    return home / f"{config.suite.name}-{datetime.now():%Y%m%d-%H%M%S}"


def check_output(folder: Path) -> None:
    """Check that results can be written to `folder`; nothing is created.

    Raises:
        ValueError: it is not writable, or holds a run, a checkpoint or a model.
    """
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{parent} is not a folder that can be written to: give another output")
    if any((folder / name).is_file() for name in ("config.yaml", "config.json", "manifest.json")):
        raise ValueError(f"{folder} holds a run, a checkpoint or a model: give a new folder")


def _check_checkpoint(folder: Path, result: EvalResult, run: Path | None) -> None:
    """Check that the results in `folder` are of the same model, or of an earlier export of the same run."""
    try:
        earlier = EvalResult.load(folder / "results.json")
    except (OSError, ValueError):
        return
    same_run = run is not None and Path(earlier.checkpoint).resolve().is_relative_to(run.resolve())
    if not same_run and earlier.checkpoint != result.checkpoint and earlier.files != result.files:
        other = f"{earlier.checkpoint}, not of {result.checkpoint}"
        raise ValueError(f"{folder} holds results of {other}: give another output")


@contextmanager
def output_lock(folder: Path) -> Iterator[None]:
    """Hold the right to write to `folder`, which is made if it does not exist.

    Raises:
        ValueError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open_lock(folder / ".lock") as file:
        if not try_lock(file.fileno()):
            raise ValueError(f"another evaluation writes {folder}: wait for it or give another output")
        yield  # closing the file, or the end of the process, releases the lock


def _checkpoint_files(source: Path | str, model: PreTrainedModel) -> list:
    """Return name, size and time of each file that results depend on, or the commit on the Hub."""
    if isinstance(source, str):
        return [getattr(model.config, "_commit_hash", None)]
    files = sorted(f for f in source.iterdir() if f.is_file() and f.suffix not in (".md", ".png"))
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
