"""Memory of a sweep: 4 bytes for a token, and nothing for text that was cut off."""

import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fla_train.eval.documents import TOKEN, fingerprint, longest, packed
from fla_train.eval.perplexity import loss_table

VOCABULARY = 512


class Still:
    """A uniform model without memory, so that only the sweep uses memory."""

    dtype = torch.float32

    def get_input_embeddings(self) -> SimpleNamespace:
        return SimpleNamespace(weight=torch.zeros(1))

    def __call__(self, ids: torch.Tensor, **options: object) -> SimpleNamespace:
        logits = torch.zeros(1).expand(*ids.shape, VOCABULARY)
        return SimpleNamespace(logits=logits, past_key_values="nothing to carry")


def peak(work: Callable[[], object]) -> int:
    """Bytes that Python and NumPy held at most while `work` ran."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [1_000, 400_000])  # many documents, and one that is longer than all lengths
@pytest.mark.parametrize("read", [packed, longest])
def test_a_longer_context_costs_its_tokens(size: int, read: Callable) -> None:
    """Ids are above 256, because Python shares smaller numbers; others need 36 bytes each."""
    source = (np.arange(400_000) % (VOCABULARY - 257) + 257).astype(TOKEN)
    prefix = [1]

    def sweep(length: int) -> None:
        stream = (source[start : start + size] for start in range(0, len(source), size))
        if read is packed:
            documents, spans = packed(stream, 1, [length], prefix, scan=10**6, progress=False)
        else:
            documents, spans = longest(stream, 1, length, scan=10**6, progress=False), None
        fingerprint(documents)
        table = loss_table(Still(), documents, (0, length), spans=spans, prefix=prefix, chunk=1000)
        assert read is longest or table.up_to(length).sequences == 1

    sweep(1000)  # imports and the like
    short, long = peak(lambda: sweep(50_000)), peak(lambda: sweep(300_000))
    assert (long - short) / 250_000 < 5
