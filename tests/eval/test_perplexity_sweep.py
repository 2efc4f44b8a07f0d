"""The chunked sweep against one fp64 pass over each document, and its statistics against `statistics`."""

import math

import numpy as np
import pytest
import torch

from fla_train.eval import perplexity
from fla_train.eval.documents import pack_documents
from fla_train.eval.perplexity import LossTable, bucket_edges, loss_table
from tests.eval.conftest import token_losses

EDGES = (0, 8, 16, 32, 64)
LENGTHS = [70, 64, 33, 20, 8, 7, 1, 0]


@pytest.fixture
def documents() -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(3, 320, size=length).tolist() for length in LENGTHS]


def direct(model, documents: list[list[int]], prefix: list[int]) -> list[np.ndarray]:
    """Loss of each target by one forward over the whole document."""
    rows = [[*prefix, *document] for document in documents]
    return [token_losses(model, ids) if len(ids) > 1 else np.zeros(0) for ids in rows]


@pytest.mark.parametrize(("chunk", "batch_size"), [(1000, 1), (64, 3), (7, 2), (1, 8)])
@pytest.mark.parametrize("prefix", [[2], []])
def test_equals_a_single_pass_whatever_the_chunk(model, documents, chunk, batch_size, prefix) -> None:
    model.double()
    table = loss_table(model, documents, EDGES, prefix=prefix, chunk=chunk, batch_size=batch_size)
    for row, losses in zip(table.cells[0], direct(model, documents, prefix), strict=True):
        for found, a, b in zip(row, EDGES, EDGES[1:], strict=False):
            if len(losses) >= b:
                assert found == pytest.approx(losses[a:b].sum(), abs=1e-9)
            else:
                assert math.isnan(found)


def test_losses_are_counted_by_document(model) -> None:
    """Documents that begin and end anywhere in the sequences: by a loop over single targets."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(3, 320, size=n) for n in (40, 3, 30, 1, 25, 60)]
    token_sizes = draw.integers(0, 5, size=320)
    for prefix in ([2], []):
        sequences, spans = pack_documents(iter(documents), None, [32], prefix, None, False)
        stream = [t for d in documents for t in (*d, *prefix)]  # the separator ends a document
        owner = [i for i, d in enumerate(documents) for _ in (*d, *prefix)]
        table = loss_table(
            model.double(),
            sequences,
            (0, 8, 32),
            spans=spans,
            prefix=prefix,
            token_sizes=token_sizes,
            chunk=10,
        )
        sums, targets, sizes = np.zeros(6), np.zeros(6), np.zeros(6)
        for number, losses in enumerate(direct(model, [s.tolist() for s in sequences], prefix)):
            for i, loss in enumerate(losses[:8]):
                at = number * len(sequences[0]) + i + 1 - len(prefix)
                sums[owner[at]] += loss
                targets[owner[at]] += 1
                sizes[owner[at]] += token_sizes[stream[at]]
        found = table.up_to(8)
        assert found.sequences == len(sequences) > 3
        assert found.mean.value == pytest.approx(sums.sum() / targets.sum())
        assert found.bits.value == pytest.approx(sums.sum() / math.log(2) / sizes.sum())
        seen = [i for i, count in enumerate(targets) if count]
        assert [n for n in found.targets if n] == targets[seen].tolist()
        losses = np.array(found.losses)[np.array(found.targets) > 0]
        assert losses == pytest.approx(sums[seen] / targets[seen])


def test_the_table_leaves_no_document_half_counted() -> None:
    sums = np.array([[2.0, 4.0], [6.0, np.nan]])
    cells = np.stack([sums, np.full((2, 2), 2), np.zeros((2, 2))])
    table = LossTable((0, 2, 4), cells, np.arange(2), np.arange(2))
    assert table.up_to(2).mean.value == pytest.approx(2.0)  # (2 + 6) / 2 documents / 2 targets
    assert table.up_to(4).mean.value == pytest.approx(1.5)
    assert [e.mean.value for _, _, e in table.by_position(4)] == [1.0, 2.0]


def test_batches_are_halved_when_memory_is_short(model, monkeypatch) -> None:
    """Also in the middle of a batch, whose first chunks then count once. One sequence must fit."""
    draw = np.random.default_rng(1)
    documents = [draw.integers(0, 320, size=33).tolist() for _ in range(5)]
    expected = loss_table(model.double(), documents, EDGES, chunk=8, batch_size=5)
    monkeypatch.setattr(perplexity, "find_cache_problem", lambda *args: None)  # it runs extra forward passes
    forward, most, sizes = model.forward, 2, []

    def short_of_memory(ids: torch.Tensor, **options: object) -> object:
        sizes.append(len(ids))
        if len(ids) > most and sizes.count(len(ids)) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(ids, **options)

    monkeypatch.setattr(model, "forward", short_of_memory)
    found = loss_table(model, documents, EDGES, chunk=8, batch_size=5)
    assert found.cells == pytest.approx(expected.cells, abs=1e-9, nan_ok=True)
    assert sizes[:4] == [5, 5, 2, 2]
    most = 0
    with pytest.raises(ValueError, match=r"8.*suite\.perplexity\.chunk"):
        loss_table(model, documents, EDGES, chunk=8, batch_size=5)


def test_edges() -> None:
    assert bucket_edges([10, 35], 10) == (0, 10, 20, 30, 35)
    assert bucket_edges([100], 1000) == (0, 100)
    assert bucket_edges([64, 40], 4, per_octave=2) == (0, 4, 8, 12, 16, 24, 32, 40, 48, 64)
    million = bucket_edges([2**20], 512, per_octave=8)
    assert (
        million[-1] == 2**20 and len(million) == 1 + 16 + 8 * 7
    )  # 512 wide up to 8,192, then eight an octave
