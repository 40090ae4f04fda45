"""Cut windows from a text's tokens.

The windows are drawn at random on the device under jit, or evenly spread for evaluation. With ``place``, a batch is on
several devices, and each process cuts out only the windows for its devices. ``place(shape, rows)`` makes an array from
its shape and ``rows``, a function that returns a slice of the rows. The batches are the same as without ``place``, bit
for bit.
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
    """Return batches without end, of windows at random positions.

    A batch depends only on the seed and on the batch's number.

    Args:
      tokens: integers (n,).
      context: the number of tokens that the model sees.
      batch_size: the windows per batch.
      seed: the seed of the positions.
      start: the number of the first batch, counted from 0.
      place: puts a batch on several devices.

    Returns:
      ``context``: int32 (batch, context); ``target``: int32 (batch,), the token that follows.
    """
    return map(_split, sequences(tokens, context + 1, batch_size, seed, start, place=place))


def spread(
    tokens: jax.Array, context: int, batch_size: int, batches: int, *, place: Place | None = None
) -> Iterator[Batch]:
    """Return ``batches`` batches of windows, evenly spread over the text.

    The batches are the same every time.
    """
    return map(_split, spread_sequences(tokens, context + 1, batch_size, batches, place=place))


def sequences(
    tokens: jax.Array, length: int, batch_size: int, seed: int, start: int = 0, *, place: Place | None = None
) -> Iterator[jax.Array]:
    """Yield batches without end, int32 (batch, length), from random positions.

    A batch depends only on the seed and on the batch's number.
    """
    last = _last_start(tokens, length)
    window, key = _windows_on(place, tokens, length), jax.random.key(seed)
    for step in itertools.count(start):
        if place is None:
            yield window(_random_starts(key, step, last, batch_size))
            continue
        with jax.default_device(_host()):  # reading from a GPU would wait for its steps
            starts = np.asarray(_random_starts(jax.random.key(seed), step, last, batch_size))
        yield window(starts)


def spread_sequences(
    tokens: jax.Array, length: int, batch_size: int, batches: int, *, place: Place | None = None
) -> Iterator[jax.Array]:
    """Return ``batches`` batches that are evenly spread over the text.

    A batch is int32 (batch, length). The batches are the same every time.
    """
    last = _last_start(tokens, length)
    starts = np.linspace(0, last, batches * batch_size).astype(np.int32).reshape(batches, batch_size)
    return map(_windows_on(place, tokens, length), starts)


def _windows_on(place: Place | None, tokens: jax.Array, length: int) -> Callable[[np.ndarray | jax.Array], jax.Array]:
    """Return a function that cuts out windows by their start positions.

    The windows are on one device or on several.
    """
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
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
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
