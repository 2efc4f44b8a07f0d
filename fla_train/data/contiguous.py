"""Contiguous order of the training sequences: row r of a step continues row r of the step before."""

import numpy as np
import torch

from fla_train.data.dataset import TokenDataset
from fla_train.data.mixture import turns
from fla_train.data.sampler import Batch, pack
from fla_train.utils.permutation import permute


class ContiguousDataset:
    """Sequence i belongs to row i % rows, and follows sequence i - rows in the text unless the row jumps.

    The text of a part is shared out evenly among its rows, each of which reads its share in order and begins
    the next epoch elsewhere: an epoch has a seeded first position, and goes round the end of the text.

    Args:
        parts: in the order of their text (`seed=None`).
        shares: rows of each part, of the sum of shares, as evenly as `MixtureDataset` shares out sequences.
        rows: sequences per optimizer step.
        document_boundaries: return packed batches, and continue no document with another one.

    Raises:
        ValueError: a part gets no row, or a row no sequence.
    """

    def __init__(
        self, parts: list[TokenDataset], shares: list[int], rows: int, seed: int, *, document_boundaries: bool
    ):
        self._parts, self._rows, self._seed, self._packed = parts, rows, seed, document_boundaries
        self._part = np.resize(turns(shares), rows)  # of each row
        self._number = np.empty_like(self._part)  # of each row among those of its part
        self._lengths = np.empty(len(parts), dtype=np.int64)  # sequences of a row in an epoch
        for number, part in enumerate(parts):
            mine = self._part == number
            count = int(mine.sum())
            self._number[mine] = np.arange(count)
            self._lengths[number] = len(part) // count if count else 0
            if not self._lengths[number]:
                short = f"data.contiguous: {len(part)} sequences of {part.folder} for {count} rows"
                raise ValueError(f"{short}: lower trainer.global_batch_tokens or trainer.seq_len")

    def __len__(self) -> int:
        """Return the number of sequences until one part has been read once, except a rest below its rows."""
        return int(self._lengths.min()) * self._rows

    def places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each sequence's part, its position there, and whether it continues the row's last one."""
        steps, rows = np.divmod(np.asarray(indices, dtype=np.int64), self._rows)
        parts = self._part[rows]
        epochs, within = np.divmod(steps, self._lengths[parts])
        positions = self._number[rows] * self._lengths[parts] + within
        for part, epoch in {*zip(parts.tolist(), epochs.tolist(), strict=True)}:
            chosen = (parts == part) & (epochs == epoch)
            size = len(self._parts[part])
            first = permute(np.zeros(1, dtype=np.int64), size, self._seed, epoch)
            positions[chosen] = (positions[chosen] + first) % size
        return parts, positions, (within > 0) & (positions > 0)

    def sequences(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices` (int64, >= 0) as one micro-batch, with `continues`."""
        parts, positions, continues = self.places(indices)
        read = [(self._parts[part], np.array([at])) for part, at in zip(parts, positions, strict=True)]
        ids = torch.cat([part.sequences(at) for part, at in read])
        if not self._packed:
            return Batch(ids, ids, continues=torch.from_numpy(continues))
        batch = pack(ids, [part.boundaries(at)[0] for part, at in read])
        first = np.array([part.begins_document(at)[0] for part, at in read])
        return batch._replace(continues=torch.from_numpy(continues & ~first))
