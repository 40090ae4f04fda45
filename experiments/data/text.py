"""Windows of a text's tokens, drawn at random on the device, under jit, or evenly spread for evaluation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.errors import DataError

Batch = dict[str, jax.Array]


def windows(tokens: jax.Array, context: int, batch_size: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Batches for ever, of windows at random places; a batch depends on the seed and its number only.

    Args:
      tokens: integers (n,).
      context: tokens that the model sees.
      batch_size: windows a batch.
      seed: of the places.
      start: number of the first batch, counted from 0.

    Returns:
      ``context``: int32 (batch, context); ``target``: int32 (batch,), the token that follows.
    """
    return map(_split, sequences(tokens, context + 1, batch_size, seed, start))


def spread(tokens: jax.Array, context: int, batch_size: int, batches: int) -> Iterator[Batch]:
    """So many batches of windows evenly spread over the whole text, for evaluation: the same every time."""
    return map(_split, spread_sequences(tokens, context + 1, batch_size, batches))


def sequences(tokens: jax.Array, length: int, batch_size: int, seed: int, start: int = 0) -> Iterator[jax.Array]:
    """Batches for ever, int32 (batch, length), from random places: each depends on the seed and its number only."""
    last = _last_start(tokens, length)
    key = jax.random.key(seed)
    for step in itertools.count(start):
        yield _window(tokens, _random_starts(key, step, last, batch_size), length)


def spread_sequences(tokens: jax.Array, length: int, batch_size: int, batches: int) -> Iterator[jax.Array]:
    """So many batches, int32 (batch, length), evenly spread over the whole text: the same every time."""
    last = _last_start(tokens, length)
    starts = np.linspace(0, last, batches * batch_size).astype(np.int32).reshape(batches, batch_size)
    for batch in starts:
        yield _window(tokens, jnp.asarray(batch), length)


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
