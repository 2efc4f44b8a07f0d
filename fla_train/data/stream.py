"""Streaming dataset: train while the text is tokenized, in the order of the source.

Sequence i holds tokens [i T, (i + 1) T) of the training documents. There is no shuffle. The next epoch begins
again with sequence 0; a shorter tail is left out.

- The first rank of each machine tokenizes in a thread, a bounded number of tokens ahead of its requests, and
  writes shards as a preparation does. All ranks read the shards as they are completed.
- Shards depend on the text alone, so a resumed run reads the same tokens, on any number of ranks.
- Shards stay in the cache: the next epoch, and the next run, read them without tokenizing.
"""

import json
import threading
import time
from pathlib import Path

import numpy as np

from fla_train.data.cache import digest, open_prepared
from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.data.dataset import TokenDataset, TokenStream
from fla_train.data.shards import read_record
from fla_train.data.sources import Source, open_source
from fla_train.data.tokenize import make_encoder, tokenize_source
from fla_train.utils.filesystem import write_whole
from fla_train.utils.ranks import is_first_on_machine

AHEAD = 1 << 24  # tokens to tokenize ahead of the requests; more than a global batch
END = "end.json"  # number of shards of a whole epoch, once it is known
_POLL_SECONDS = 0.05


class StreamDataset(TokenDataset):
    """The sequences of a stream.

    Args:
        folder: of a stream (`prepare` with `data.stream=true`).

    Raises:
        ValueError: while reading: the text is invalid, or has changed since the stream was prepared.
    """

    def __init__(self, folder: str | Path, seq_len: int):
        self.folder, self.seq_len = Path(folder), seq_len
        self._prepared = open_prepared(self.folder)
        manifest = self._prepared.manifest
        # The folder is named after the text. A bpe tokenizer may differ with the version of tokenizers.
        fingerprint, size = manifest["tokenizer"]["fingerprint"], manifest["settings"]["shard_bytes"]
        self._shards = self.folder / f"shards-{digest(manifest['commit'], fingerprint, size)}"
        self._tokens = TokenStream(self._shards, "train", manifest["dtype"], [])
        self._len: int | None = None  # sequences of an epoch, once they are known
        self._wanted = 0  # tokens that have been requested
        self._failure: BaseException | None = None
        self._condition = threading.Condition()
        if is_first_on_machine():
            threading.Thread(target=self._write, name="tokenize", daemon=True).start()

    def positions(self, indices: np.ndarray) -> np.ndarray:
        """Return the sequence of the text that each index stands for: [n] int64. Wait for its tokens."""
        indices = np.asarray(indices, dtype=np.int64)
        with self._condition:
            self._wanted = max(self._wanted, (int(indices.max()) + 1) * self.seq_len)
            self._condition.notify()
        while self._len is None and len(self._tokens) < self._wanted:
            if self._failure is not None:
                raise self._failure
            if record := read_record(self._shards, self._tokens.shards):
                self._tokens.add(record)
            elif self._end() == self._tokens.shards:
                self._len = len(self._tokens) // self.seq_len
                if not self._len:
                    raise ValueError(f"stream shorter than a sequence: lower trainer.seq_len={self.seq_len}")
            else:
                time.sleep(_POLL_SECONDS)
        return indices % self._len if self._len else indices

    def _end(self) -> int | None:
        try:
            return json.loads((self._shards / END).read_text())
        except FileNotFoundError:
            return None

    def _write(self) -> None:
        """Tokenize up to `AHEAD` tokens further than what has been requested, until the text ends."""
        try:
            if self._end() is not None:
                return
            manifest = self._prepared.manifest
            settings = manifest["settings"]
            config = DataConfig(**settings | {"tokenizer": TokenizerConfig(**settings["tokenizer"])})
            source = self._open_unchanged(config)
            folder, tokenizer = self.folder / "tokenizer", self._prepared.tokenizer()
            encoder = make_encoder(tokenizer, folder, config, manifest["dtype"])
            self._shards.mkdir(exist_ok=True)
            count = tokens = 0
            for record in tokenize_source(encoder, source.slices, self._shards):
                count, tokens = count + 1, tokens + record["train"]["tokens"]
                with self._condition:
                    while tokens >= self._wanted + AHEAD:
                        self._condition.wait()
            self._open_unchanged(config)
            write_whole(self._shards / END, json.dumps(count))
        except BaseException as failure:
            self._failure = failure

    def _open_unchanged(self, config: DataConfig) -> Source:
        source = open_source(config, self._prepared.manifest["commit"])
        if source.description != self._prepared.manifest["source"]:
            raise ValueError(f"restore {config.path}: its text has changed since {self.folder} was prepared")
        return source
