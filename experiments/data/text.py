"""Cut windows from a text's tokens.

The windows are drawn at random on the device under jit, or evenly spread for evaluation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.source import DataError

Batch = dict[str, jax.Array]


def windows(tokens: jax.Array, context: int, batch_size: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Return batches without end, of windows at random positions.

    A batch depends only on the seed and on the batch's number.

    Args:
      tokens: integers (n,).
      context: the number of tokens that the model sees.
      batch_size: the windows per batch.
      seed: the seed of the positions.
      start: the number of the first batch, counted from 0.

    Returns:
      ``context``: int32 (batch, context); ``target``: int32 (batch,), the token that follows.
    """
    return map(_split, sequences(tokens, context + 1, batch_size, seed, start))


def spread(tokens: jax.Array, context: int, batch_size: int, batches: int) -> Iterator[Batch]:
    """Return ``batches`` batches of windows, evenly spread over the text.

    The batches are the same every time.
    """
    return map(_split, spread_sequences(tokens, context + 1, batch_size, batches))


def sequences(tokens: jax.Array, length: int, batch_size: int, seed: int, start: int = 0) -> Iterator[jax.Array]:
    """Yield batches without end, int32 (batch, length), from random positions.

    A batch depends only on the seed and on the batch's number.
    """
    last, key = _last_start(tokens, length), jax.random.key(seed)
    for step in itertools.count(start):
        yield _window(tokens, _random_starts(key, step, last, batch_size), length)


def spread_sequences(tokens: jax.Array, length: int, batch_size: int, batches: int) -> Iterator[jax.Array]:
    """Return ``batches`` batches that are evenly spread over the text.

    A batch is int32 (batch, length). The batches are the same every time.
    """
    last = _last_start(tokens, length)
    starts = np.linspace(0, last, batches * batch_size).astype(np.int32).reshape(batches, batch_size)
    return (_window(tokens, jnp.asarray(rows), length) for rows in starts)


def _last_start(tokens: jax.Array, length: int) -> int:
    if len(tokens) < length:
        raise DataError(f"a context must be shorter than the text of {len(tokens)} tokens, got --context {length - 1}")
    return len(tokens) - length


@functools.partial(jax.jit, static_argnames="batch_size")
def _random_starts(key: jax.Array, step: int, last: int, batch_size: int) -> jax.Array:
    return jax.random.randint(jax.random.fold_in(key, step), (batch_size,), 0, last + 1)


@functools.partial(jax.jit, static_argnames="length")
def _window(tokens: jax.Array, starts: jax.Array, length: int) -> jax.Array:
    return tokens[starts[:, None] + jnp.arange(length)].astype(jnp.int32)


@jax.jit
def _split(window: jax.Array) -> Batch:
    return {"context": window[:, :-1], "target": window[:, -1]}
