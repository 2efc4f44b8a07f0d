"""Open prepared data as datasets for training and validation: a corpus, a mixture or a stream."""

from pathlib import Path

from fla_train.data.cache import open_prepared
from fla_train.data.contiguous import ContiguousDataset
from fla_train.data.dataset import TokenDataset
from fla_train.data.mixture import Dataset, MixtureDataset
from fla_train.data.stream import StreamDataset


def open_train(folder: str | Path, seq_len: int, seed: int) -> Dataset:
    """Open the training sequences of prepared data.

    Raises:
        ValueError: a manifest is corrupt, or no sequence fits.
    """
    prepared = open_prepared(folder)
    if prepared.manifest.get("stream"):
        return StreamDataset(folder, seq_len)
    datasets = [TokenDataset(corpus.folder, "train", seq_len, seed) for corpus in prepared.corpora().values()]
    if "parts" not in prepared.manifest:
        return datasets[0]
    return MixtureDataset(datasets, list(prepared.shares().values()))


def open_contiguous(
    folder: str | Path, seq_len: int, seed: int, rows: int, *, document_boundaries: bool
) -> ContiguousDataset:
    """Open the training sequences in `rows` rows, each of which continues from step to step.

    Raises:
        ValueError: as `open_train`, or there are more rows than text.
    """
    prepared = open_prepared(folder)
    datasets = [TokenDataset(corpus.folder, "train", seq_len) for corpus in prepared.corpora().values()]
    shares = list(prepared.shares().values())
    return ContiguousDataset(datasets, shares, rows, seed, packed=document_boundaries)


def open_validation(folder: str | Path, seq_len: int) -> dict[str, tuple[TokenDataset, float]]:
    """Return {corpus: its validation sequences and weight}, in the order of the mixture; weights add up to 1.

    A corpus whose split has no whole sequence is left out. A single corpus has the name "".
    """
    prepared = open_prepared(folder)
    shares = prepared.shares()
    datasets = {
        name: (TokenDataset(corpus.folder, "validation", seq_len), shares[name])
        for name, corpus in prepared.corpora().items()
        if corpus.manifest["splits"]["validation"]["tokens"] >= seq_len
    }
    whole = sum(share for _, share in datasets.values())
    return {name: (dataset, share / whole) for name, (dataset, share) in datasets.items()}
