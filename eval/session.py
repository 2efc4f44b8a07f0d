"""The model under evaluation, and what all of its sets and tasks need."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fla_train.eval.parallel import ALONE, Ranks
from fla_train.hub.load import document_prefix

# Rows of OPT's and BART's tables before the first position.
SKIPPED_ROWS = 2


@dataclass(frozen=True)
class Session:
    """One model for all sets and tasks of an evaluation.

    Attributes:
        model: in eval mode.
        tokenizer: of the model; None for `suite.expressivity`.
        run: run folder of the checkpoint, if there is one.
        trained_length: tokens of a training sequence, None if not known.
        mirror: folder with local copies of data sets, see `local_datasets`; None: the Hub or its cache.
        ranks: share the sequences.
        progress: show progress bars.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    run: Path | None = None
    trained_length: int | None = None
    mirror: str | None = None
    ranks: Ranks = ALONE
    progress: bool = False

    @cached_property
    def prefix(self) -> list[int]:
        """Return the token before a document, or nothing."""
        return document_prefix(self.model, self.tokenizer)

    @cached_property
    def position_limit(self) -> int | None:
        """Return how many tokens the model can read, or None without a limit."""
        return position_limit(self.model)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return how many tokens `model` can read, or None without a limit (recurrent states, rotary angles).

    `max_position_embeddings` alone does not decide, since rotary models declare it but have no limit. A model
    has a limit if it holds a table with a row for each of these positions: an embedding besides that of the
    tokens (GPT-2, OPT), or a fixed buffer (CTRL, GPT-J). MPT builds attention biases for `max_seq_len`
    tokens.
    """
    if model.config.model_type == "mpt":
        return model.config.max_seq_len
    declared = getattr(model.config, "max_position_embeddings", None)
    if not declared:
        return None
    tokens = model.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not tokens:
            if 0 <= module.num_embeddings - declared <= SKIPPED_ROWS:
                return declared
        elif any(buffer.dim() == 2 and len(buffer) == declared for buffer in module.buffers(recurse=False)):
            return declared
    return None
