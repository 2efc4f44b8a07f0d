"""Sources of documents: parquet and JSON-lines files, Hub datasets, the text of Python's standard library.

A `Source` can be opened any number of times, at any position it has been read to, and yields the same
documents in the same order each time.
"""

import hashlib
import importlib.metadata
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fla_train.data.config import DataConfig
from fla_train.data.files import (
    CHUNK_BYTES,
    Chunk,
    Cursor,
    Document,
    TextChunk,
    describe_files,
    find_files,
    guarded,
    make_document,
    read_files,
    reading,
    require_column,
    text_bytes,
)
from fla_train.utils.errors import Interrupted

# A stream that 5.0.0 has resumed saves a wrong state: documents are lost from the second resume on.
_FORBIDDEN_DATASETS = ("5.0.0",)
REMEDY = "check data.path, data.name, data.split and the network, or point data.path at a local copy"


@dataclass(frozen=True)
class Source:
    """A corpus to read.

    Attributes:
        description: JSON-able identity; two sources with equal descriptions hold the same text.
        total: returns the approximate size; None while it is unknown, perhaps until the corpus is opened.
        chunks: opens the corpus and yields it in its fixed order, from a chunk's `after` or the beginning.
        unit: what `total` counts: "B", bytes of text, or "doc", documents.
    """

    description: dict[str, Any]
    total: Callable[[], int | None]
    chunks: Callable[[Cursor | None], Iterator[Chunk]]
    unit: str = "B"

    def documents(self) -> Iterator[Document]:
        """All documents in order."""
        for chunk in self.chunks(None):
            yield from chunk.documents()


def open_source(config: DataConfig, commit: str | None = None) -> Source:
    """The source that `config` names.

    Args:
        commit: of the Hub dataset to read, whatever `data.revision` points to by now; None: the one it points
            to when the source is first opened.

    Raises:
        ValueError: if it does not exist or lacks the text column; reading raises it too, for corrupt input.
    """
    match config.source:
        case "stdlib":
            return _stdlib()
        case "local":
            return _local(config)
        case "hub":
            return _hub(config, commit)
    raise ValueError(f"data.source={config.source} is none of stdlib, local, hub")


def _stdlib() -> Source:
    """The standard library of the running Python."""
    root = Path(sysconfig.get_path("stdlib"))
    documents: list[Document] = []
    digest = hashlib.sha256()
    for path in sorted(_own_modules(root)):
        name = path.relative_to(root).as_posix()
        content = path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:  # a few of the library's tests are broken on purpose
            continue
        documents.append({"text": text, "id": name})
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(content)
    if not documents:
        raise ValueError(
            f"no .py files in {root}; install Python's standard library as sources, or use data=local"
        )
    description = {"kind": "stdlib", "files": len(documents), "sha256": digest.hexdigest()}

    def chunks(start: Cursor | None) -> Iterator[TextChunk]:
        first = 0 if start is None else start["document"]
        return _gathered(iter(documents[first:]), lambda read: {"document": first + read})

    size = sum(len(d["text"]) for d in documents)
    return Source(description, lambda: size, chunks)


def _own_modules(root: Path) -> Iterator[Path]:
    """The Python files of the standard library. Installed packages, perhaps many more, lie in its folder."""
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if not ("site-packages" in name or "dist-packages" in name)]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _gathered(documents: Iterator[Document], after: Callable[[int], Cursor]) -> Iterator[TextChunk]:
    """Chunks of parsed documents; `after(n)` is the position behind the first n of them."""
    texts: list[Document] = []
    size = read = 0
    for read, document in enumerate(documents, start=1):
        texts.append(document)
        size += len(document["text"])
        if size >= CHUNK_BYTES:
            yield TextChunk(texts, after(read))
            texts, size = [], 0
    if texts:
        yield TextChunk(texts, after(read))


def _local(config: DataConfig) -> Source:
    assert config.path
    files = find_files(config.path)
    description = {"kind": "local", "text_column": config.text_column, "files": describe_files(files)}
    return Source(
        description,
        cache(lambda: text_bytes([f for _, f in files], config.text_column)),
        lambda start: read_files(files, config.text_column, config.id_column, config.max_line_bytes, start),
    )


def is_on_hub(config: DataConfig) -> bool:
    """Whether the text is a dataset on the Hub, and no local folder of the same layout."""
    return config.source == "hub" and not Path(str(config.path)).expanduser().is_dir()


def hub_commit(config: DataConfig) -> str:
    """The commit that `data.revision` of the dataset points to now.

    Raises:
        ValueError: the Hub has no such dataset or revision, or not for this user.
        Interrupted: the Hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    with reading(_where(config), REMEDY, Interrupted, (RepositoryNotFoundError, RevisionNotFoundError)):
        return HfApi().dataset_info(config.path, revision=config.revision).sha


def _hub(config: DataConfig, commit: str | None) -> Source:
    assert config.path
    if (version := importlib.metadata.version("datasets")) in _FORBIDDEN_DATASETS:
        raise ValueError(
            f"datasets {version} resumes streams at wrong places; install datasets>=4.3 other than {version}"
        )
    description = {
        "kind": "hub",
        "path": config.path,
        "name": config.name,
        "revision": config.revision,
        "split": config.split,
        "text_column": config.text_column,
    }
    if not is_on_hub(config):  # a local mirror is identified by its content, not by its path
        # All files that `datasets` reads, without the card, which changes more often than the data.
        found = find_files(config.path, ("",), follow=False)
        files = [(name, file) for name, file in found if name != "README.md"]
        description |= {"path": None, "files": describe_files(files)}

    @cache  # so that a tokenizer is trained on the same commit that is then tokenized
    def find_commit() -> str | None:
        return (commit or hub_commit(config)) if is_on_hub(config) else None

    counted: int | None = None

    def opened(info: Any) -> None:
        nonlocal counted
        if is_on_hub(config):  # a folder may hold only a part of the documents that its card counts
            counted = getattr((info.splits or {}).get(config.split), "num_examples", None)

    return Source(
        description, lambda: counted, lambda start: _stream(config, start, find_commit, opened), "doc"
    )


def _where(config: DataConfig) -> str:
    return f"dataset {config.path}" + (f" ({config.name})" if config.name else "") + f", split {config.split}"


def _stream(
    config: DataConfig,
    start: Cursor | None,
    find_commit: Callable[[], str | None],
    opened: Callable[[Any], None],
) -> Iterator[TextChunk]:
    """Stream by `datasets`. A cursor is the stream's `state_dict`, the rows before it, and the Hub's commit.

    So a resumed preparation reads the same files, whatever the branch points to by then.

    Args:
        opened: called with the `DatasetInfo` before the first row is read.
    """
    import datasets

    where = _where(config)
    error = Interrupted if is_on_hub(config) else ValueError
    stream: datasets.IterableDataset
    first = 0 if start is None else start["row"]
    commit: str | None = None if start is None else start.get("commit")  # None: a folder

    def open_stream() -> datasets.IterableDataset:
        path = config.path if is_on_hub(config) else str(Path(config.path).expanduser())
        stream = datasets.load_dataset(
            path, name=config.name, split=config.split, revision=commit, streaming=True
        )
        opened(stream.info)
        if stream.features is not None and config.text_column in stream.features:
            present = [c for c in (config.text_column, config.id_column) if c in stream.features]
            stream = stream.select_columns(list(dict.fromkeys(present)))
        if start is not None:
            stream.load_state_dict(start["stream"])
        return stream

    def documents() -> Iterator[Document]:
        nonlocal commit, stream
        commit = commit or find_commit()
        with reading(where, REMEDY, error, (ValueError,)):  # an unknown configuration or split
            stream = open_stream()
        for row, record in enumerate(guarded(stream, where, REMEDY, error), start=first):
            require_column(where, config.text_column, record)
            place = f"{where}, row {row}"
            yield make_document(
                record[config.text_column], record.get(config.id_column), place, config.text_column
            )

    def after(read: int) -> Cursor:
        return {"row": first + read, "stream": stream.state_dict(), "commit": commit}

    return _gathered(documents(), after)
