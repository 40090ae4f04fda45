"""Rounding errors of values, and taps that relate them to the results of a program.

Half precision is float16 or bfloat16. A tap is a function of a value and of zeros, the sink. It returns the value,
rounded or unchanged. In the backward pass, it passes the cotangent on. The gradient of the sink is a summary of the
value's rounding: the product of the cotangent and the rounding error, and for float16 also the numbers of elements that
underflow and overflow. JAX adds up the gradients of a sink over the iterations of a scan.

These functions use few operations, because a program may have thousands of taps.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def sink_of(dtype: np.dtype) -> jax.Array:
    """Return the sink of a value that is rounded to ``dtype``."""
    return jnp.zeros(3 if _has_small_range(dtype) else 1)


def _has_small_range(dtype: np.dtype) -> bool:
    return bool(jnp.finfo(dtype).minexp > jnp.finfo(jnp.float32).minexp)


def rounded(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return a value rounded to a narrower floating dtype, without a change of its own dtype.

    XLA may remove a cast to half precision and back. It does not remove ``reduce_precision``, which rounds subnormal
    numbers to 0, so they are rounded by hand.
    """
    info = jnp.finfo(dtype)
    normal = jax.lax.reduce_precision(value, info.nexp, info.nmant)
    if not _has_small_range(dtype):
        return normal
    spacing = float(info.smallest_subnormal)
    subnormal = jax.lax.round(value / spacing, jax.lax.RoundingMethod.TO_NEAREST_EVEN) * spacing
    return jax.lax.select(jax.lax.abs(value) < float(info.smallest_normal), subnormal, normal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tap(dtype: np.dtype, value: jax.Array, is_rounded: jax.Array, sink: jax.Array) -> jax.Array:
    """Return ``value``, rounded to ``dtype`` if ``is_rounded`` is 1 and not 0.

    The gradient of ``sink`` summarises the rounding in both cases. The cotangent of ``value`` is that of the result.
    Elements that overflow do not contribute to the change of the results, because their rounding error is infinite.
    """
    return _forward(dtype, value, is_rounded, sink)[0]


def _forward(
    dtype: np.dtype, value: jax.Array, is_rounded: jax.Array, sink: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    after = rounded(value, dtype)
    error, counts = after - value, None
    if _has_small_range(dtype):
        is_overflow = jnp.isfinite(value) & ~jnp.isfinite(after)
        is_underflow = (after == 0) & (value != 0)
        error = jnp.where(jnp.isfinite(after), error, 0)
        counts = jnp.stack([is_underflow.sum(dtype=jnp.float32), is_overflow.sum(dtype=jnp.float32)])
    result = jax.lax.select(jnp.broadcast_to(is_rounded == 1, value.shape), after, value)
    # The errors of all taps are kept until the backward pass. They are stored as integers, because XLA for CPUs would
    # turn arrays of bfloat16 that a loop stacks into float32.
    bits = jax.lax.bitcast_convert_type(error.astype(jnp.bfloat16), jnp.uint16)
    return result, (bits, counts)


def _backward(
    dtype: np.dtype, residuals: tuple[jax.Array, jax.Array | None], cotangent: jax.Array
) -> tuple[jax.Array, None, jax.Array]:
    bits, counts = residuals
    error = jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(cotangent.dtype)
    # XLA compiles this sum faster than a product of vectors.
    change = jax.lax.reduce_sum(cotangent * error, tuple(range(error.ndim)))[None]
    return cotangent, None, change if counts is None else jnp.concatenate([change, counts])


tap.defvjp(_forward, _backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_if(is_rounded: jax.Array, dtype: np.dtype, value: jax.Array) -> jax.Array:
    """Return ``value``, rounded to ``dtype`` if ``is_rounded``. The derivative is that of an identity."""
    return jax.lax.select(jnp.broadcast_to(is_rounded, value.shape), rounded(value, dtype), value)


@round_if.defjvp
def _derivative(dtype: np.dtype, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return round_if(primals[0], dtype, primals[1]), tangents[1]
