"""Cut windows from a text's tokens.

They are drawn at random on the device, under jit, or evenly spread for evaluation.

Where ``place`` is given, the windows of a batch lie on several devices, and each process cuts out those of its own:
``place(shape, rows)`` makes an array of that shape from a function that has a slice of its rows. The batches are the
same, bit for bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.errors import DataError

Batch = dict[str, jax.Array]
Place = Callable[[tuple[int, ...], Callable[[slice], np.ndarray]], jax.Array]


def windows(
    tokens: jax.Array, context: int, batch_size: int, seed: int, start: int = 0, *, place: Place | None = None
) -> Iterator[Batch]:
    """Batches for ever, of windows at random places; a batch depends on the seed and its number only.

    Args:
      tokens: integers (n,).
      context: tokens that the model sees.
      batch_size: windows a batch.
      seed: of the places.
      start: number of the first batch, counted from 0.
      place: puts a batch on several devices.

    Returns:
      ``context``: int32 (batch, context); ``target``: int32 (batch,), the token that follows.
    """
    return map(_split, sequences(tokens, context + 1, batch_size, seed, start, place=place))


def spread(
    tokens: jax.Array, context: int, batch_size: int, batches: int, *, place: Place | None = None
) -> Iterator[Batch]:
    """So many batches of windows evenly spread over the whole text, for evaluation: the same every time."""
    return map(_split, spread_sequences(tokens, context + 1, batch_size, batches, place=place))


def sequences(
    tokens: jax.Array, length: int, batch_size: int, seed: int, start: int = 0, *, place: Place | None = None
) -> Iterator[jax.Array]:
    """Yield batches for ever, int32 (batch, length), from random places.

    A batch depends on the seed and its number only.
    """
    last = _last_start(tokens, length)
    window, key = _windows_on(place, tokens, length), jax.random.key(seed)
    for step in itertools.count(start):
        if place is None:
            yield window(_random_starts(key, step, last, batch_size))
            continue
        with jax.default_device(_host()):  # to read it from a GPU is to wait for its steps
            starts = np.asarray(_random_starts(jax.random.key(seed), step, last, batch_size))
        yield window(starts)


def spread_sequences(
    tokens: jax.Array, length: int, batch_size: int, batches: int, *, place: Place | None = None
) -> Iterator[jax.Array]:
    """So many batches, int32 (batch, length), evenly spread over the whole text: the same every time."""
    last = _last_start(tokens, length)
    starts = np.linspace(0, last, batches * batch_size).astype(np.int32).reshape(batches, batch_size)
    return map(_windows_on(place, tokens, length), starts)


def _windows_on(place: Place | None, tokens: jax.Array, length: int) -> Callable[[np.ndarray | jax.Array], jax.Array]:
    """From the places where windows start to the windows, on one device or on several."""
    if place is None:
        return lambda starts: _window(tokens, jnp.asarray(starts), length)
    text = np.asarray(tokens)

    def window(starts: np.ndarray | jax.Array) -> jax.Array:
        starts = np.asarray(starts)
        return place((len(starts), length), lambda rows: text[starts[rows, None] + np.arange(length)].astype(np.int32))

    return window


def _host() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None


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
