"""xLSTM of transformers on rows that fill no whole chunks: padded, where the class takes tokens in turn.

In mode `inference`, the one for rows of any length, the class computes whole chunks at once (of 64 tokens,
unless `chunk_size` says otherwise). Each token behind them costs some twenty operations a layer.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.xlstm.modeling_xlstm import xLSTMOutput

FEW = 8  # tokens behind the last whole chunk that take no longer in turn than a padded chunk


class WholeChunks:
    """Mixin in front of the backbone. No token sees a later one, so padding at the end changes no output."""

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> xLSTMOutput:
        """The class's own forward, of rows padded to whole chunks where it need not leave a state."""
        stateless = inputs.get("cache_params") is None and not inputs.get("use_cache")
        outputs_only = not (inputs.get("output_hidden_states") or self.config.output_hidden_states)
        if input_ids is None or not (stateless and outputs_only):
            return super().forward(input_ids=input_ids, **inputs)
        length, size = input_ids.shape[1], self.config.chunk_size
        missing = -length % size if length % size > FEW else 0
        outputs = super().forward(input_ids=F.pad(input_ids, (0, missing)), **inputs)
        outputs["last_hidden_state"] = outputs["last_hidden_state"][:, :length]
        return outputs


def take_whole_chunks(model: PreTrainedModel) -> None:
    """Give the backbone of an xLSTM model `WholeChunks`."""
    kind = type(model.backbone)
    model.backbone.__class__ = type(kind.__name__, (WholeChunks, kind), {"__module__": kind.__module__})
