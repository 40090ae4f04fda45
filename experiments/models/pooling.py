"""Max pooling that saves the position of each maximum, not the input.

A position takes a byte.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxmp

# Two different bytes that are not positions in a window.
_OUTSIDE, _NOWHERE = 255, 254


class _Geometry(NamedTuple):
    window: int
    stride: int
    padding: int
    height: int
    width: int


def max_pool(x: jax.Array, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Return the maximum of each square window, like ``flax.linen.max_pool``.

    If several numbers are equal to the maximum, the first one gets the gradient.

    The gradient of ``flax.linen.max_pool`` saves the input, the largest activation of a ResNet, to find the maxima
    again. This function saves a byte for each window instead: the position of the maximum. The gradient at a position
    of the input is a sum over the few windows that cover it, so nothing is scattered. Only reverse mode is supported:
    ``jax.jvp`` of this function raises a TypeError. On a TPU, the function is ``flax.linen.max_pool``, because the
    compiler has kernels for it there that take a fraction of the cycles.

    Args:
      x: (batch, height, width, channels) of any floating dtype.
      window: the side of a window, at most 15.
      stride: the step from one window to the next.
      padding: the rows and columns of padding on each side of the image, less than ``window``. The padding is never a
        maximum.

    Returns:
      (batch, height', width', channels) in the dtype of ``x``; height' is (height + 2·padding − window) // stride + 1.

    Raises:
      TypeError: ``x`` is not floating.
      ValueError: ``x`` does not have four axes or is smaller than a window, or ``window``, ``stride`` or ``padding`` is
        out of range.

    >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0]
    Array([[ 5.,  7.],
           [13., 15.]], dtype=float32)
    """
    if not (1 <= window <= 15 and stride >= 1 and 0 <= padding < window):
        raise ValueError(
            "max_pool takes a window of 1 to 15, a stride of at least 1 and a padding less than the window, got "
            f"window={window}, stride={stride}, padding={padding}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"max_pool takes a floating dtype, got {x.dtype.name}; cast it")
    if x.ndim != 4 or min(x.shape[1:3]) + 2 * padding < window:
        raise ValueError(
            f"max_pool takes (batch, height, width, channels), padded at least as large as the window, got {x.shape} "
            f"with window={window}, padding={padding}"
        )
    if jaxmp.hardware.detect().platform == "tpu":
        return nn.max_pool(x, (window, window), (stride, stride), 2 * [(padding, padding)])
    return _max_pool(x, _Geometry(window, stride, padding, *x.shape[1:3]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _max_pool(x: jax.Array, geometry: _Geometry) -> jax.Array:
    return _forward(x, geometry)[0]


def _forward(x: jax.Array, geometry: _Geometry) -> tuple[jax.Array, jax.Array]:
    """Return the maximum of each window, and its position in the window.

    Positions are counted row by row.
    """
    window, stride, padding, *_ = geometry
    edges = (padding, padding, 0)
    lowest = np.array(-np.inf, x.dtype)
    if np.isnan(lowest):  # a float8 without infinities
        lowest = np.array(jnp.finfo(x.dtype).min, x.dtype)
    padded = jax.lax.pad(x, lowest, ((0, 0, 0), edges, edges, (0, 0, 0)))
    rows, columns = (stride * ((size - window) // stride) + 1 for size in padded.shape[1:3])
    largest = padded[:, :rows:stride, :columns:stride]
    winner = jnp.zeros(largest.shape, jnp.uint8)
    for position in range(1, window * window):
        row, column = divmod(position, window)
        candidate = padded[:, row : row + rows : stride, column : column + columns : stride]
        wins = (candidate > largest) | jnp.isnan(candidate)
        largest = jnp.where(wins, candidate, largest)
        winner = jnp.where(wins, jnp.uint8(position), winner)
    return largest, winner


def _backward(geometry: _Geometry, winner: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    window, stride, padding, height, width = geometry
    reach = -(-window // stride)  # along each axis, a position is covered by at most this many windows
    wide = jnp.float64 if cotangent.dtype == jnp.float64 else jnp.float32
    with jaxmp.precision("float32"):  # so that autocast does not remove the casts to float32
        total = jnp.zeros((winner.shape[0], height, width, winner.shape[3]), wide)
        for down, right in itertools.product(range(reach), repeat=2):
            row, column = ((np.arange(size) + padding) % stride for size in (height, width))
            row, column = row[:, None] + down * stride, column + right * stride
            # In this shift, each input element belongs to one window. `here` is its position there, or _NOWHERE if the
            # window does not cover the element.
            here = np.where((row < window) & (column < window), row * window + column, _NOWHERE).astype(np.uint8)
            shifts = (padding - down * stride, padding - right * stride)
            won = _over(winner, shifts, geometry, _OUTSIDE) == here[..., None]
            total += jnp.where(won, _over(cotangent, shifts, geometry, 0).astype(wide), 0)
        return (total.astype(cotangent.dtype),)


_max_pool.defvjp(_forward, _backward)


def _over(values: jax.Array, shifts: tuple[int, int], geometry: _Geometry, outside: int) -> jax.Array:
    """Return, for each position of the input, the value of a window that covers it.

    ``shifts`` chooses the last window that covers a position, or an earlier window.
    """
    for axis, size, shift in ((1, geometry.height, shifts[0]), (2, geometry.width, shifts[1])):
        repeated = jnp.repeat(values, geometry.stride, axis)
        edges = [(0, 0, 0)] * values.ndim
        edges[axis] = (-shift, size - repeated.shape[axis] + shift, 0)
        values = jax.lax.pad(repeated, jnp.array(outside, values.dtype), edges)
    return values
