"""Data sets of lm-eval's tasks: read from a folder that mirrors the Hub, else from the Hub or its cache."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets

from fla_train.utils.hub_names import is_hub_name


class DatasetUnavailable(ValueError):
    """A task's data set is not here, or cannot be read; one line that names it and the remedy."""


class DatasetMissing(DatasetUnavailable):
    """A data set is neither in the mirror nor in the cache nor on the Hub."""


def mirror_folder(mirror: str | Path | None) -> Path | None:
    """The folder that `mirror` names.

    Raises:
        ValueError: there is none.
    """
    place = None if mirror is None else Path(mirror).expanduser()
    if place is not None and not place.is_dir():
        raise ValueError(f"mirror={mirror} is no folder: build one with scripts/build_eval_mirror.py")
    return place


def mirror_place(mirror: Path, name: str, config: str | None = None) -> Path:
    """Where `mirror` holds the data set `name` of the Hub, or one of its configs.

    Raises:
        DatasetUnavailable: `name` is not of the form `org/name`, or `config` is no name. Neither leads out of
            the mirror.
    """
    if "/" not in name or not is_hub_name(name):
        raise DatasetUnavailable(f"{name} is no data set of the Hub: its name must be of the form org/name")
    if config in (".", "..") or set(config or "") & set("/\\\0"):
        raise DatasetUnavailable(f"{config} is no config of {name}: a name holds no separator of folders")
    return mirror / name / config if config else mirror / name


def dataset_note(mirror: Path | None, name: str, config: str | None) -> str | None:
    """What a reader must know of a mirrored data set: `NOTE.txt` beside its rows, mostly of a stand-in."""
    file = mirror and mirror_place(mirror, name, config or "default") / "NOTE.txt"
    return " ".join(file.read_text(encoding="utf-8").split()) if file and file.is_file() else None


class _Splits(datasets.DatasetDict):
    """The splits of a data set; one that it lacks is named with what to do."""

    def __init__(
        self, splits: datasets.DatasetDict, path: str, name: str | None, mirror: Path | None
    ) -> None:
        super().__init__(splits)
        self._place = mirror / path if mirror and (mirror / path).is_dir() else None
        self._wanted = _named(path, name)

    def __getitem__(self, split: Any) -> Any:
        if split in self or not isinstance(split, str):
            return super().__getitem__(split)
        filled = [name for name, rows in self.items() if len(rows)]
        remedy = "choose another in the task's definition"
        if self._place:
            remedy = f"lay its rows out in {self._place}/ (scripts/build_eval_mirror.py)"
        raise DatasetUnavailable(
            f"{self._wanted} has no split {split!r} (it has {', '.join(filled) or 'none'}): {remedy}"
        )


@contextmanager
def hub_datasets(mirror: Path | None, streamed: bool = False) -> Iterator[list[str]]:
    """Inside it `datasets.load_dataset("org/name", ...)` reads `mirror/org/name/` if that folder exists.

    The task definitions stay those of lm-eval: they ask for the Hub's names, and only the place is another.
    With a mirror the network is not used: what the mirror lacks must be in the cache of `datasets`. Names
    without a slash (`json`, ...) and paths of this machine pass untouched.

    Args:
        mirror: folder with a dataset repository per `org/name` (parquet or JSON lines, and a README.md whose
            header names the configs); None: the Hub or its cache.
        streamed: what comes from the Hub is not kept, so that no second run can do without network.

    Yields:
        The notes of the data sets that have been loaded, see `dataset_note`.

    Raises:
        DatasetUnavailable: from `load_dataset`, when a data set cannot be loaded.
    """
    load_dataset, offline = datasets.load_dataset, datasets.config.HF_HUB_OFFLINE
    notes: list[str] = []

    def load(path: str, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        found = load_splits(path, name, *args, **kwargs)
        if isinstance(found, datasets.DatasetDict):
            return _Splits(found, path, name, mirror)
        return found

    def load_splits(path: str, name: str | None, *args: Any, **kwargs: Any) -> Any:
        if "/" not in path or Path(path).exists():
            return load_dataset(path, name, *args, **kwargs)
        folder = mirror_place(mirror, path) if mirror else None
        try:
            if folder and folder.is_dir():
                if note := dataset_note(mirror, path, name):
                    notes.append(note)
                kwargs["cache_dir"] = kwargs.get("cache_dir") or str(_cache_of(folder))
                return _with_train(load_dataset(str(folder), name, *args, **kwargs))
            return load_dataset(path, name, *args, **kwargs)
        except Exception as failure:  # no such name or config, no network, a corrupt file: all end the task
            kind = DatasetUnavailable if folder and folder.is_dir() else DatasetMissing
            raise kind(_remedy(path, name, folder, streamed, failure)) from failure

    datasets.load_dataset, datasets.config.HF_HUB_OFFLINE = load, offline or mirror is not None
    try:
        yield notes
    finally:
        datasets.load_dataset, datasets.config.HF_HUB_OFFLINE = load_dataset, offline


def _cache_of(folder: Path) -> Path:
    """Where `datasets` keeps what it has read of a mirrored set, other files elsewhere.

    In one folder it tells a set from another by the last part of its path and the config's name alone: of a
    second mirror, or after the files have changed, it would give the first one's rows.
    """
    files = sorted(file for file in folder.resolve().rglob("*") if file.is_file())
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    return Path(datasets.config.HF_DATASETS_CACHE) / "mirrors" / name


def _with_train(splits: Any) -> Any:
    """Give a mirrored set without training rows an empty `train` split: lm-eval opens it even for no shots.

    Few-shot prompts from it fail, as they must.
    """
    if isinstance(splits, datasets.DatasetDict) and "train" not in splits:
        splits["train"] = next(iter(splits.values())).select([])
    return splits


def _named(path: str, name: str | None) -> str:
    return f"data set {path}" + (f" ({name})" if name else "")


def _remedy(path: str, name: str | None, folder: Path | None, streamed: bool, failure: Exception) -> str:
    wanted = _named(path, name)
    if folder is None and streamed:
        return f"{wanted} cannot be had from the Hub: {streaming_remedy(path)}"
    if folder is None:
        return (
            f"{wanted} cannot be had from the Hub or its cache: run once with network, or give mirror=FOLDER "
            f"with FOLDER/{path}/ in it (scripts/build_eval_mirror.py)"
        )
    if folder.is_dir():
        return f"{wanted} in {folder} cannot be read: {_reason(failure)}"
    run = "run" if streamed else "run once"
    return (
        f"{wanted} is neither in the mirror nor in the cache: put it into {folder}/ "
        f"(scripts/build_eval_mirror.py), or {run} with network and without mirror"
    )


def _reason(failure: BaseException) -> str:
    """What went wrong in the first place: `datasets` wraps it in lines that do not say."""
    while failure.__cause__:
        failure = failure.__cause__
    if isinstance(failure, StopIteration):
        return "it holds no rows"
    if isinstance(failure, datasets.exceptions.NonMatchingSplitsSizesError):
        return "its files have other numbers of rows than its README.md says: lay it out again"
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def streaming_remedy(path: str) -> str:
    """What to do about a set that is read from the Hub as it is needed."""
    return (
        "it is streamed and nothing of it kept, so each run needs the network, or mirror=FOLDER with "
        f"FOLDER/{path}/ in it (build one with scripts/build_eval_mirror.py)"
    )
