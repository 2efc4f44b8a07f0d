"""Perplexity of each data set at each context length and position, as plain numbers for results.json."""

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fla_train.data.files import describe_files, find_files
from fla_train.data.tokenizers import token_bytes
from fla_train.eval.config import PerplexityConfig, set_name
from fla_train.eval.documents import (
    Spans,
    file_documents,
    fingerprint,
    longest,
    packed,
    recut,
    run_data,
    validation_documents,
)
from fla_train.eval.halves import in_halves
from fla_train.eval.likelihood import position_limit
from fla_train.eval.mirror import DatasetMissing, dataset_note, mirror_folder
from fla_train.eval.parallel import Ranks
from fla_train.eval.perplexity import LossTable, bucket_edges, loss_table
from fla_train.eval.remembrance import effective_remembrance, part_sizes
from fla_train.eval.result_cache import ResultCache
from fla_train.eval.sets import PAPER_SETS, hub_documents
from fla_train.eval.states import positions_up_to, state_statistics
from fla_train.hub.load import document_prefix

VALIDATION = "validation"
BUCKET = 256  # tokens of a point of the curve over positions, at most, unless the suite says otherwise


def run_sweep(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: PerplexityConfig,
    *,
    run: Path | None,
    trained: int | None = None,
    mirror: str | None,
    cache: ResultCache,
    progress: bool,
) -> dict[str, dict]:
    """Loss against context length and position on each of `config.sets`.

    Args:
        model: in eval mode.
        tokenizer: of the model.
        config: what to read and how.
        run: run folder, whose validation split is read if `config.sets` is empty.
        trained: length of the training sequences (tokens), None if not known.
        mirror: folder with the papers' sets, or None for the Hub.
        cache: keeps finished sets; its ranks share the sequences.
        progress: show progress bars.

    Returns:
        By set `lengths`, `positions` (over the documents that reach the longest of these), `panels` (by panel
        the same over the documents that reach it), each row as `Estimate.numbers` gives it and those of
        `lengths` with `losses` and `targets` of each document (and `own_sequences` (true) where its
        sequences are not the beginnings of the others'), `not_reached`, `states` and `remembrance` (None
        unless asked for), `data` (sequences, tokens, fingerprint), `own_file` (true) where it is no set of
        the papers but a file of the user's, whatever its name, and, where the mirror has one, `note`; or
        `{"error": line}` for a set that cannot be read or has no document of the lengths asked for, with
        `missing` (true) where it is not here; the others go on.

    Raises:
        ValueError: `config.sets` is empty and there is no run whose validation split could be read, or the
            model can read none of the lengths.
    """
    if config.bucket is None:
        config = replace(config, bucket=max(1, min(BUCKET, (trained or 4 * BUCKET) // 4)))
    if config.training_length and trained:
        config = replace(config, lengths=sorted({*config.lengths, trained}))
    limit = position_limit(model)
    if limit is not None and min(config.lengths) > limit:
        raise ValueError(f"the model has positions for {limit:,} tokens only: lower suite.perplexity.lengths")
    sets = {set_name(path): path for path in config.sets} or {VALIDATION: None}
    settings = asdict(replace(config, sets=[])) | {"mirror": mirror}
    found = {}
    for name, path in sets.items():
        stream = _stream(path, tokenizer, config, run, mirror)
        try:
            with cache.ranks.together():
                found[name] = cache(
                    f"perplexity-{name}",
                    settings | {"path": path, "files": _files(path, mirror)},
                    lambda name=name, stream=stream: _sweep(
                        *(model, tokenizer, stream, name, config), trained, cache.ranks, progress
                    ),
                )
        except ValueError as failure:
            found[name] = {"error": str(failure), "missing": isinstance(failure, DatasetMissing)}
            continue
        paper = PAPER_SETS.get(path)
        if path and not paper:
            found[name]["own_file"] = True
        if paper and (note := dataset_note(mirror_folder(mirror), paper.hub, paper.config)):
            found[name]["note"] = note
    return found


def _stream(
    path: str | None,
    tokenizer: PreTrainedTokenizerBase,
    config: PerplexityConfig,
    run: Path | None,
    mirror: str | None,
) -> Generator[np.ndarray, None, None]:
    if path is None:
        return validation_documents(run_data(run))
    if path in PAPER_SETS:
        return hub_documents(PAPER_SETS[path], tokenizer, mirror)
    return file_documents(path, tokenizer, config.text_column)


def _files(path: str | None, mirror: str | None) -> list[dict] | None:
    """What tells a set's files from earlier ones of the same names; None where it is not made of files."""
    place = mirror_folder(mirror)
    if path in PAPER_SETS:
        path = str(place / PAPER_SETS[path].hub) if place else None
    with suppress(ValueError, OSError):  # none, or unreadable: whoever opens the set says so
        return None if path is None else describe_files(find_files(path))


def _sweep(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stream: Generator[np.ndarray, None, None],
    name: str,
    config: PerplexityConfig,
    trained: int | None,
    ranks: Ranks,
    progress: bool,
) -> dict:
    prefix = document_prefix(model, tokenizer)
    length, limit = max(config.lengths), position_limit(model)
    if config.layout == "packed":
        documents, spans = packed(
            *(stream, config.documents, config.lengths, prefix, config.scan, progress), least=trained or 1
        )
    else:
        documents = longest(stream, config.documents, length, config.scan, progress)
        spans = [((d, 0),) for d in range(len(documents))]
    stream.close()  # the texts that it has read ahead would stay in memory
    # The documents are those of a model without limit: so the two can be compared where both can read.
    within = [n for n in (*config.lengths, *config.panels) if n <= min(length, limit or length)]
    token_sizes = token_bytes(tokenizer)

    def read(sequences: list[np.ndarray], spans: list[Spans], edges: tuple[int, ...]) -> LossTable:
        mine = loss_table(
            model,
            sequences[ranks.rank :: ranks.world],
            edges,
            spans=spans[ranks.rank :: ranks.world],
            token_sizes=token_sizes,
            prefix=prefix,
            chunk=config.chunk,
            batch_size=config.batch_size,
            progress=progress,
        )
        return LossTable.interleaved(ranks.gather(mine))

    if name == VALIDATION and not documents:
        raise ValueError(
            "the validation split is empty: give suite.perplexity.sets=[FILE], or train with a larger "
            "data.validation_fraction"
        )
    if not documents:
        raise ValueError(f"{name} is empty: give other files (suite.perplexity.sets)")
    table = read(documents, spans, bucket_edges(within, config.bucket, config.per_octave))
    found = {n: estimate for n in sorted(within) if (estimate := table.up_to(n))}
    again = config.layout == "packed" and config.documents is None and trained in found
    own = (trained or 0) + (0 if prefix else 1)  # tokens of a sequence of the training length
    if again := again and len(documents[0]) > own:  # of long sequences only the beginnings would count
        found[trained] = read(*recut(documents, spans, own), (0, trained)).up_to(trained)
    reached = [n for n in sorted(config.lengths) if n in found]
    if not reached:
        what = "the validation split" if name == VALIDATION else name
        raise ValueError(
            f"no document of {what} has {min(config.lengths)} tokens: lower suite.perplexity.lengths"
        )
    return {
        "lengths": [
            {
                "length": n,
                **found[n].numbers(),
                "losses": list(found[n].losses),
                "targets": list(found[n].targets),
            }
            | ({"own_sequences": True} if again and n == trained else {})
            for n in reached
        ],
        "positions": _curve(table, max(reached)),
        "panels": {str(n): _curve(table, max(m for m in found if m <= n)) for n in sorted(config.panels)},
        "not_reached": [n for n in sorted(config.lengths) if n not in reached],
        "states": ranks.share(
            _states(model, documents, max(reached), prefix, config) if ranks.rank == 0 else None
        ),
        "remembrance": _remembrance(model, documents, max(reached), prefix, config, ranks),
        "data": {
            "layout": config.layout,
            "sequences": len(documents),
            "tokens": sum(map(len, documents)),
            "fingerprint": fingerprint(documents),
        },
    }


def _curve(table: LossTable, length: int) -> list[dict]:
    """A point per bucket below `length`, over all documents that reach it."""
    return [{"start": a, "end": b, **estimate.numbers()} for a, b, estimate in table.by_position(length)]


def _states(
    model: PreTrainedModel,
    documents: list[np.ndarray],
    reached: int,
    prefix: list[int],
    config: PerplexityConfig,
) -> dict | None:
    chosen = [document for document in documents if len(document) >= reached][: config.state_documents]
    if not chosen:
        return None

    def statistics(part: Sequence[np.ndarray]) -> list[dict | None]:
        return [state_statistics(model, part, positions_up_to(reached), prefix=prefix, chunk=config.chunk)]

    remedy = (
        f"the GPU's memory is too small for the states of {config.chunk} tokens at once: lower "
        "suite.perplexity.chunk, or set suite.perplexity.state_documents=0"
    )
    first, *others = parts = in_halves(statistics, chosen, remedy)
    if not others:
        return first
    weights = [part["documents"] for part in parts]
    means = {
        name: np.average([part[name] for part in parts], axis=0, weights=weights).tolist()
        for name in ("norm", "effective_rank", "beta", "decay")
        if first[name] is not None
    }
    return first | means | {"documents": len(chosen)}


def _remembrance(
    model: PreTrainedModel,
    documents: list[np.ndarray],
    reached: int,
    prefix: list[int],
    config: PerplexityConfig,
    ranks: Ranks,
) -> dict | None:
    """Mean effective remembrance over documents by size of the last part; the ranks share the documents."""
    chosen = [d[:reached] for d in documents if len(d) >= reached][: config.remembrance_documents]
    sizes = part_sizes(reached)
    if not chosen or not sizes:
        return None
    mine = effective_remembrance(
        model, chosen[ranks.rank :: ranks.world], sizes, prefix=prefix, chunk=config.chunk
    )
    found = np.concatenate(ranks.gather(mine))
    errors = found.std(0, ddof=1) / len(found) ** 0.5 if len(found) > 1 else None
    return {
        "length": reached,
        "documents": len(found),
        "sizes": sizes,
        "distance": found.mean(0).tolist(),
        "stderr": None if errors is None else errors.tolist(),
    }
