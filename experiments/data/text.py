"""Text on the device: pairs of bytes as tokens, and windows of them drawn at random there, under jit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.errors import DataError
from experiments.data.source import Columns

Batch = dict[str, jax.Array]


class Tokens(NamedTuple):
    """Both splits on the device, int32 (n,): the documents one after the other."""

    train: jax.Array
    test: jax.Array


def on_device(columns: dict[str, Columns], vocabulary: int) -> Tokens:
    """Tokens of a set that :func:`experiments.data.read` returned, on the device.

    A token is a pair of bytes, the rank of that pair by frequency in the training split; the last number of the
    vocabulary stands for every rarer pair.

    Args:
      columns: splits whose column ``source`` is a list of bytes.
      vocabulary: how many tokens there are, 2 to 65,536.
    """
    if not 2 <= vocabulary <= 2**16:
        raise DataError(f"a vocabulary of byte pairs has 2 to 65536 tokens, got --vocabulary {vocabulary}")
    train, test = (_pairs(columns[split]["source"]) for split in ("train", "test"))
    most_frequent = np.argsort(-np.bincount(train, minlength=2**16), kind="stable")[: vocabulary - 1]
    rank = np.full(2**16, vocabulary - 1, np.int32)
    rank[most_frequent] = np.arange(len(most_frequent))
    return Tokens(jnp.asarray(rank[train]), jnp.asarray(rank[test]))


def windows(tokens: jax.Array, context: int, batch_size: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Batches for ever, of windows at random places; a batch depends on the seed and its number only.

    Args:
      tokens: int32 (n,).
      context: tokens that the model sees.
      batch_size: windows a batch.
      seed: of the places.
      start: number of the first batch, counted from 0.

    Yields:
      ``context``: int32 (batch, context); ``target``: int32 (batch,), the token that follows.
    """
    last = _last_start(tokens, context)
    key = jax.random.key(seed)
    for step in itertools.count(start):
        starts = _random_starts(key, step, last, batch_size)
        yield _cut(tokens, starts, context)


def spread(tokens: jax.Array, context: int, batch_size: int, batches: int) -> Iterator[Batch]:
    """So many batches of windows evenly spread over the whole text, for evaluation: the same every time."""
    last = _last_start(tokens, context)
    starts = np.linspace(0, last, batches * batch_size).astype(np.int32).reshape(batches, batch_size)
    for batch in starts:
        yield _cut(tokens, jnp.asarray(batch), context)


def _last_start(tokens: jax.Array, context: int) -> int:
    if len(tokens) <= context:
        raise DataError(f"a context must be shorter than the text of {len(tokens)} tokens, got --context {context}")
    return len(tokens) - context - 1


def _pairs(documents: Sequence[bytes]) -> np.ndarray:
    whole = b"".join(document[: len(document) // 2 * 2] for document in documents)
    return np.frombuffer(whole, np.dtype(">u2")).astype(np.int32)


@functools.partial(jax.jit, static_argnames="batch_size")
def _random_starts(key: jax.Array, step: int, last: int, batch_size: int) -> jax.Array:
    return jax.random.randint(jax.random.fold_in(key, step), (batch_size,), 0, last + 1)


@functools.partial(jax.jit, static_argnames="context")
def _cut(tokens: jax.Array, starts: jax.Array, context: int) -> Batch:
    window = tokens[starts[:, None] + jnp.arange(context + 1)]
    return {"context": window[:, :-1], "target": window[:, -1]}
