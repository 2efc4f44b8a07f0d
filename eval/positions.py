"""How far a model can read at all: models with a table of positions end where the table does."""

from torch import nn
from transformers import PreTrainedModel

SKIPPED_ROWS = 2  # that OPT, BART and their like keep before the first position


def position_limit(model: PreTrainedModel) -> int | None:
    """Tokens that `model` can read, or None if no table ends: recurrent states, computed rotary angles.

    `max_position_embeddings` alone does not tell: rotary models name it and read on. What does is a table
    with a row for each of these positions: an embedding besides that of the tokens (GPT-2, OPT, BERT), or a
    fixed buffer (CTRL, GPT-J). MPT makes its attention biases anew, for `max_seq_len` tokens.
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
                # RoBERTa counts from the row after its padding's.
                before = 0 if module.padding_idx is None else module.padding_idx + 1
                return min(declared, module.num_embeddings - before)
        elif any(buffer.dim() == 2 and len(buffer) == declared for buffer in module.buffers(recurse=False)):
            return declared
    return None
