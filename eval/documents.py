"""Held-out documents as token ids: a run's own validation split, or files of FineWeb's shape."""

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fla_train.data import DataConfig, PreparedData, prepare
from fla_train.data.shards import check_sizes, documents_file, tokens_file
from fla_train.data.sources import open_source
from fla_train.data.tokenizers import encode

ENCODE_BATCH = 64


def run_data(run: Path | None) -> PreparedData:
    """The prepared data that a run was trained on, prepared again if the cache lost it.

    Raises:
        ValueError: there is no run folder, or its config names no data.
    """
    config = run / "config.yaml" if run else None
    if config is None or not config.is_file():
        raise ValueError(
            "the checkpoint lies in no run folder, so its validation split is unknown: name documents with "
            "'suite.perplexity.sets=[documents.parquet]'"
        )
    node = OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.load(config).data)
    return prepare(OmegaConf.to_object(node), log=lambda line: None, progress=False)


def validation_documents(prepared: PreparedData) -> Iterator[np.ndarray]:
    """Each document of the validation split as [tokens], without the end-of-sequence token that ends it.

    A mixture's come part by part.

    Raises:
        ValueError: a shard is missing or cut short.
    """
    for part in prepared.parts().values():
        manifest, folder = part.manifest, part.folder / "validation"
        check_sizes(part.folder, manifest, "validation")
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        separator = int(manifest["settings"]["append_eos"])
        for number in range(len(manifest["splits"]["validation"]["shards"])):
            tokens = np.memmap(folder / tokens_file(number), dtype=dtype, mode="r")
            start = 0
            for end in np.fromfile(folder / documents_file(number), dtype="<u8").tolist():
                yield tokens[start : end - separator]
                start = end


def file_documents(
    path: str, tokenizer: PreTrainedTokenizerBase, text_column: str = "text"
) -> Iterator[np.ndarray]:
    """Each document of parquet or JSON-lines files as [tokens], without special tokens.

    Raises:
        ValueError: missing or corrupt files, or no such column.
    """
    try:
        source = open_source(DataConfig(source="local", path=path, text_column=text_column))
        texts = (document["text"] for document in source.documents())
        while batch := list(islice(texts, ENCODE_BATCH)):
            yield from (np.asarray(ids, dtype=np.int64) for ids in encode(tokenizer, batch))
    except ValueError as fault:
        line = str(fault).replace("data.path", "suite.perplexity.sets")  # what these keys are called here
        raise ValueError(line.replace("data.text_column", "suite.perplexity.text_column")) from fault


def longest(
    documents: Iterable[np.ndarray], count: int, length: int, scan: int, progress: bool
) -> list[list[int]]:
    """The `count` longest of the first `scan` documents, each cut to `length + 1` tokens.

    Lengths beyond the cut do not count, so of the documents that reach it the first `count` are taken, in
    order.
    """
    scanned = tqdm(islice(documents, scan), desc="reading documents", unit="document", disable=not progress)
    cut = (document[: length + 1] for document in scanned)
    return [document.tolist() for document in heapq.nlargest(count, cut, key=len)]


def packed(
    documents: Iterable[np.ndarray],
    count: int,
    length: int,
    prefix: Sequence[int],
    scan: int,
    progress: bool,
) -> list[list[int]]:
    """The first `count` sequences of the documents joined in order, `prefix` between two of them.

    Each sequence gives `length` targets once `prefix` stands before it, as `loss_table` puts it; documents
    may begin and end anywhere in it, as in training. Empty documents are left out. What does not fill a
    sequence is dropped, unless there is no full one.

    Args:
        documents: token ids, [tokens] each.
        count: sequences wanted.
        length: targets of a sequence.
        prefix: what stands between documents: the separator, or nothing.
        scan: documents read at most.
        progress: show a progress bar over documents.
    """
    scanned = tqdm(islice(documents, scan), desc="reading documents", unit="document", disable=not progress)
    size = length if prefix else length + 1
    sequences: list[list[int]] = []
    waiting: list[int] = []
    for document in scanned:
        if not len(document):
            continue
        if sequences or waiting:
            waiting += prefix
        waiting += document.tolist()
        while len(waiting) >= size:
            sequences.append(waiting[:size])
            waiting = waiting[size:]
            if len(sequences) == count:
                return sequences
    return sequences or ([waiting] if waiting else [])


def fingerprint(documents: Iterable[Sequence[int]]) -> str:
    """sha256 over the tokens and bounds of what was evaluated: equal data, equal fingerprint."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + np.asarray(document, dtype="<u4").tobytes())
    return digest.hexdigest()
