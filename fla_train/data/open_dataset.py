"""The sequences of prepared data, whatever it is: a corpus, a mixture or a stream."""

from pathlib import Path

from fla_train.data.dataset import Sequences, TokenDataset
from fla_train.data.mixture import MixtureSequences
from fla_train.data.shards import read_manifest
from fla_train.data.stream import StreamSequences


def open_train(folder: str | Path, seq_len: int, seed: int) -> Sequences:
    """The training sequences of prepared data, of a corpus, a mixture or a stream.

    Raises:
        ValueError: a manifest is corrupt, a shard is missing or cut short, or no sequence fits.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if "head" in manifest:
        return StreamSequences(folder, seq_len)
    parts = manifest.get("parts")
    if parts is None:
        return TokenDataset(folder, "train", seq_len, seed)
    datasets: list[Sequences] = [
        TokenDataset(folder.with_name(part["fingerprint"]), "train", seq_len, seed) for part in parts
    ]
    return MixtureSequences(datasets, [part["share"] for part in parts])


def open_validation(folder: str | Path, seq_len: int) -> dict[str, tuple[TokenDataset, float]]:
    """{part: its validation sequences and weight}, in the order of the stream; weights add up to 1.

    A part whose split has no whole sequence is left out. A single corpus has one part, of name "".
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    single = {"name": "", "fingerprint": manifest.get("head", folder.name), "share": 1}
    parts = manifest.get("parts", [single])
    found = {}
    for part in parts:
        home = folder.with_name(part["fingerprint"])
        if read_manifest(home)["splits"]["validation"]["tokens"] >= seq_len:
            found[part["name"]] = TokenDataset(home, "validation", seq_len), part["share"]
    whole = sum(share for _, share in found.values())
    return {name: (dataset, share / whole) for name, (dataset, share) in found.items()}
