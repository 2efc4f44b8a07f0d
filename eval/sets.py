"""Data sets on which the papers measure length extrapolation, read from the Hub.

The papers (DeltaProduct, section 5 and Figures 7 and 11; negative eigenvalues, Figure 3) name the sets, the
lengths (4,096, 16,384 and 32,768 tokens) and the training length, and say no more. What they leave open is
decided here: which columns make a document's text, and the split. How documents become sequences is
`fla_train.eval.documents.packed`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from fla_train.eval.documents import tokenized
from fla_train.eval.mirror import DatasetUnavailable, hub_datasets, mirror_folder, streaming_remedy


@dataclass(frozen=True)
class HubSet:
    """A data set of the Hub and how one of its rows reads as a document.

    Attributes:
        title: what figures call it.
        hub: `org/name`.
        config: configuration of the data set; None: its only one.
        split: held-out where the set has such a split.
        text: the document of a row.
    """

    title: str
    hub: str
    config: str | None
    split: str
    text: Callable[[dict[str, Any]], str]


def _problem(row: dict[str, Any]) -> str:
    return f"{row['problem']}\n{row['solution']}"


def _conversation(row: dict[str, Any]) -> str:
    return "\n".join(turn["value"] for turn in row["conversations"])


def _question(row: dict[str, Any]) -> str:
    return f"Question: {row['question']}\nAnswer: {row['answer']['value']}\n"


PAPER_SETS = {
    "codeparrot": HubSet(
        "CodeParrot", "codeparrot/codeparrot-clean-valid", None, "train", lambda row: row["content"]
    ),
    "openthoughts_math": HubSet(
        "OpenThoughts-114k-Math", "open-r1/OpenThoughts-114k-math", None, "train", _conversation
    ),
    "trivia_qa": HubSet(
        "TriviaQA", "mandarjoshi/trivia_qa", "rc.wikipedia.nocontext", "validation", _question
    ),
    "slimpajama": HubSet("SlimPajama", "cerebras/SlimPajama-627B", None, "test", lambda row: row["text"]),
    "math_hard": HubSet("MATH-Hard", "lighteval/MATH-Hard", None, "test", _problem),
}


def hub_documents(
    chosen: HubSet, tokenizer: PreTrainedTokenizerBase, mirror: str | Path | None
) -> Iterator[np.ndarray]:
    """Each document of a set of the Hub as [tokens], without special tokens, in the set's own order.

    Args:
        chosen: one of `PAPER_SETS`.
        tokenizer: of the model.
        mirror: folder with the set's files under `org/name/`, see `fla_train.eval.mirror`; None: the Hub, as
            a stream of which nothing is kept.

    Raises:
        DatasetUnavailable: when reading starts, if the set cannot be had or a row lacks its columns.
    """
    import datasets

    place = mirror_folder(mirror)
    with hub_datasets(place, streamed=True):
        rows = iter(
            datasets.load_dataset(chosen.hub, chosen.config, split=chosen.split, streaming=place is None)
        )
    try:
        yield from tokenized(map(chosen.text, rows), tokenizer)
    except Exception as failure:  # a row without its columns, or whatever the network raises
        reason = " ".join(str(failure).split())[:200]
        remedy = "lay it out again" if place else streaming_remedy(chosen.hub)
        raise DatasetUnavailable(
            f"data set {chosen.hub} cannot be read ({type(failure).__name__}: {reason}): {remedy}; or name a "
            "copy of yours in suite.perplexity.sets"
        ) from failure
