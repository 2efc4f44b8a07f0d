"""A prepared corpus: a complete folder and its manifest."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fla_train.data.shards import read_manifest, verify


@dataclass(frozen=True)
class PreparedData:
    """A complete folder of token shards and its manifest."""

    folder: Path
    manifest: dict[str, Any]

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.folder / "tokenizer", trust_remote_code=False)

    def parts(self) -> dict[str, "PreparedData"]:
        """What holds the shards: a mixture's parts by name, else this corpus, or a stream's head, as ""."""
        if "head" in self.manifest:
            return {"": open_prepared(self.folder.with_name(self.manifest["head"]))}
        if "parts" not in self.manifest:
            return {"": self}
        listed = self.manifest["parts"]
        return {part["name"]: open_prepared(self.folder.with_name(part["fingerprint"])) for part in listed}

    def commits(self) -> dict[str, str]:
        """{part: the Hub's commit that it holds}, of the parts that came from the Hub; "": no mixture."""
        parts = self.parts() if "parts" in self.manifest else {"": self}
        return {name: part.manifest["commit"] for name, part in parts.items() if "commit" in part.manifest}

    def verify(self) -> None:
        """Compare every shard with its checksum. Raises `ValueError` naming the first that differs."""
        for part in self.parts().values():
            verify(part.folder)

    def describe(self) -> list[str]:
        """Lines for the plan: documents, tokens, bytes per token, vocabulary."""
        tokenizer, splits = self.manifest["tokenizer"], self.manifest["splits"]
        lines = [
            f"{self.manifest['source']['kind']}, vocabulary {tokenizer['vocab_size']:,} ({tokenizer['name']})"
        ]
        if "parts" in self.manifest:
            period = sum(part["share"] for part in self.manifest["parts"])
            for part, prepared in zip(self.manifest["parts"], self.parts().values(), strict=True):
                share = f"{part['name']}: {part['share']} of {period} sequences"
                lines += [f"{share}; {line}" for line in prepared.describe()[1:]]
            return lines
        if "head" in self.manifest:
            (head,) = self.parts().values()
            return [f"stream of {lines[0]}", *(f"head: {line}" for line in head.describe()[1:])]
        for name, split in splits.items():
            if split["tokens"]:
                lines.append(
                    f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens, "
                    f"{split['text_bytes'] / split['tokens']:.2f} bytes per token, "
                    f"unigram entropy {split['unigram_entropy']:.3f} nats per token"
                )
            else:
                lines.append(f"{name}: empty")
        return lines


def open_prepared(folder: str | Path) -> PreparedData:
    """An existing prepared folder. Raises `ValueError` if it is none or its manifest is corrupt."""
    return PreparedData(Path(folder), read_manifest(Path(folder)))
