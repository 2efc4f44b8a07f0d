"""Held-out documents as token ids: the validation split of a run, or files with FineWeb's columns."""

import hashlib
import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fla_train.data.cache import PreparedData, open_prepared
from fla_train.data.config import DataConfig
from fla_train.data.prepare import prepare
from fla_train.data.shards import Shard
from fla_train.data.sources import open_source
from fla_train.data.tokenize import batches
from fla_train.data.tokenizers import encode
from fla_train.hub.saved_config import kept_tokenizer, read_saved
from fla_train.utils.safe_files import find_json

# Without a number of sequences, they have the longest length of which there are at least this many.
LEAST_SEQUENCES = 32
# 4 bytes for a token; a Python list takes 36.
TOKEN = np.dtype("<u4")
# The documents of a sequence in order: (number of the document, its first token in the sequence).
Spans = tuple[tuple[int, int], ...]


def run_data(run: Path | None, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """Return the prepared data that a run was trained on, prepared again if the cache lost it.

    Args:
        run: run folder.
        tokenizer: of the model.

    Raises:
        ValueError: the run folder is missing, its config does not name data, or data that are prepared again
            have another tokenizer, because a bpe tokenizer is trained on text that has changed.
    """
    file = run / "config.yaml" if run else None
    saved = read_saved(file).get("data") if file and file.is_file() else None
    if saved is None:
        raise ValueError("the checkpoint has no run folder: name documents in suite.perplexity.sets=[FILE]")
    with suppress(ValueError):  # the folder of plan.json, or that of a corpus in it, is lost
        kept = open_prepared(str((find_json(run / "plan.json") or {}).get("data_folder")))
        kept.corpora()
        return kept
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), saved))
    config.tokenizer.name = kept_tokenizer(config.tokenizer.name, run)
    prepared = prepare(config, log=lambda line: None)
    if prepared.tokenizer().get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"the text of {run} has changed, so its tokenizer has: set suite.perplexity.sets")
    return prepared


def validation_documents(prepared: PreparedData) -> Iterator[np.ndarray]:
    """Yield each document of the validation split as [tokens], without its end-of-sequence token.

    The corpora of a mixture follow each other.

    Raises:
        ValueError: a shard is missing or cut short.
    """
    for corpus in prepared.corpora().values():
        manifest = corpus.manifest
        separator = int(manifest["settings"]["append_eos"])
        for number, record in enumerate(manifest["shards"]):
            shard = Shard(corpus.folder, number, record, "validation", manifest["dtype"])
            start = 0
            for end in shard.ends().tolist():
                yield shard.tokens(start, end - separator)
                start = end


def file_documents(
    path: str, tokenizer: PreTrainedTokenizerBase, text_column: str = "text"
) -> Iterator[np.ndarray]:
    """Yield each document of parquet or JSON-lines files as [tokens], without special tokens.

    Raises:
        ValueError: missing, corrupt or unreadable files, or no such column.
    """
    yield from tokenize_texts(file_texts(path, text_column, "suite.perplexity.sets"), tokenizer)


def file_texts(path: str, text_column: str, setting: str) -> Iterator[str]:
    """Yield the text of each document of parquet or JSON-lines files; errors name the key `setting`.

    Raises:
        ValueError: missing, corrupt or unreadable files, or no such column.
    """
    try:
        source = open_source(DataConfig(source="local", path=path, text_column=text_column))
        yield from source.texts()
    except ValueError as error:
        column = f"{setting.rpartition('.')[0]}.text_column"
        line = str(error).replace("data.path", setting)
        raise ValueError(line.replace("data.text_column", column)) from error
    except OSError as failure:
        raise ValueError(f"{setting}={path}: cannot be read ({failure.strerror})") from failure


def tokenize_texts(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Yield each text as [tokens], without special tokens.

    Long texts are tokenized a few at a time, because the tokenizer needs many times their size.
    """
    for batch in batches(texts, len):
        yield from (np.array(ids, dtype=TOKEN) for ids in encode(tokenizer, batch))


def longest_documents(
    documents: Iterable[np.ndarray], count: int | None, length: int, scan: int | None, progress: bool
) -> list[np.ndarray]:
    """Return the `count` longest of the first `scan` documents, [tokens] each, cut to `length + 1` tokens.

    If too many documents reach the cut, the first of them are returned. None for `count` or `scan` means all.
    """
    # Copy the tokens, because a view would keep the whole document.
    cut = (np.array(document[: length + 1], dtype=TOKEN) for document in _scanned(documents, scan, progress))
    return sorted(cut, key=len, reverse=True) if count is None else heapq.nlargest(count, cut, key=len)


def pack_documents(
    documents: Iterable[np.ndarray],
    count: int | None,
    lengths: Sequence[int],
    prefix: Sequence[int],
    scan: int | None,
    progress: bool,
    min_length: int = 1,
) -> tuple[list[np.ndarray], list[Spans]]:
    """Join the documents in order, with `prefix` between two of them, and cut them to sequences.

    `loss_table` puts `prefix` before each sequence, which then gives as many targets as the longest of
    `lengths`. Documents may begin and end anywhere in a sequence, as in training. Empty documents are left
    out. Tokens that do not fill a sequence are dropped, except that one short sequence is kept.

    Args:
        documents: token ids, [tokens] each.
        count: number of sequences; None: all that the documents fill, with the longest length of which there
            are 32; without such a length, with `min_length` or the shortest length.
        lengths: targets of a sequence.
        prefix: the separator between documents, or nothing.
        scan: most documents to read; None: all.
        progress: show a progress bar over documents.
        min_length: shortest length of sequences where `count` is None, if it is one of `lengths`.

    Returns:
        [tokens] each, and the documents in each; the separator after a document counts as its last token.
    """
    untargeted = 0 if prefix else 1  # without a prefix, the first token of a sequence is context only
    wanted = None if count is None else count * (max(lengths) + untargeted)
    tokens, starts = array("I"), []
    for document in _scanned(documents, scan, progress):
        if not len(document):
            continue
        if tokens:
            tokens.extend(prefix)
        starts.append(len(tokens))
        room = None if wanted is None else max(wanted - len(tokens), 0)
        tokens.frombytes(np.ascontiguousarray(document[:room], TOKEN).view(np.uint8))
        if wanted is not None and len(tokens) >= wanted:
            break
    if not tokens:
        return [], []
    stream = np.frombuffer(tokens, TOKEN)[:wanted]
    length = max(lengths)
    if count is None:
        reached = [n for n in lengths if len(stream) >= LEAST_SEQUENCES * (n + untargeted)]
        length = max([min_length if min_length in lengths else min(lengths), *reached])
    return _cut(stream, starts, min(length + untargeted, len(stream)))


def recut_sequences(
    sequences: Sequence[np.ndarray], spans: Sequence[Spans], size: int
) -> tuple[list[np.ndarray], list[Spans]]:
    """Cut what `pack_documents` returned to sequences of `size` tokens instead."""
    starts: dict[int, int] = {}
    for number, span in enumerate(spans):
        for document, first in span:
            starts.setdefault(document, number * len(sequences[0]) + first)
    return _cut(np.concatenate(sequences), list(starts.values()), size)


def _scanned(documents: Iterable[np.ndarray], scan: int | None, progress: bool) -> Iterable[np.ndarray]:
    return tqdm(islice(documents, scan), desc="reading documents", unit="document", disable=not progress)


def _cut(stream: np.ndarray, starts: Sequence[int], size: int) -> tuple[list[np.ndarray], list[Spans]]:
    """Return the sequences of `size` tokens, and the documents, which begin at `starts`, in each of them."""
    sequences, spans = [], []
    for begin in range(0, len(stream) - size + 1, size):
        first, end = np.searchsorted(starts, [begin, begin + size - 1], side="right")
        sequences.append(stream[begin : begin + size])
        spans.append(tuple((d, max(starts[d] - begin, 0)) for d in range(first - 1, end)))
    return sequences, spans


def stack_tokens(documents: Sequence[Sequence[int]], prefix: Sequence[int], start: int, stop: int) -> Tensor:
    """Return tokens start <= i < stop of `prefix` and each document: [D, stop - start], zero at the end."""
    ids = np.zeros((len(documents), stop - start), np.int64)
    shift = len(prefix)
    for row, document in zip(ids, documents, strict=True):
        head, tail = prefix[start:stop], document[max(start - shift, 0) : max(stop - shift, 0)]
        row[: len(head)] = head
        row[len(head) : len(head) + len(tail)] = tail
    return torch.from_numpy(ids)


def fingerprint(documents: Iterable[Sequence[int]]) -> str:
    """Return a sha256 over the tokens and the bounds of documents."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(document, dtype=TOKEN))
    return digest.hexdigest()
