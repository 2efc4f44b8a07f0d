"""Sources of documents: parquet and JSON-lines files, Hub datasets, the text of Python's standard library.

A `Source` yields the same slices with the same documents each time it is read.
"""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from fla_train.data import files
from fla_train.data.config import DataConfig
from fla_train.data.files import Slice, TextSlice, reading
from fla_train.utils.errors import Interrupted

REMEDY = "check data.path, data.name, data.split and the network, or point data.path at a local copy"


@dataclass(frozen=True)
class Source:
    """A corpus to read.

    Attributes:
        description: JSON-able identity; two sources with equal descriptions hold the same text.
        size: of all slices together, in the unit of `Slice.size`; None for streams.
        slices: yields the slices in order. The argument has the records of the first shards, which are
            complete: a stream continues behind them and yields None in their place.
    """

    description: dict[str, Any]
    size: int | None
    slices: Callable[[Sequence[dict[str, Any]]], Iterator[Slice | None]]

    def texts(self) -> Iterator[str]:
        """Yield the text of each document in order."""
        for piece in self.slices(()):
            yield from (text for text, _ in piece.texts())


def open_source(config: DataConfig, commit: str | None = None) -> Source:
    """Return the source that `config` names.

    Args:
        commit: of the Hub dataset, whatever `data.revision` points to by now.

    Raises:
        ValueError: it does not exist. Reading raises it too, for invalid input.
    """
    match config.source:
        case "stdlib":
            return _stdlib(config)
        case "local":
            named = files.find_files(config.path)
            identities = files.describe_files(named)
            description = {"kind": "local", "text_column": config.text_column, "files": identities}
            size = sum(identity["bytes"] for identity in identities)
            return Source(description, size, lambda done: files.cut_files(config, named, identities))
    assert config.source == "hub"
    return _hub(config, commit)


def _stdlib(config: DataConfig) -> Source:
    """Open the standard library of the running Python."""
    root = Path(sysconfig.get_path("stdlib"))
    texts, names, digest = [], [], hashlib.sha256()
    for path in sorted(_standard_modules(root)):
        name, content = path.relative_to(root).as_posix(), path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:  # a few of the library's tests are broken on purpose
            continue
        texts.append(text)
        names.append(name)
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(content)
    description = {"kind": "stdlib", "files": len(texts), "sha256": digest.hexdigest()}

    def slices(done: Sequence[dict[str, Any]]) -> Iterator[TextSlice]:
        for first, stop in files.cut(map(len, texts), config.shard_bytes):
            size = sum(map(len, texts[first:stop]))
            yield TextSlice(config, [description, first, stop], size, texts[first:stop], names[first:stop])

    return Source(description, sum(map(len, texts)), slices)


def _standard_modules(root: Path) -> Iterator[Path]:
    """Yield the Python files of the standard library. Its folder may also hold installed packages."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not ("site-packages" in name or "dist-packages" in name)]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def is_on_hub(config: DataConfig) -> bool:
    """Return whether the text is a dataset on the Hub, and not a local folder of the same layout."""
    return config.source == "hub" and not Path(str(config.path)).expanduser().is_dir()


def hub_commit(config: DataConfig) -> str:
    """Return the commit that `data.revision` of the dataset points to now.

    Raises:
        ValueError: the Hub has no such dataset or revision, or not for this user.
        Interrupted: the Hub does not answer.
    """
    with reading(_where(config), REMEDY, Interrupted, (RepositoryNotFoundError, RevisionNotFoundError)):
        return HfApi().dataset_info(config.path, revision=config.revision).sha


def _where(config: DataConfig) -> str:
    return f"dataset {config.path}" + (f" ({config.name})" if config.name else "") + f", split {config.split}"


def _hub(config: DataConfig, commit: str | None) -> Source:
    """Open a dataset on the Hub at a commit, or a local folder of the same layout."""
    keys = ("path", "name", "revision", "split", "text_column")
    description = {"kind": "hub"} | {key: getattr(config, key) for key in keys}
    if not is_on_hub(config):
        # A local copy is identified by what `datasets` reads: all files but the card, and no linked folders.
        named = files.find_files(config.path, ("",), follow=False)
        named = [(name, file) for name, file in named if name != "README.md"]
        description |= {"path": None, "files": files.describe_files(named)}
        commit = None
    return Source(description, None, lambda done: _stream(config, commit, done))


def _stream(
    config: DataConfig, commit: str | None, done: Sequence[dict[str, Any]]
) -> Iterator[TextSlice | None]:
    """Yield None for each finished shard, then slices of what `datasets` streams behind the last of them.

    A record's `after` is the `state_dict` from which the stream continues.
    """
    where, column = _where(config), config.text_column
    error = Interrupted if is_on_hub(config) else ValueError
    yield from [None] * len(done)
    with reading(where, REMEDY, error, (ValueError,)):  # an unknown configuration or split
        path = config.path if is_on_hub(config) else str(Path(config.path).expanduser())
        # Import it here: it takes a second, and only sources on the Hub need it.
        import datasets

        options = {"name": config.name, "split": config.split, "revision": commit}
        stream = datasets.load_dataset(path, **options, streaming=True)
        if stream.features is not None and column in stream.features:
            stream = stream.select_columns([column])
        if done:
            stream.load_state_dict(done[-1]["after"])
        rows = iter(stream)
    first_row = sum(record["documents"] for record in done)
    while True:
        values, names, size = [], [], 0
        while size < config.shard_bytes:
            with reading(where, REMEDY, error):
                row = next(rows, None)
            if row is None:
                break
            names.append(f"{where}, row {first_row + len(values)}")
            files.require_column(names[-1], column, row)
            values.append(row[column])
            size += len(row[column]) if isinstance(row[column], str) else 0
        if not values:
            return
        yield TextSlice(config, [commit, first_row], size, values, names, after=stream.state_dict())
        first_row += len(values)
