"""`suite.perplexity`: loss, perplexity and bits per byte of each set, by context length and position."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from fla_train.data.files import describe_files, find_files
from fla_train.data.tokenizers import token_bytes
from fla_train.eval.config import PerplexityConfig, set_name
from fla_train.eval.documents import (
    Spans,
    file_documents,
    fingerprint,
    longest_documents,
    pack_documents,
    recut_sequences,
    run_data,
    validation_documents,
)
from fla_train.eval.intervals import Estimate
from fla_train.eval.perplexity import LossTable, bucket_edges, loss_table
from fla_train.eval.result import Curve, Measurements, Score
from fla_train.eval.result_cache import EvalJob
from fla_train.eval.session import Session
from fla_train.eval.sets import PAPER_SETS, hub_documents, mirror_folder

VALIDATION = "validation"
BUCKET = 256  # tokens of a point of the curve over positions, at most, unless the suite says otherwise
DIFFERENT_TEXT = (
    "Lengths of a set average different text. Compare models at one length; to see what a longer context "
    "does, use the curves along the positions."
)


def perplexity_jobs(session: Session, config: PerplexityConfig) -> Iterator[EvalJob]:
    """Yield a job for each of `config.sets`, or for the run's validation split if there are none.

    Raises:
        ValueError: the run's validation split cannot be read, or the model can read none of the lengths.
    """
    trained, limit = session.trained_length, session.position_limit
    if config.bucket is None:
        config = replace(config, bucket=max(1, min(BUCKET, (trained or 4 * BUCKET) // 4)))
    if config.training_length and trained:
        config = replace(config, lengths=sorted({*config.lengths, trained}))
    if limit is not None and min(config.lengths) > limit:
        raise ValueError(f"the model has positions for {limit:,} tokens only: lower suite.perplexity.lengths")
    settings = asdict(replace(config, sets=[])) | {"mirror": session.mirror}
    for path in config.sets or [None]:
        name = set_name(path) if path else VALIDATION
        if path is None:
            documents = validation_documents(run_data(session.run, session.tokenizer))
        elif path in PAPER_SETS:
            documents = hub_documents(PAPER_SETS[path], session.tokenizer, session.mirror)
        else:
            documents = file_documents(path, session.tokenizer, config.text_column)
        work = partial(_measure, session, config, name, documents)
        files = {"path": path, "files": _files(path, session.mirror)}
        yield EvalJob("perplexity", name, settings | files, work)


def _files(path: str | None, mirror: str | None) -> list[dict] | None:
    """Return sizes and times of a set's files, by which a changed set is measured again."""
    if path in PAPER_SETS:
        folder = mirror_folder(mirror)
        path = str(folder / PAPER_SETS[path].hub) if folder else None
    with suppress(ValueError, OSError):  # whoever reads the set reports missing or unreadable files
        return None if path is None else describe_files(find_files(path))


def _measure(
    session: Session, config: PerplexityConfig, name: str, stream: Iterator[np.ndarray]
) -> Measurements:
    """Measure one set: `stream` yields its documents, [tokens] each.

    Raises:
        ValueError: the set is empty, or none of its documents reaches one of the lengths.
    """
    # Read the documents. A model with a limit gets the same ones as a model without, to be compared with it.
    prefix, ranks, trained = session.prefix, session.ranks, session.trained_length
    length = max(config.lengths)
    if config.layout == "packed":
        options = {"scan": config.scan, "progress": session.progress, "min_length": trained or 1}
        documents, spans = pack_documents(stream, config.documents, config.lengths, prefix, **options)
    else:
        documents = longest_documents(stream, config.documents, length, config.scan, session.progress)
        spans = [((d, 0),) for d in range(len(documents))]
    stream.close()  # texts that were read ahead would stay in memory
    if not documents:
        raise ValueError(f"{name} is empty: give other files (suite.perplexity.sets)")
    token_sizes = token_bytes(session.tokenizer)

    def read(sequences: list[np.ndarray], spans: list[Spans], edges: tuple[int, ...]) -> LossTable:
        """Return the losses of all sequences, each of which one of the ranks reads."""
        mine = loss_table(
            session.model,
            sequences[ranks.rank :: ranks.world],
            edges,
            spans=spans[ranks.rank :: ranks.world],
            token_sizes=token_sizes,
            prefix=prefix,
            chunk=config.chunk,
            batch_size=config.batch_size,
            progress=session.progress,
        )
        return LossTable.joined(ranks.gather(mine))

    # Average up to each length. A length below that of the sequences counts their beginnings only, so the
    # training length gets a second pass over all tokens.
    limit = session.position_limit or length
    within = sorted({n for n in (*config.lengths, *config.panels) if n <= min(length, limit)})
    table = read(documents, spans, bucket_edges(within, config.bucket, config.per_octave))
    estimates = {n: estimate for n in within if (estimate := table.up_to(n))}
    size = (trained or 0) + (0 if prefix else 1)
    if config.layout == "packed" and config.documents is None and trained in estimates:
        if len(documents[0]) > size:
            estimates[trained] = read(*recut_sequences(documents, spans, size), (0, trained)).up_to(trained)
    reached = [n for n in sorted(config.lengths) if n in estimates]
    if not reached:
        raise ValueError(f"no document of {name} reaches any of suite.perplexity.lengths: lower them")

    scores = list(_scores(name, {n: estimates[n] for n in reached}, fingerprint(documents)))
    panels = sorted({max(reached), *config.panels} & estimates.keys())
    curves = [curve for n in panels for curve in _curves(table, name, n)]
    notes = [DIFFERENT_TEXT] if len(reached) > 1 else []
    if missing := [n for n in sorted(config.lengths) if n not in reached]:
        reason = f"the model has positions for {limit:,} tokens" if max(missing) > limit else "too few tokens"
        notes.append(f"{name} was not read over {', '.join(f'{n:,}' for n in missing)} tokens: {reason}.")
    return Measurements(scores, curves, notes)


def _scores(name: str, estimates: dict[int, Estimate], fingerprint: str) -> Iterator[Score]:
    """Yield loss, perplexity and bits per byte for each context length of `estimates`."""
    for length, estimate in estimates.items():
        documents = sum(count > 0 for count in estimate.targets)
        facts = {"length": length, "documents": documents, "sequences": estimate.sequences}
        facts |= {"higher_is_better": False, "fingerprint": fingerprint}
        # The documents of the loss also serve to compare perplexities and bits per byte.
        by_document = {"by_document": list(estimate.losses), "weights": list(estimate.targets)}
        for metric, value in estimate.values().items():
            more = by_document if metric == "loss" else {}
            yield Score("perplexity", name, metric, **value._asdict(), **facts, **more)


def _curves(table: LossTable, name: str, length: int) -> Iterator[Curve]:
    """Yield the curves of perplexity and bits per byte over the sequences that reach `length`."""
    points = [(start, end, e.values(), e.sequences) for start, end, e in table.by_position(length)]
    edges = [points[0][0], *(end for _, end, *_ in points)]
    for metric in ("perplexity", "bits_per_byte"):
        values = [entry[metric] for *_, entry, _ in points if metric in entry]
        if len(values) == len(points):
            columns = {key: [getattr(v, key) for v in values] for key in ("value", "low", "high")}
            yield Curve(name, metric, length, points[0][-1], edges, **columns)
