"""xLSTM of transformers on rows that fill no whole number of chunks: they are padded.

In mode `inference`, the one for rows of any length, the class computes whole chunks at once (of 64 tokens,
unless `chunk_size` says otherwise), and then loops over the tokens that are left, sixty operations for each
token and layer.
"""

from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.xlstm.modeling_xlstm import xLSTMOutput

# Tokens left that the loop takes. A padded chunk has fewer operations than the loop over 3 tokens, and takes
# as long as that over 24 on a CPU core (32 rows, 64 channels).
FEW = 8


class WholeChunks:
    """Mixin in front of the backbone. No token sees a later one: padding changes outputs by rounding only."""

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> xLSTMOutput:
        """The class's own forward. Rows are padded where the caller gives ids and use_cache=False alone."""
        given = {name for name, value in inputs.items() if value is not None}
        alone = input_ids is not None and given == {"use_cache"} and not inputs["use_cache"]
        if not alone or self.config.output_hidden_states:  # a state, or all layers' outputs, would show it
            return super().forward(input_ids=input_ids, **inputs)
        length, size = input_ids.shape[1], self.config.chunk_size
        missing = -length % size if length % size > FEW else 0
        outputs = super().forward(input_ids=F.pad(input_ids, (0, missing)), use_cache=False)
        outputs["last_hidden_state"] = outputs["last_hidden_state"][:, :length]
        return outputs


def take_whole_chunks(model: PreTrainedModel) -> None:
    """Give the backbone of an xLSTM model `WholeChunks`."""
    model.backbone.__class__ = _with_whole_chunks(type(model.backbone))


@cache
def _with_whole_chunks(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    return type(kind.__name__, (WholeChunks, kind), {"__module__": kind.__module__})
