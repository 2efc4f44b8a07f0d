"""Data sets of the Hub: those on which the papers measure length extrapolation, and local copies of any.

The papers (DeltaProduct, section 5 and Figures 7 and 11; negative eigenvalues, Figure 3) name the sets and
the lengths (4,096, 16,384 and 32,768 tokens). They do not say which columns make a document or which split is
read: `PAPER_SETS` is our choice. `fla_train.eval.documents.pack_documents` makes sequences of the documents.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from fla_train.eval.documents import tokenize_texts
from fla_train.utils.errors import described
from fla_train.utils.hub_names import hub_or_cache, is_hub_name


@dataclass(frozen=True)
class HubSet:
    """A data set of the Hub, and the text of one of its rows.

    Attributes:
        title: name in figures.
        hub: `org/name`.
        config: configuration of the data set; None for its only one.
        split: the held-out one where the set has it.
        text: returns the document of a row.
    """

    title: str
    hub: str
    config: str | None
    split: str
    text: Callable[[dict[str, Any]], str]


def _conversation(row: dict[str, Any]) -> str:
    return "\n".join(turn["value"] for turn in row["conversations"])


_QUESTION = "Question: {question}\nAnswer: {answer[value]}\n".format_map
PAPER_SETS = {
    "codeparrot": HubSet(
        "CodeParrot", "codeparrot/codeparrot-clean-valid", None, "train", lambda row: row["content"]
    ),
    "openthoughts_math": HubSet(
        "OpenThoughts-114k-Math", "open-r1/OpenThoughts-114k-math", None, "train", _conversation
    ),
    "trivia_qa": HubSet(
        "TriviaQA", "mandarjoshi/trivia_qa", "rc.wikipedia.nocontext", "validation", _QUESTION
    ),
    "slimpajama": HubSet("SlimPajama", "cerebras/SlimPajama-627B", None, "test", lambda row: row["text"]),
    "math_hard": HubSet("MATH-Hard", "lighteval/MATH-Hard", None, "test", "{problem}\n{solution}".format_map),
}


def hub_documents(
    chosen: HubSet, tokenizer: PreTrainedTokenizerBase, mirror: str | Path | None
) -> Iterator[np.ndarray]:
    """Yield each document of a set as [tokens], without special tokens, in the set's order.

    Args:
        chosen: one of `PAPER_SETS`.
        tokenizer: of the model.
        mirror: folder with local copies, see `local_datasets`; None: a stream from the Hub, which is not
            kept.

    Raises:
        ValueError: the set cannot be read.
    """
    try:
        with local_datasets(mirror):
            rows = datasets.load_dataset(chosen.hub, chosen.config, split=chosen.split, streaming=True)
        yield from tokenize_texts(map(chosen.text, rows), tokenizer)
    except Exception as failure:  # a row without its columns, or whatever the network raises
        reason = described(failure)[:200]
        raise ValueError(f"data set {chosen.hub} cannot be read ({reason}); {remedy(mirror)}") from failure


def remedy(mirror: str | Path | None) -> str:
    """Return what to do about a data set that cannot be loaded."""
    folder = mirror or "FOLDER"
    command = f"hf download ORG/NAME --repo-type dataset --local-dir {folder}/ORG/NAME"
    return f"without network, put it into {folder}/ORG/NAME ({command}) and set mirror={folder}"


def mirror_folder(mirror: str | Path | None) -> Path | None:
    """Return the folder that `mirror` names.

    Raises:
        ValueError: it is not a folder.
    """
    folder = None if mirror is None else Path(mirror).expanduser()
    if folder is not None and not folder.is_dir():
        raise ValueError(f"mirror={mirror} is not a folder: see docs/evaluation.md, Without network")
    return folder


@contextmanager
def local_datasets(mirror: str | Path | None) -> Iterator[None]:
    """Make `datasets.load_dataset("org/name", ...)` read MIRROR/org/name where that folder exists.

    lm-eval's task definitions name data sets of the Hub, so they need no change. `hf download --local-dir`
    writes such folders: parquet or JSON lines, and a README.md whose header names the configs. With a mirror
    the Hub is never asked: what the mirror lacks must be in the cache of `datasets`.
    """
    folder = mirror_folder(mirror)
    if folder is None:
        with hub_or_cache():
            yield
        return
    original, offline = datasets.load_dataset, datasets.config.HF_HUB_OFFLINE

    def load_dataset(path: str, *args: Any, **kwargs: Any) -> Any:
        place = folder / path
        if "/" not in path or not is_hub_name(path) or not place.is_dir():
            return original(path, *args, **kwargs)
        splits = original(str(place), *args, **kwargs | {"cache_dir": str(_cache(place))})
        if isinstance(splits, datasets.DatasetDict) and "train" not in splits:
            # lm-eval opens the training split even if prompts have no examples.
            splits["train"] = next(iter(splits.values())).select([])
        return splits

    datasets.load_dataset, datasets.config.HF_HUB_OFFLINE = load_dataset, True
    try:
        yield
    finally:
        datasets.load_dataset, datasets.config.HF_HUB_OFFLINE = original, offline


def _cache(place: Path) -> Path:
    """Return a cache folder for the present files of a local set.

    `datasets` tells local sets apart by the last part of their path and their config only: after a change, or
    in a second mirror, it would return the rows that it read first.
    """
    files = sorted(file for file in place.resolve().rglob("*") if file.is_file())
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    return Path(datasets.config.HF_DATASETS_CACHE) / "mirrors" / name
