"""Contiguous order of the training sequences: row r of a step continues row r of the step before."""

import numpy as np
import torch

from fla_train.data.dataset import TokenDataset
from fla_train.data.mixture import interleave
from fla_train.data.sampler import Batch, pack
from fla_train.utils.permutation import permute


class ContiguousDataset:
    """Sequence i belongs to row i % rows, and follows sequence i - rows in the text unless the row jumps.

    The text of a dataset is divided evenly among its rows, and each row reads its share in order. Each epoch
    begins at another seeded position of the text and wraps around its end.

    Args:
        datasets: in the order of their text (`seed=None`).
        shares: of sum(shares) rows, how many read each dataset. Rows are in the order of `interleave`.
        rows: sequences per optimizer step.
        packed: return packed batches, and continue no document with another one.

    Raises:
        ValueError: a dataset gets no row, or a row no sequence.
    """

    def __init__(
        self, datasets: list[TokenDataset], shares: list[int], rows: int, seed: int, *, packed: bool
    ):
        self._datasets, self._rows, self._seed, self._packed = datasets, rows, seed, packed
        self._dataset_of_row = np.resize(interleave(shares), rows)
        # The number of each row among the rows of its dataset, and by dataset a row's sequences per epoch.
        self._row_in_dataset = np.empty_like(self._dataset_of_row)
        self._row_lengths = np.empty(len(datasets), dtype=np.int64)
        for number, dataset in enumerate(datasets):
            chosen = np.flatnonzero(self._dataset_of_row == number)
            count = len(chosen)
            self._row_in_dataset[chosen] = np.arange(count)
            self._row_lengths[number] = len(dataset) // count if count else 0
            if not self._row_lengths[number]:
                counts = f"{len(dataset)} sequences of {dataset.folder} for {count} of {rows} rows"
                remedy = f"{'lower' if count else 'raise'} trainer.global_batch_tokens"
                raise ValueError(f"data.contiguous: {counts}: {remedy}")

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each sequence's dataset, its position there, and whether it continues the row's last one.

        All are [n]: int64, int64 and bool.
        """
        steps, rows = np.divmod(np.asarray(indices, dtype=np.int64), self._rows)
        datasets = self._dataset_of_row[rows]
        epochs, steps_in_epoch = np.divmod(steps, self._row_lengths[datasets])
        positions = self._row_in_dataset[rows] * self._row_lengths[datasets] + steps_in_epoch
        # Each epoch of a dataset begins at another position and wraps around the end of the text.
        for dataset, epoch in {*zip(datasets.tolist(), epochs.tolist(), strict=True)}:
            chosen = (datasets == dataset) & (epochs == epoch)
            size = len(self._datasets[dataset])
            first = permute(np.zeros(1, dtype=np.int64), size, self._seed, epoch)
            positions[chosen] = (positions[chosen] + first) % size
        return datasets, positions, (steps_in_epoch > 0) & (positions > 0)

    def sequences(self, indices: np.ndarray) -> Batch:
        """Return the sequences `indices` (int64, >= 0) as one micro-batch, with `continues`."""
        datasets, positions, continues = self.locate(indices)
        located = [(self._datasets[i], np.array([at])) for i, at in zip(datasets, positions, strict=True)]
        ids = torch.cat([dataset.sequences(at) for dataset, at in located])
        if not self._packed:
            return Batch(ids, ids, continues=torch.from_numpy(continues))
        batch = pack(ids, [dataset.boundaries(at)[0] for dataset, at in located])
        begins = np.array([dataset.begins_document(at)[0] for dataset, at in located])
        return batch._replace(continues=torch.from_numpy(continues & ~begins))
