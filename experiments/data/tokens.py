"""Turn text into tokens: bytes, or pairs of bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data import corpus
from experiments.data.source import DataError

Kind = Literal["bytes", "pairs"]


class Tokenizer(Protocol):
    """Converts text to tokens and back.

    Attributes:
      name: the name of the tokenizer.
      size: the number of tokens.
      end: the number of the token between documents; None if there is no such token.
    """

    name: str
    size: int
    end: int | None

    def encode(self, document: bytes) -> np.ndarray: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


class Bytes:
    """A tokenizer with a token for each byte, and a token between documents.

    >>> Bytes().encode(b"AB").tolist(), Bytes().decode([65, 66])
    ([65, 66], 'AB')
    """

    name, size, end = "bytes", 257, 256

    def encode(self, document: bytes) -> np.ndarray:
        return np.frombuffer(document, np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(byte for byte in tokens if byte < 256).decode(errors="replace")


class Pairs:
    """A tokenizer of pairs of bytes.

    A token is the rank of a pair by its frequency in the training documents. The last token of the vocabulary stands
    for all rarer pairs.

    Args:
      documents: the training documents.
      vocabulary: the number of tokens, 2 to 65,536.

    >>> pairs = Pairs([b"ababcdab", b"cdef"], vocabulary=3)
    >>> pairs.encode(b"abcdef").tolist(), pairs.decode([1, 0, 2])
    ([0, 1, 2], 'cdab�')
    """

    name, end = "pairs of bytes", None

    def __init__(self, documents: Sequence[bytes], vocabulary: int) -> None:
        if not 2 <= vocabulary <= 2**16:
            raise DataError(f"a vocabulary of byte pairs has 2 to 65536 tokens, got --vocabulary {vocabulary}")
        self.size = vocabulary
        counts = np.bincount(np.concatenate([_pairs(document) for document in documents]), minlength=2**16)
        self._most_frequent = np.argsort(-counts, kind="stable")[: vocabulary - 1]
        self._rank = np.full(2**16, vocabulary - 1, np.int32)
        self._rank[self._most_frequent] = np.arange(len(self._most_frequent))

    def encode(self, document: bytes) -> np.ndarray:
        return self._rank[_pairs(document)]

    def decode(self, tokens: Iterable[int]) -> str:
        known = len(self._most_frequent)
        pairs = [int(self._most_frequent[token]).to_bytes(2, "big") if token < known else b"\xff" for token in tokens]
        return b"".join(pairs).decode(errors="replace")


class Text(NamedTuple):
    """A text on the device.

    Attributes:
      train: the tokens of all training documents, uint16 or int32 (n,).
      test: the tokens of all held-out documents.
      tokenizer: the tokenizer.
      bytes_per_token: the bytes per token in the held-out documents.
      origin: a line that describes the text and the tokens.
    """

    train: jax.Array
    test: jax.Array
    tokenizer: Tokenizer
    bytes_per_token: float
    origin: str


@functools.cache
def load(dataset: str, kind: Kind, vocabulary: int) -> Text:
    """Return a text as tokens on the device.

    Args:
      dataset: ``pysource``, or the path of a file or a folder.
      kind: the kind of tokens.
      vocabulary: the number of tokens if they are pairs of bytes.

    Raises:
      DataError: the text is missing or cannot be read.
    """
    documents = corpus.read(dataset)
    tokenizer: Tokenizer = Pairs(documents.train, vocabulary) if kind == "pairs" else Bytes()
    train, test = (_encode(split, tokenizer) for split in (documents.train, documents.test))
    per_token = sum(map(len, documents.test)) / max(1, len(test))
    origin = f"{documents.origin}, {tokenizer.name}"
    return Text(jnp.asarray(train), jnp.asarray(test), tokenizer, per_token, origin)


def _encode(documents: list[bytes], tokenizer: Tokenizer) -> np.ndarray:
    parts = []
    for document in documents:
        parts.append(tokenizer.encode(document))
        if tokenizer.end is not None:
            parts.append(np.asarray([tokenizer.end], np.int32))
    dtype = np.uint16 if tokenizer.size <= 2**16 else np.int32
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def _pairs(document: bytes) -> np.ndarray:
    return np.frombuffer(document[: len(document) // 2 * 2], np.dtype(">u2")).astype(np.int32)
