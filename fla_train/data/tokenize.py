"""From a chunk to token ids: what a tokenizing process does, in this process or in others.

Light like `chunks`: transformers is imported only for a tokenizer that needs it.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from fla_train.data.chunks import Chunk, Cursor, Document


@dataclass(frozen=True)
class Encoded:
    """D documents of a chunk, the empty ones too.

    Attributes:
        tokens: [sum of lengths], uint16 or uint32: the documents in order, each with its separator.
        lengths: [D] int64, tokens of each document; 0 if it is empty.
        sizes: [D] int64, bytes of each text.
        held_out: [D] bool, whether it belongs to the validation split.
        after: the place in the source behind the chunk.
        fault: what is wrong with the document that should follow the D, if reading ended there.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sizes: np.ndarray
    held_out: np.ndarray
    after: Cursor
    fault: str | None = None


def is_held_out(raw: bytes, validation_fraction: float) -> bool:
    """Whether a document belongs to the validation split: a pure function of its UTF-8 text."""
    return int.from_bytes(hashlib.sha1(raw).digest()[:8], "big") / 2**64 < validation_fraction


def utf8(document: Document) -> bytes:
    """The text's bytes. Raises `ValueError` for what JSON can hold and Unicode can't: lone surrogates."""
    try:
        return document["text"].encode("utf-8")
    except UnicodeEncodeError as failure:
        raise ValueError(
            f"document {document['id']}: not valid Unicode ({failure}); repair or remove it"
        ) from failure


@dataclass
class Encoder:
    """Tokenizes chunks. It travels to other processes as its settings; the tokenizer is built on first use.

    Args:
        backend: content of a tokenizer.json, or None for a tokenizer without one.
        folder: the saved tokenizer.
        separator: id that ends each document, if any.
        dtype: of the tokens.
    """

    backend: str | None
    folder: str
    separator: int | None
    validation_fraction: float
    dtype: str
    _tokenizer: Any = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokenizer": None}

    def __call__(self, chunk: Chunk) -> Encoded:
        """Tokenize the chunk's documents up to the first faulty one."""
        texts, sizes, held_out, fault = [], [], [], None
        try:
            for document in chunk.documents():
                raw = utf8(document)
                texts.append(document["text"])
                sizes.append(len(raw))
                held_out.append(is_held_out(raw, self.validation_fraction))
        except ValueError as failure:
            fault = str(failure)
        tokens, lengths = self._tokens(texts)
        return Encoded(
            tokens, lengths, np.array(sizes, np.int64), np.array(held_out, bool), chunk.after, fault
        )

    def _tokens(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._tokenizer is None:
            self._tokenizer = self._build()
        if self.backend is None:
            from fla_train.data.tokenizers import encode

            encoded = encode(self._tokenizer, texts)
            lengths = [len(ids) for ids in encoded]
        else:
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            lengths = [len(encoding) for encoding in encoded]
        separator = [] if self.separator is None else [self.separator]

        def ids() -> Iterator[list[int]]:
            for text, encoding in zip(texts, encoded, strict=True):
                if text:
                    yield encoding if self.backend is None else encoding.ids
                    yield separator

        ends = [length + len(separator) if text else 0 for text, length in zip(texts, lengths, strict=True)]
        total = np.array(ends, dtype=np.int64)
        return np.fromiter(chain.from_iterable(ids()), dtype=self.dtype, count=int(total.sum())), total

    def _build(self) -> Any:
        if self.backend is None:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(self.backend)
        tokenizer.encode_special_tokens = True  # `</s>` in a text stays text and ends no document
        return tokenizer
